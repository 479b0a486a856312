"""Registry of probes by name, one file each. To add a probe, add a file and a line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headtohead.common.errors import UserError, unknown
from headtohead.study.probes import (
    copies,
    corpora,
    decode,
    explain,
    indicators,
    maps,
    phases,
    positions,
    projections,
    skip,
    tasks,
)
from headtohead.study.probes.base import Found, Probe, Subject, Unavailable, number_at

PROBES: dict[str, Probe] = {
    "positions": positions.PROBE,
    corpora.NAME: corpora.PROBE,
    "indicators": indicators.PROBE,
    "maps": maps.PROBE,
    "tasks": tasks.PROBE,
    "skip": skip.PROBE,
    "decode": decode.PROBE,
    "explain": explain.PROBE,
    "projections": projections.PROBE,
    "phases": phases.PROBE,
    "copies": copies.PROBE,
}


def probe_names(given: Any) -> tuple[str, ...]:
    """Return the probes of a study in canonical form, NAME or NAME:ARGUMENT, without duplicates."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f"probes takes a name or a list of names, got {given!r}")
    found = []
    for text in names:
        name, _, argument = text.partition(":")
        if name not in PROBES:
            raise unknown("probe", name, PROBES)
        check = PROBES[name].check
        if check is None and argument:
            raise UserError(f"probe '{name}' takes no argument, got '{argument}'")
        argument = check(argument) if check else ""
        found.append(f"{name}:{argument}" if argument else name)
    return tuple(dict.fromkeys(found))


def check_probes_apply(names: Sequence[str], of: str) -> None:
    """Raise if a probe does not apply to studies `of` corpora or tasks."""
    allowed = [name for name, probe in PROBES.items() if probe.of == of]
    for text in names:
        probe = PROBES[name := text.partition(":")[0]]
        if probe.of != of:
            raise UserError(
                f"probe '{name}' applies to studies of {probe.of}; a study of {of} takes {', '.join(allowed)}"
            )


def is_timed(name: str) -> bool:
    """Return whether a probe measures time, so that its result depends on the machine."""
    name = name.partition(":")[0]
    return name in PROBES and PROBES[name].timed


def needed_data(names: Sequence[str]) -> list[str]:
    """Return the corpora and tasks that probes read."""
    given = [(PROBES[name].needs, argument) for name, _, argument in (text.partition(":") for text in names)]
    return [one for needs, argument in given if needs is not None for one in needs(argument)]


def take(name: str, subject: Subject) -> Found:
    """Return the result of a probe on a trained run."""
    name, _, argument = name.partition(":")
    was_training = subject.model.training
    subject.model.eval()
    try:
        return PROBES[name].measure(subject, argument)
    finally:
        subject.model.train(was_training)


def read_found(name: str, value: Any) -> Found:
    """Return the stored result of a probe; raise ValueError if it is invalid."""
    short = name.partition(":")[0]
    if short not in PROBES:
        raise ValueError(f"no probe {short[:80]}")
    missing = isinstance(value, dict) and "none" in value
    found: Found = msgspec.convert(value, Unavailable if missing else PROBES[short].form)
    return found


__all__ = [
    "PROBES",
    "Found",
    "Probe",
    "Subject",
    "Unavailable",
    "check_probes_apply",
    "is_timed",
    "needed_data",
    "number_at",
    "probe_names",
    "read_found",
    "take",
]
