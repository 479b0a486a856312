"""How flags look in help texts: their default stands in the words about them, not behind every one."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from headtohead.common.errors import UserError


def flag(metavar: str | None = None, name: str | None = None) -> Any:
    """Return the annotation of a flag."""
    return tyro.conf.arg(metavar=metavar, name=name, help_behavior_hint="")


OneWay = Annotated[bool, tyro.conf.FlagCreatePairsOff, flag()]
"""A flag whose opposite is a flag of its own: neither given means something too."""


def yes_or_no(name: str, yes: bool, no: bool) -> bool | None:
    """Return what two opposite flags say; None where neither was given."""
    if yes and no:
        raise UserError(f"--{name} and --no-{name} were both given; one is allowed")
    return yes if yes or no else None
