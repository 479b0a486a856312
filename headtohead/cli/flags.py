"""How flags look in help texts: their default stands in the words about them, not behind every one."""

from __future__ import annotations

from typing import Any

import tyro


def flag(metavar: str | None = None, name: str | None = None) -> Any:
    """Return the annotation of a flag."""
    return tyro.conf.arg(metavar=metavar, name=name, help_behavior_hint="")
