"""`standard` with different initial values: its parameters are drawn under different names.

Used by `benchmarks/calibration.py`: it is equal to `standard` in distribution, so its runs differ from those of `standard`
only as two seeds of one arm do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headtohead.mechanisms.standard import Standard


class Renamed(Standard):
    """Standard attention whose initial values are drawn under different names."""

    def initialise(self, draw: Any) -> None:
        """Draw every start value under a name that `standard` does not use."""

        def renamed(name: str, *given: Any, **named: Any) -> Tensor:
            found: Tensor = draw(f"renamed.{name}", *given, **named)
            return found

        super().initialise(renamed)
