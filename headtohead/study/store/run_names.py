"""Readable names of runs: STUDY/ARM/SEED, with the contest between arm and seed where several have such a run.

    races/quick/standard/1
    races/sizes/sharing:tie=kv/5m/3

An arm is named by its label or its text. The contest is any of its corpus, size, context, branch and rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from headtohead.common.errors import UserError, suggestion
from headtohead.study.store.manifest import Manifest
from headtohead.study.store.run_spec import RunSpec

_TYPED = re.compile(r"[\w.:=,+@%-]+")
"""Labels that a shell takes without quotes."""
_LISTED = 6


@dataclass(frozen=True)
class NamedRun:
    """What the name of a run consists of."""

    run: str
    label: str
    text: str
    """The arm as it was given."""
    seed: int
    place: tuple[tuple[str, str], ...]
    """The contest: corpus, size and so on, by name."""
    also: tuple[str, ...] = ()
    """Other words for parts of the contest, such as the corpus as it was given."""


class RunNames:
    """The names of the runs of one study."""

    def __init__(self, runs: Iterable[NamedRun]) -> None:
        self.runs = list(dict.fromkeys(runs))

    @cached_property
    def names(self) -> dict[str, str]:
        """The name of each run without its study, by id: the arm, what tells its contest apart, the seed."""
        places = [dict(one.place) for one in self.runs]
        apart = [
            key
            for key in dict.fromkeys(key for place in places for key in place)
            if len({place.get(key, "") for place in places}) > 1
        ]
        found: dict[str, str] = {}
        for one, place in zip(self.runs, places, strict=True):
            contest = [place[key] for key in apart if place.get(key)]
            found.setdefault(one.run, "/".join([self._arm(one), *contest, str(one.seed)]))
        return found

    def _arm(self, run: NamedRun) -> str:
        """Return the label of a run's arm, or its text where that is easier to type and names no other arm."""
        if _TYPED.fullmatch(run.label) or len(self._labels[run.text]) > 1:
            return run.label
        return run.text

    @cached_property
    def _labels(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for one in self.runs:
            found.setdefault(one.text, set()).add(one.label)
        return found

    def find(self, name: str, study: str) -> str:
        """Return the id of the run with that name in a study; the error lists the choices."""
        # The label comes first: the text of an arm may be that of others with settings of their own.
        found = self._matching(name, lambda one: one.label) or self._matching(name, lambda one: one.text)
        if len(found) == 1:
            return found[0]
        names = self.names
        if found:
            raise UserError(
                f"'{study}/{name}' is the name of {len(found)} runs; "
                f"give one of {_listed([f'{study}/{names[run]}' for run in found])}"
            )
        close = suggestion(name, names.values())
        raise UserError(f"no run '{name}' in {study}{close} (runs: {_listed(list(names.values()))})")

    def _matching(self, name: str, arm: Callable[[NamedRun], str]) -> list[str]:
        return list(dict.fromkeys(one.run for one in self.runs if _matches(name, arm(one), one)))


def names_of_study(manifest: Manifest) -> RunNames:
    """Return the names of the runs that a study consists of now."""
    texts = {label: text for text, label in manifest.arms}
    return RunNames(
        NamedRun(
            entry.run,
            entry.label,
            texts.get(entry.label, entry.label),
            entry.seed,
            tuple((key, value) for key, value in entry.contest.place.items() if key != "numerics" and value),
            (entry.contest.corpus,),
        )
        for entry in (*manifest.entries, *manifest.trunks)
    )


def names_of_runs(specs: Iterable[RunSpec]) -> RunNames:
    """Return the names of runs without a study.json, such as imported ones."""
    return RunNames(
        NamedRun(
            spec.id,
            spec.label,
            spec.arm,
            spec.seed,
            tuple(
                {
                    "corpus": spec.corpus.label,
                    "size": spec.size.name,
                    "shape": spec.shape,
                    "length": spec.length,
                }.items()
            ),
        )
        for spec in specs
    )


def _matches(name: str, arm: str, run: NamedRun) -> bool:
    """Return whether a name is that of the run if its arm is called so, with any part of its contest."""
    seed = f"/{run.seed}"
    if not name.startswith(f"{arm}/") or not name.endswith(seed):
        return False
    between = name[len(arm) : -len(seed)]
    return not between or _consists(between[1:], [*(value for _, value in run.place), *run.also])


def _consists(text: str, parts: Sequence[str]) -> bool:
    """Return whether a text consists of some of the parts, joined by slashes; parts may contain slashes themselves."""
    return any(
        text == part or (text.startswith(f"{part}/") and _consists(text[len(part) + 1 :], parts))
        for part in parts
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
