"""Base of the substitutes for softmax attention: standard attention's parameters, with one stage replaced.

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
    """Options shared by the substitutes and standard attention."""

    window: ClassVar[int] = 0  # a substitute attends to its whole prefix
    kv_heads: int = option(0, "key/value heads shared by the query heads; 0: the model's setting", low=0)
    qk_norm: bool = option(
        False, "normalize queries and keys per head, with a learned gain, before positions"
    )

    @classmethod
    def examples(cls) -> list[Options]:
        """Every listed value once, grouped keys, and both together."""
        return [*super().examples(), cls(kv_heads=2), cls(kv_heads=1, qk_norm=True)]


class Deconstructed(Standard):
    """A layer with standard attention's projections and initial values."""

    name: ClassVar[str] = ""
    Options: ClassVar[type] = DeconstructedOptions

    @classmethod
    def label(cls, options: Any) -> str:
        """Return the name with the options that differ from their defaults."""
        return default_label(cls.name, options)
