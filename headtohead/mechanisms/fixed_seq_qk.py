"""Queries and keys from one fixed text, the companion, which passes the same blocks: softmax of dot products, and a map
that no input changes.

    X starts as Emb(t), t fixed        q, k = W_q norm(X), W_k norm(X)        v = W_v x
    o_i = W_o sum_j softmax_j(q_i . k_j / sqrt(d)) v_j

FixedSeqQK of Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602. The companion's tokens are the first
of the train split (`offset`, `length`), saved with the weights. The data borrow its map, one for the whole batch; at
other layers of a hybrid it passes like any sequence. Fed its own text this is `standard`. For decoding its queries and
keys are tables, read by position.

Arms: even(fixed_seq_qk)

Claims: Alone 79.1 word perplexity on WikiText against 38.1, last words of LAMBADA 1.4 % right against 22.9; every
second layer standard, 38.5 and 20.3 % (500M, 15B tokens).

Watch: The companion costs a batch one sequence more (`h2h cost ... --batch N`), so FLOPs per token depend on the batch.
Inputs longer than it are refused. A bidirectional model runs the whole companion, however short the input. A model has
one companion. `detach=true` stops gradients at it; the paper does not say. "Over 92 % of standard" counts chance as
skill. One run per cell.
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

    offset: int = option(0, "where in the train split the companion's text begins", low=0)

    @classmethod
    def examples(cls) -> list[Options]:
        """The common ones, and a companion longer than the context."""
        return [*super().examples(), cls(length=70, offset=5)]


class FixedSeqQK(Accompanied):
    """Softmax attention with the queries and keys of a fixed text that passes the same blocks."""

    name: ClassVar[str] = "fixed_seq_qk"
    Options: ClassVar[type] = FixedSeqQKOptions

    def companion_spec(self) -> CompanionSpec:
        """The embeddings of fixed tokens; their table is the model's own, and trains."""
        return CompanionSpec(self.length, "tokens", self.options.offset)
