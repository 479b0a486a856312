"""Base of mechanisms that add one thing to standard attention and keep its projections, options, cache and costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headtohead.mechanisms.contract.base import default_label
from headtohead.mechanisms.contract.cache import Entry
from headtohead.mechanisms.standard import Standard, StandardOptions


@dataclass(frozen=True)
class VariantOptions(StandardOptions):
    """Options shared with standard attention; a subclass lists its own cases."""

    cases: ClassVar[str] = "kv_heads=2,window=3,qk_norm=true"


class Variant(Standard):
    """Standard attention with one addition, whose cache also keeps only the window."""

    name: ClassVar[str] = ""
    Options: ClassVar[type] = VariantOptions

    def cache_spec(self) -> tuple[Entry, ...]:
        """Keys and values of every token, or of the window."""
        each = (self.kv_heads, self.dim)
        return (Entry("k", each, window=self.window), Entry("v", each, window=self.window))

    @classmethod
    def label(cls, options: Any) -> str:
        """Return the name with the options that differ from their defaults."""
        return default_label(cls.name, options)
