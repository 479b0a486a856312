"""The number of this package's arithmetic: bumped whenever a golden loss moves, so that old runs are not mixed in.

1  until 2026-11-15
2  start values do not depend on a solved width (`mechanisms/contract/base.py: seeded_draw`); bidirectional models run the whole
   companion; SO(n) steps are computed in float32 under autocast
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUMERICS = 2


def numerics_of(record: Mapping[str, Any]) -> str:
    """Return the number that a run's record says it was computed with."""
    return str(record["identity"].get("numerics", "unknown"))
