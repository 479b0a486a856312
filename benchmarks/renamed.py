"""`standard` with other start values: its parameters are drawn under other names.

The arm of `benchmarks/calibration.py`: it differs from `standard` in nothing that could make it better or worse, and its runs
differ from those of `standard` as two runs of one arm differ.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headtohead.mechanisms.standard import Standard


class Renamed(Standard):
    """Standard attention whose start values are drawn under other names."""

    def initialise(self, draw: Any) -> None:
        """Draw every start value under another name than `standard` does."""

        def renamed(name: str, *given: Any, **named: Any) -> Tensor:
            found: Tensor = draw(f"renamed.{name}", *given, **named)
            return found

        super().initialise(renamed)
