"""Version number of the numerics: incremented when a golden loss changes, so that old runs are not mixed with new ones.

1  until 2026-11-15
2  initial values do not depend on a solved width (`mechanisms/contract/base.py: seeded_draw`); bidirectional models run
   the whole companion; SO(n) steps are computed in float32 under autocast
"""

from __future__ import annotations

NUMERICS = 2
