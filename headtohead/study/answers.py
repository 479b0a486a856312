"""The words of an answer to a claim."""

from __future__ import annotations

from collections.abc import Sequence

SUPPORTED, CONTRADICTED, OPEN = "supported", "contradicted", "open"
PUBLISHED, REDUCED, NOT_RUN = "published scale", "reduced scale", "not run"
SMOKE = "smoke proves that the machinery runs and decides nothing"


def all_of(words: Sequence[str]) -> str:
    """Return what several criteria come to: all must hold, and one that fails is enough."""
    if CONTRADICTED in words:
        return CONTRADICTED
    return SUPPORTED if words and all(word == SUPPORTED for word in words) else OPEN
