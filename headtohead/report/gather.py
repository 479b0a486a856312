"""Collect the data of a report from a study's directory, as rows for charts and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headtohead.common.errors import UnreadableFile
from headtohead.common.memory import gc_paused
from headtohead.common.numbers import short_count, short_time
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.evaluation.tasks import MARGINS
from headtohead.study.judge.verdict import Verdict
from headtohead.study.probes import Found
from headtohead.study.store.manifest import METRIC, Contest, Manifest
from headtohead.study.store.result import NO_COST, Cost, RunResult, Score
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store
from headtohead.training.circuit_rates import with_words
from headtohead.training.trainer import LOGGED_POINTS

Row = dict[str, Any]
T = TypeVar("T")
Results = Mapping[str, RunResult]
"""By run id."""
_ROWS_READ = 100_000
"""Logged rows read per contest; with more, only every n-th row is read."""
MAX_DRAWN = 40
"""Arms in the figures of a contest; tables on the page list all, folded if there are more."""


@dataclass
class ArmFacts:
    """One arm in one contest."""

    label: str
    text: str
    spec: RunSpec | None
    """One of its runs, if any has started."""
    planned: int
    results: dict[int, RunResult]
    costs: list[Cost]
    curves: dict[int, list[LoggedRow]]
    """Rows with a loss, by seed."""
    probes: dict[str, dict[int, Found]] = field(default_factory=dict)
    """Probe results by probe name and seed."""

    def finished(self) -> dict[int, Score]:
        """Return the test scores of its completed runs by seed."""
        scores = {seed: result.tested for seed, result in sorted(self.results.items())}
        return {seed: score for seed, score in scores.items() if score is not None}

    def scores(self, metric: str) -> dict[int, float]:
        """Return the test scores of its completed runs by seed."""
        return {seed: score.values[metric] for seed, score in self.finished().items()}

    def tokens_per_byte(self) -> float:
        """Return tokens per byte on the test split, which converts bits per token to bits per byte; 1 for a task."""
        score = next(iter(self.finished().values()), None)
        return 1.0 if score is None or score.of_task else score.values["tokens"] / score.values["bytes"]

    def found(self, kind: type[T]) -> dict[int, list[T]]:
        """Return the results of a probe, which are of type `kind`, by seed; it may be taken with several arguments."""
        rows: dict[int, list[T]] = {}
        for seeds in self.probes.values():
            for seed, row in seeds.items():
                if isinstance(row, kind):
                    rows.setdefault(seed, []).append(row)
        return dict(sorted(rows.items()))

    def mean_cost(self, key: str) -> float | None:
        """Return the mean of a measured cost over its runs."""
        values = [float(value) for cost in self.costs if (value := getattr(cost, key)) is not None]
        return statistics.fmean(values) if values else None


def drawn_labels(manifest: Manifest, verdicts: Sequence[Verdict]) -> list[str]:
    """Return the arms in the figures of a contest: all, or the baseline, the primary arm and those with the best means.

    `verdicts` are the contest's; without them, the first arms of the study are drawn.
    """
    labels = [label for _, label in manifest.arms]
    if len(labels) <= MAX_DRAWN:
        return labels
    means = {
        row.label: row.mean if row.better == "lower" else -row.mean
        for row in verdicts
        if row.mean is not None
    }
    always = (manifest.baseline, manifest.primary)
    ranked = sorted(labels, key=lambda label: (label not in always, means.get(label, math.inf)))
    chosen = set(ranked[:MAX_DRAWN])
    return [label for label in labels if label in chosen]


@contextmanager
def _noted(damage: list[str]) -> Iterator[None]:
    """Add an unreadable file to `damage` and continue."""
    try:
        yield
    except UnreadableFile as error:
        damage.append(str(error))


@gc_paused()
def gather(
    path: Path,
    manifest: Manifest,
    contest: Contest,
    results: Results,
    damage: list[str],
    verdicts: Sequence[Verdict] = (),
) -> list[ArmFacts]:
    """Return the arms of a contest with the stored data of their runs, and the curves of those that are drawn.

    Unreadable files are added to `damage`.
    """
    store = Store(path)
    arms = arms_with_results(manifest, contest, results)
    drawn = set(drawn_labels(manifest, verdicts))
    runs = sum(len(manifest.runs(contest, label)) for label in drawn)
    every = max(1, math.ceil(runs * LOGGED_POINTS / _ROWS_READ))
    for facts in arms:
        for seed, run_id in manifest.runs(contest, facts.label).items():
            run = store.run(run_id)
            if facts.spec is None and (run.path / "spec.json").is_file():
                with _noted(damage):
                    facts.spec = run.spec()
            for name in manifest.probes if run_id in results else ():
                with _noted(damage):
                    if (found := run.probe(name)) is not None:
                        facts.probes.setdefault(name, {})[seed] = found
            if (cost := run.costs(results.get(run_id), damage)) != NO_COST:
                facts.costs.append(cost)
            with _noted(damage):
                rows = run.curve(results.get(run_id), every, damage) if facts.label in drawn else []
                if curve := [row for row in rows if row.nats is not None]:
                    facts.curves[seed] = curve
        if facts.spec is None:
            facts.curves = {}
    return arms


def arms_with_results(manifest: Manifest, contest: Contest, results: Results) -> list[ArmFacts]:
    """Return the arms of a contest with the results of their runs and nothing else."""
    arms = []
    for text, label in manifest.arms:
        planned = manifest.runs(contest, label)
        found = {seed: results[run] for seed, run in planned.items() if run in results}
        arms.append(ArmFacts(label, text, None, len(planned), found, [], {}))
    return arms


def arm_rows(arms: list[ArmFacts], metric: str = METRIC) -> list[Row]:
    """Return one table row of results and costs per arm; further metrics of a task are in `others`."""
    rows = []
    for arm in arms:
        done = [score.values for score in arm.finished().values()]
        means = {
            name: statistics.fmean(row[name] for row in done)
            for name in dict.fromkeys((metric, "nats", "perplexity", *MARGINS))
            if done and name in done[0]
        }
        spec, rate, seconds = arm.spec, arm.mean_cost("tokens_per_second"), arm.mean_cost("train_seconds")
        compiling = arm.mean_cost("compile_seconds")
        rows.append(
            {
                "label": arm.label,
                "text": arm.text,
                "runs": f"{len(done)}/{arm.planned}",
                "score": means.get(metric),
                "nats": means.get("nats"),
                "perplexity": means.get("perplexity") if metric == METRIC else None,
                "others": {name: means[name] for name in MARGINS if name != metric and name in means},
                "spread": statistics.stdev(row[metric] for row in done) if len(done) > 1 else None,
                "parameters": spec and spec.parameters,
                "flops": spec and spec.flops_per_token,
                "flops_source": spec.flops_source if spec else "",
                "cache": spec and spec.cache_bytes_per_token,
                "rate": rate,
                "seconds": seconds,
                "compiling": short_time(compiling) if compiling else "",
                "tokens": spec and spec.training.tokens,
                "epochs": next((result.epochs for result in arm.results.values()), None),
            }
        )
    return rows


def configuration(arms: list[ArmFacts]) -> tuple[list[tuple[str, str]], list[Row]]:
    """Return settings equal for all arms as (name, value), and differing ones as one row per setting."""
    tables = {arm.label: _settings(arm.spec) for arm in arms if arm.spec}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    equal, different = [], []
    for name in names:
        values = {label: table.get(name, "–") for label, table in tables.items()}
        if len(set(values.values())) == 1:
            equal.append((name, next(iter(values.values()))))
        else:
            different.append({"name": name, "values": values})
    return equal, different


@gc_paused()
def environments(path: Path, manifest: Manifest, damage: list[str]) -> list[Row]:
    """Return the distinct environments of the runs, with the number of runs in each; unreadable files are added to `damage`."""
    store = Store(path)
    counts: dict[tuple[tuple[str, str], ...], set[tuple[str, str]]] = {}
    for run_id in sorted({entry.run for entry in manifest.entries}):
        for start in store.run(run_id).environments(damage):
            key = tuple(
                (name, str(getattr(start, name)))
                for name in ("commit", "headtohead", "python", "torch", "device", "threads", "attention")
            )
            counts.setdefault(key, set()).add((run_id, start.date[:10]))
    return [
        {
            **dict(key),
            "runs": len({run for run, _ in pairs}),
            "dates": ", ".join(sorted({day for _, day in pairs})),
        }
        for key, pairs in counts.items()
    ]


def _settings(spec: RunSpec) -> dict[str, str]:
    layers, cache, size = spec.layers, spec.cache_bytes_per_token, spec.size.as_dict()
    flat = {"mechanism": layers[0] if len(set(layers)) == 1 else ", ".join(layers)}
    flat["parameters"] = f"{spec.parameters:,}"
    flat["forward FLOPs per token (causal)"] = short_count(spec.flops_per_token)
    flat["cache bytes per token (bf16)"] = "no cache" if cache is None else f"{cache:,}"
    flat["version of the cost formulas"] = str(spec.formulas)
    flat |= {name: str(size[name]) for name in ("width", "layers", "heads", "context", "vocabulary")}
    flat["feed-forward width"] = str(size["ffn"])
    flat |= {f"model: {name}": str(value) for name, value in size["settings"].items()}
    flat |= {f"training: {name}": str(value) for name, value in with_words(spec.training.as_dict()).items()}
    return flat
