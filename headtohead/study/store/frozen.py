"""study.lock.json: the plan before the first run, so that a resumed study has the same runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from headtohead.common.errors import DamagedFile, MissingFile
from headtohead.common.schema import read_document, write_document
from headtohead.study.store.manifest import Rate, rename_scores
from headtohead.study.store.shared import exclusive

NAME = "study.lock.json"


class SolvedArm(Struct, frozen=True, kw_only=True):
    """The numbers that the shape and length rules solved for an arm in a contest."""

    arm: str
    contest: str
    layers: tuple[str, ...] | UnsetType = UNSET
    width: int | UnsetType = UNSET
    """The first locks do not have it, nor the layers and the cache."""
    ffn: int
    parameters: int
    cache_bytes_per_token: int | float | UnsetType | None = UNSET
    tokens: int
    steps: int


class PlannedSeeds(Struct, omit_defaults=True):
    """The seeds of one comparison, and those added after results existed."""

    seeds: list[int]
    added: list[int]
    solved: list[SolvedArm] = []


class FrozenSeconds(Struct, frozen=True, omit_defaults=True):
    """The measured seconds per step of one arm."""

    seconds: Annotated[float, Meta(gt=0)]
    spread: Annotated[float, Meta(ge=0)]
    where: str
    arm: str = ""
    size: str = ""
    steps: int = 0


class Lock(Struct, omit_defaults=True):
    """What a study has frozen."""

    plans: dict[str, PlannedSeeds]
    """By digest of what is compared."""
    recovered: list[int] | None = None
    """Seeds that a repaired lock took from study.json; all others count as added."""
    seconds: dict[str, FrozenSeconds] = {}
    tuning: dict[str, list[Rate]] = {}
    """Rows of tuned rates, by digest of the trials."""
    stacked: bool | None = None
    """Whether there are rows of populations; decides for all contests in locks without `populations`."""
    populations: dict[str, bool] = {}
    """Whether the runs of a contest, or of its tuning, are rows of populations, by its title; empty if none are."""


def read_lock(folder: Path) -> Lock:
    """Return the lock of a study, without plans if there is none.

    Raise DamagedFile if damaged, since it records which seeds were planned in advance.
    """
    path = folder / NAME
    remedy = f"h2h doctor {folder} restores it from study.json"
    try:
        record = read_document(path)
        for rows in record.get("tuning", {}).values() if isinstance(record, dict) else ():
            rename_scores(rows)
        return msgspec.convert(record, Lock)
    except MissingFile:
        return Lock({})
    except DamagedFile as error:
        raise DamagedFile(f"{error}; {remedy}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedFile(f"damaged file {path}: no valid plans ({error}); {remedy}") from None


def write_lock(folder: Path, lock: Lock) -> None:
    """Write the lock of a study."""
    write_document(folder / NAME, msgspec.to_builtins(lock))


@contextmanager
def changing_lock(folder: Path) -> Iterator[Lock]:
    """Yield the lock of a study, empty if there is none, and write it back; no other process writes in between."""
    with exclusive(folder):
        lock = read_lock(folder)
        yield lock
        write_lock(folder, lock)


def frozen_population(lock: Lock, title: str) -> bool | None:
    """Return whether the runs of a contest of this title are rows of populations, or None if it is not decided."""
    if lock.plans and not lock.populations:
        return bool(lock.stacked)
    return lock.populations.get(title)


def valid_seconds(given: Any) -> dict[str, FrozenSeconds]:
    """Return the valid rows of the seconds per step."""
    found = {}
    for key, row in given.items() if isinstance(given, Mapping) else ():
        try:
            found[key] = msgspec.convert(row, FrozenSeconds)
        except msgspec.ValidationError:
            continue
    return found
