"""study.lock.json: the plan before the first run, so that a resumed study has the same runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile, MissingFile
from headtohead.common.schema import read_document, write_document
from headtohead.study.store.shared import exclusive

NAME = "study.lock.json"


def read_lock(path: Path) -> dict[str, Any]:
    """Return the lock, without plans if there is none.

    Raise DamagedFile if damaged, since it records which seeds were planned in advance.
    """
    remedy = f"h2h doctor {path.parent} restores it from study.json"
    try:
        lock = read_document(path)
    except MissingFile:
        return {"plans": {}}
    except DamagedFile as error:
        raise DamagedFile(f"{error}; {remedy}") from None
    try:
        good = all(
            all(isinstance(seed, int) for seed in (*entry["seeds"], *entry["added"]))
            for entry in lock["plans"].values()
        ) and all(_measured(row) for row in lock.get("seconds", {}).values())
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise DamagedFile(f"damaged file {path}: no valid plans; {remedy}")
    return dict(lock)


@contextmanager
def changing_lock(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lock of a study, empty if there is none, and write it back; no other process writes in between."""
    path = folder / NAME
    with exclusive(folder):
        lock = read_lock(path)
        yield lock
        write_document(path, lock)


def frozen_seconds(folder: Path) -> dict[str, Any]:
    """Return the seconds per step in the lock of a study."""
    return dict(read_lock(folder / NAME).get("seconds", {}))


def frozen_population(folder: Path) -> bool | None:
    """Return whether the runs of a planned study are rows of populations, or None if there is no plan."""
    lock = read_lock(folder / NAME)
    return bool(lock.get("stacked", False)) if lock.get("plans") else None


def valid_seconds(given: Any) -> dict[str, Any]:
    """Return the valid rows of the seconds per step."""
    try:
        return {key: row for key, row in given.items() if _measured(row)}
    except (KeyError, TypeError, AttributeError):
        return {}


def _measured(row: Any) -> bool:
    """Return whether a row is a valid step-time measurement."""
    numbers = all(isinstance(row[key], int | float) and row[key] >= 0 for key in ("seconds", "spread"))
    return numbers and row["seconds"] > 0 and isinstance(row["where"], str)
