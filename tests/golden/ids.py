"""Record the run ids and lock keys that planning computes for the studies of `headtohead/studies/`, on small synthetic data.

    python -m tests.golden.ids        # writes tests/golden/ids.json

Ids cover the content of corpora and tokenizers, which not every machine has (`stdlib` differs between Python versions). So
corpora and tasks read from files are replaced by stand-ins whose content digest is derived from their name, and learning
rates are tuned on synthetic scores and step times. All other parts of an identity are the real ones. Only this file patches
the functions through which planning loads data; ids.json does not depend on them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from headtohead.common.files import digest
from headtohead.data.shards import Split
from headtohead.data.tasks import registry as find
from headtohead.data.tasks.base import Example, Task
from headtohead.data.tokenizers import Bytes
from headtohead.study.claims.paper import read_paper, sister
from headtohead.study.config.shipped import shipped_studies
from headtohead.study.config.spec import StudySpec, build_study, read_study
from headtohead.study.plan import dataset as datasets
from headtohead.study.plan import freeze, tuning
from headtohead.study.plan import planner as plan
from headtohead.study.plan import step_timing as step_times
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan, Rates
from headtohead.study.store import frozen
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import RunDirectory, Store
from tests.results import run_result

ROOT = Path(__file__).parents[2]
IDS = Path(__file__).with_name("ids.json")
_TOKENS = 4096
"""Tokens in every split of a stand-in: more than the longest context."""
_START = "0123456789abcdef"
"""The id of the run from which the models of some studies start."""


class _Tokenizer(Bytes):
    """A stand-in for a tokenizer: `bytes`, or `bpe:N` with N tokens."""

    def __init__(self, name: str) -> None:
        self.name, self.digest = name, digest(f"stand-in {name}")
        self.vocabulary = 256 if name == "bytes" else int(name.partition(":")[2])


class _Corpus:
    """A stand-in for a prepared corpus: 1 byte per token, or 4 with a trained tokenizer."""

    def __init__(self, name: str, tokenizer: str, **_: Any) -> None:
        self.name = self.label = name
        self.tokenizer, self.notes = _Tokenizer(tokenizer), {}
        tokens = np.zeros(_TOKENS, dtype=np.uint16)
        each = _TOKENS * (1 if tokenizer == "bytes" else 4)
        parts = ("train", "valid", "test")
        self.splits = {part: Split(tokens, np.array([0], dtype=np.uint64), each) for part in parts}
        self.content = digest(f"stand-in {name} {tokenizer}")


def _task(name: str, tokenizer: str, context: int, **how: Any) -> Task:
    """Return a synthetic task unchanged, and a stand-in for a task read from files."""
    if name not in find.KINDS:
        return _prepare_task(name, tokenizer, context, **how)
    kind = find.KINDS[name]
    tokens, relevant = np.zeros(16, dtype=np.int64), np.ones((1, 16), dtype=bool)
    if kind.classes:
        examples = [Example(tokens, relevant, label) for label in range(len(kind.classes))] * 64
    else:
        targets = np.where(np.arange(16) < 12, -1, 0)
        examples = [Example(tokens, relevant, targets=targets, prompt=12, answers=("a",))] * 64
    splits = dict.fromkeys(("train", "valid", "test"), examples)
    found = _Tokenizer(tokenizer)
    content = digest(f"stand-in {name} {tokenizer} {context}")
    return Task(name, kind.about, kind.classes, found.vocabulary, splits, {}, content, found, kind.metric)


_prepare_task = plan.prepare_task


class _Start:
    """A stand-in for the trained run that models start from."""

    run, tokenizer_name, folder = _START, "bytes", RunDirectory(Path(_START))


@contextmanager
def stand_ins() -> Iterator[None]:
    """Replace every external input of planning: data, trained runs, clocks."""

    def samples(self: Any, runs: list[Any], layers: Any, dataset: Any, path: str) -> Any:
        """Return one second per TFLOP, twice that on the plain path."""
        seconds = [run.flops_per_token * 1e-12 * (2 if path == "plain" else 1) for run in runs]
        return np.repeat(np.array(seconds)[:, None], 8, axis=1)

    with (
        mock.patch.object(plan, "prepare", _Corpus),
        mock.patch.object(plan, "prepare_task", _task),
        mock.patch.object(plan, "find_start", return_value=_Start()),
        mock.patch.object(plan, "check_compatible"),
        mock.patch.object(plan, "check_available"),
        mock.patch.object(plan, "corpus_statistics", return_value={}),
        mock.patch.object(datasets, "reference_lines", return_value={}),
        mock.patch.object(step_times.FrozenStepTimes, "_measure", samples),
    ):
        yield


class _Scores(Store):
    """A store in which every run has a score, the best at the rate in the middle of the grid."""

    def __init__(self, path: Path, spec: StudySpec) -> None:
        super().__init__(path)
        self.spec, self.scores = spec, dict[str, RunResult]()

    def finish(self, planned: Plan) -> None:
        """Mark the runs of a plan as done, with synthetic scores."""
        assert self.spec.tune is not None
        middle = self.spec.tune.lr[len(self.spec.tune.lr) // 2]
        for entry in planned.entries:
            measure = planned.measure(entry.contest)
            best = planned.runs[entry.run].training.lr == middle
            score = float(best if measure.better == "higher" else not best)
            self.scores[entry.run] = run_result(valid={measure.name: score})

    def results(self, ids: list[str], damage: Any = None) -> dict[str, RunResult]:
        """Return the scores."""
        return {run_id: self.scores[run_id] for run_id in ids}


def identities(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of a study: runs of the first seed, a digest of all ids, the keys of the lock."""
    spec = build_study(settings)
    with tempfile.TemporaryDirectory() as folder, stand_ins():
        path = Path(folder)
        timed = step_times.FrozenStepTimes(path, ExecutionSettings(device="cpu"))
        tuned: list[str] = []

        def planned(one: StudySpec, rates: Rates | None = None) -> Plan:
            return plan.plan_study(one, rates=rates, step_times=timed)

        rates = None
        if spec.tune is not None:
            store = _Scores(path, spec)
            grid = spec.tune.lr
            key = tuning.tuning_key(spec, planned(tuning.grid_spec(spec, grid[:1])))
            trials = planned(tuning.grid_spec(spec, grid))
            store.finish(trials)
            rows = tuning.trials(spec, trials, store, grid)
            assert tuning.extended(grid, rows) == grid
            rates, tuned = tuning.freeze_tuning(path, key, rows).rates(), sorted(store.scores)
        made = planned(spec, rates)
        freeze.planned_seeds(path, made, started=False)
        keys = json.loads((path / frozen.NAME).read_text())
    runs: dict[str, dict[str, str]] = {}
    for entry in (*made.trunks, *made.entries):
        if entry.seed == spec.seeds[0]:
            runs.setdefault(entry.contest.title, {})[entry.label] = entry.run
    every = sorted(made.runs)
    return {
        "runs": runs,
        "all": f"{len(every)} runs {digest(' '.join(every))[:16]}",
        **({"tuning runs": f"{len(tuned)} runs {digest(' '.join(tuned))[:16]}"} if tuned else {}),
        "lock": {part: sorted(keys[part]) for part in ("plans", "tuning", "seconds") if part in keys},
    }


@cache
def studies() -> dict[str, dict[str, Any]]:
    """Return the settings of every study in `headtohead/studies/`; for a paper, those of every scale and study in it."""
    found: dict[str, dict[str, Any]] = {}
    for path in shipped_studies().values():
        values = read_study(path)
        if "claim" not in values:
            found[path.stem] = {"name": path.stem} | dict(values)
            continue
        paper = read_paper(path)
        for scale in paper.scales:
            for name, settings in paper.studies(scale).items():
                given = settings | ({"from": _START} if sister(settings) else {})
                found[f"{path.stem}, {scale}, {name}"] = given
    return found


def main() -> None:
    """Write the ids of every study."""
    found = {}
    for name, settings in studies().items():
        print(name, file=sys.stderr)
        found[name] = identities(settings)
    IDS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
