"""Queries and keys from one fixed text: X starts as Emb(t), t the first tokens of the train split.

FixedSeqQK of Xue et al., arXiv 2510.11602: softmax of dot products, and a map that no input changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headtohead.mechanisms.base import CompanionSpec
from headtohead.mechanisms.companion import Accompanied, AccompaniedOptions
from headtohead.mechanisms.options import Options, option


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
