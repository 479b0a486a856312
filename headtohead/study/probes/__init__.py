"""Probes by name, one file each: a new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError, unknown
from headtohead.study.probes import corpora, decode, explain, indicators, maps, positions, skip, tasks
from headtohead.study.probes.base import NONE, Found, Probe, Subject, fits, number_at

PROBES: dict[str, Probe] = {
    "positions": positions.PROBE,
    corpora.NAME: corpora.PROBE,
    "indicators": indicators.PROBE,
    "maps": maps.PROBE,
    "tasks": tasks.PROBE,
    "skip": skip.PROBE,
    "decode": decode.PROBE,
    "explain": explain.PROBE,
}


def probe_names(given: Any) -> tuple[str, ...]:
    """Return the probes that a study asks for, each once and in its one spelling: NAME or NAME:ARGUMENT."""
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
    """Refuse probes that do not serve the runs of a study `of` corpora or tasks."""
    serving = [name for name, probe in PROBES.items() if probe.of == of]
    for text in names:
        probe = PROBES[name := text.partition(":")[0]]
        if probe.of != of:
            raise UserError(
                f"probe '{name}' is of studies of {probe.of}; a study of {of} takes {', '.join(serving)}"
            )


def check_probes_ready(names: Sequence[str], data_dir: str | Path | None) -> None:
    """Refuse probes that could not be taken when the runs are trained: what they need is not at hand."""
    for text in names:
        name, _, argument = text.partition(":")
        if (ready := PROBES[name].ready) is not None:
            ready(argument, data_dir)


def take(name: str, subject: Subject) -> Found:
    """Return what a probe finds in a trained run."""
    name, _, argument = name.partition(":")
    was_training = subject.model.training
    subject.model.eval()
    try:
        return PROBES[name].measure(subject, argument)
    finally:
        subject.model.train(was_training)


def is_valid(name: str, found: Any) -> bool:
    """Return whether something has the form of what a probe finds."""
    short = name.partition(":")[0]
    return short in PROBES and (fits(found, NONE) or fits(found, PROBES[short].form))


__all__ = [
    "NONE",
    "PROBES",
    "Found",
    "Probe",
    "Subject",
    "check_probes_apply",
    "check_probes_ready",
    "fits",
    "is_valid",
    "number_at",
    "probe_names",
    "take",
]
