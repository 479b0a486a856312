"""What the substitutes for softmax attention share: standard attention's parameters, one stage of it replaced.

Xue, Moosavi, Aletras, "Deconstructing Attention", arXiv 2510.11602: token mixing, the form of the weights, their
dependence on the sequence, and queries and keys of this layer are removed one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headtohead.mechanisms.contract.base import default_label
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.standard import Standard


@dataclass(frozen=True)
class DeconstructedOptions(Options):
    """Options that the substitutes have in common with standard attention."""

    window: ClassVar[int] = 0  # a substitute sees its whole prefix
    kv_heads: int = option(
        0, "key/value heads shared by the query heads; 0: as many as the model says", low=0
    )
    qk_norm: bool = option(False, "norm queries and keys per head, with a learned gain, before positions")

    @classmethod
    def examples(cls) -> list[Options]:
        """Every listed value once, grouped keys, and both together."""
        return [*super().examples(), cls(kv_heads=2), cls(kv_heads=1, qk_norm=True)]


class Deconstructed(Standard):
    """A layer with standard attention's projections, and its start values."""

    name: ClassVar[str] = ""
    Options: ClassVar[type] = DeconstructedOptions

    @classmethod
    def label(cls, options: Any) -> str:
        """Return the name with the options that were changed."""
        return default_label(cls.name, options)
