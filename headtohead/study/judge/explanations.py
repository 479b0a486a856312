"""Where a study's arms attend on their tasks: results of the probe `explain`, as means over seeds with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from headtohead.common.errors import DamagedFile
from headtohead.study.judge.intervals import over_seeds
from headtohead.study.probes.explain import Explained
from headtohead.study.store.manifest import Contest, Manifest
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import Store


@dataclass(frozen=True)
class ArmExplanation:
    """One arm in one contest."""

    contest: Contest
    label: str
    seeds: tuple[int, ...]
    found: dict[str, Any]
    """The fields listed in study/probes/explain.py, each number as {mean, low, high, n} over the seeds."""

    def mean(self, path: str) -> float | None:
        """Return the mean at a path such as `explanations.rollout.mass`, or None if there is none."""
        value: Any = self.found
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return float(value["mean"]) if isinstance(value, dict) and "mean" in value else value


def study_explanations(
    store: Store, manifest: Manifest, results: Mapping[str, RunResult]
) -> list[ArmExplanation]:
    """Return the arms of every contest on which the probe was taken; damaged files are left out."""
    names = [name for name in manifest.probes if name.partition(":")[0] == "explain"]
    rows = []
    for contest in manifest.contests() if names else ():
        for _, label in manifest.arms:
            found = {}
            for seed, run in manifest.runs(contest, label).items():
                with suppress(DamagedFile):
                    one = store.run(run).probe(names[0]) if run in results else None
                    if isinstance(one, Explained):
                        found[seed] = to_builtins(one)
            if found:
                rows.append(ArmExplanation(contest, label, tuple(found), over_seeds(list(found.values()))))
    return rows
