"""Queries and keys from one fixed text, the companion, which passes through the same blocks: softmax of dot products, with
an attention map that does not depend on the input.

    X starts as Emb(t), t fixed        q, k = W_q norm(X), W_k norm(X)        v = W_v x
    o_i = W_o sum_j softmax_j(q_i . k_j / sqrt(d)) v_j

FixedSeqQK of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602. The companion's tokens are the first of
the train split (`offset`, `length`), saved with the weights. The whole batch uses its map; in the other layers of a hybrid
it is processed like any sequence. With its own text as input, this equals `standard`. In decoding its queries and keys are
tables, indexed by position.

Arms: even(fixed_seq_qk)

Claims: Used in every layer, 79.1 word perplexity on WikiText against 38.1, and 1.4 % accuracy on the last words of LAMBADA
against 22.9; with every second layer standard, 38.5 and 20.3 % (500M, 15B tokens).

Watch: The companion adds one sequence to the cost of a batch (`h2h cost ... --batch N`), so FLOPs per token depend on the
batch size. Longer inputs are rejected. A bidirectional model runs the whole companion, however short the input. A model has
one companion. `detach=true` stops gradients at it; the paper does not specify this. "Over 92 % of standard" counts chance
accuracy as skill. One run per cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headtohead.mechanisms.contract.base import CompanionSpec
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.families.companion import Accompanied, AccompaniedOptions


@dataclass(frozen=True)
class FixedSeqQKOptions(AccompaniedOptions):
    """Options of queries and keys from a fixed text."""

    offset: int = option(0, "offset of the companion's text in the train split", low=0)

    @classmethod
    def examples(cls) -> list[Options]:
        """Return the shared examples, and a companion longer than the context."""
        return [*super().examples(), cls(length=70, offset=5)]


class FixedSeqQK(Accompanied):
    """Softmax attention with the queries and keys of a fixed text that passes through the same blocks."""

    name: ClassVar[str] = "fixed_seq_qk"
    Options: ClassVar[type] = FixedSeqQKOptions

    def companion_spec(self) -> CompanionSpec:
        """The embeddings of fixed tokens; they come from the model's own trained table."""
        return CompanionSpec(self.length, "tokens", self.options.offset)
