"""Run, open, watch and examine studies."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headtohead.common.deprecation import old_names
from headtohead.common.errors import MissingFile, UnreadableFile, UserError
from headtohead.common.files import digest, digest_file, open_regular, write_atomic, write_json
from headtohead.common.numbers import parse_duration
from headtohead.common.progress import choose_display, progress_bar
from headtohead.common.schema import read_document, write_document
from headtohead.common.terminal import say
from headtohead.common.version import VERSION
from headtohead.integrations.forwarder import forwarding
from headtohead.integrations.sinks import Sink, find_sinks
from headtohead.study.config.folder import check_same_study, default_folder
from headtohead.study.config.spec import (
    StudySpec,
    build_study,
    changed_settings,
    read_study,
    with_stored_names,
)
from headtohead.study.environment import choose_device
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.explanations import ArmExplanation
from headtohead.study.judge.runs_csv import runs_csv
from headtohead.study.judge.stability import Stability
from headtohead.study.judge.transfer_matrix import Cell
from headtohead.study.judge.trends import Trend
from headtohead.study.judge.verdict import Verdict, headlines, sentence, study_verdicts
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.freeze import planned_seeds
from headtohead.study.plan.planner import plan_study
from headtohead.study.plan.population import PopulationPolicy
from headtohead.study.plan.run_spec import Plan, Rates
from headtohead.study.plan.step_timing import FrozenStepTimes
from headtohead.study.plan.tuning import Tuning, tune_study
from headtohead.study.run.admission import check_lines, check_plan
from headtohead.study.run.executor import Summary, execute
from headtohead.study.run.resume import reset_failed, reuse_notes, unprobed_note, valid_results
from headtohead.study.store import doctor
from headtohead.study.store.doctor import Finding
from headtohead.study.store.frozen import frozen_population, frozen_seconds
from headtohead.study.store.history import History, study_marks
from headtohead.study.store.manifest import Manifest, read_manifest
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import Store

CLAIMS = "claims.json"
"""The judged claims of a paper, in the study's directory."""


class Study:
    """Arms x seeds x datasets x sizes x rules; `run` does the missing runs and returns the verdicts.

    >>> Study(arms=["standard", "sharing:tie=kv"], tokens="500k").run(out="races/mine").verdicts
    """

    def __init__(self, arms: Sequence[Any] | None = None, **settings: Any) -> None:
        given = list(arms) if isinstance(arms, Iterable) and not isinstance(arms, str | Mapping) else arms
        self.values: dict[str, Any] = with_stored_names(
            dict(settings) | ({} if given is None else {"arms": given})
        )
        self.spec: StudySpec = build_study(self.values)

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> Study:
        """Return the study defined in a TOML file; `changes` override its settings."""
        values = read_study(Path(path))
        return cls(**{"name": Path(path).stem, **changed_settings(values, changes)})

    @old_names(seconds="time_limit", stack="population")
    def run(
        self,
        out: str | Path | None = None,
        *,
        device: str = "auto",
        workers: int = 0,
        threads: int = 1,
        data_dir: str | Path | None = None,
        time_limit: float | str = math.inf,
        retry_failed: bool = False,
        keep_weights: bool = True,
        save_every: float = 60.0,
        compile: bool | None = None,
        population: bool | None = None,
        quiet: bool = False,
        track: str | Sink | Sequence[str | Sink] = (),
        extend: bool = False,
        allow_failed_check: bool = False,
    ) -> StudyResult:
        """Run everything that has no result yet, then judge and write the report.

        `workers=0` means one process per core on CPU and one on a GPU. `time_limit` saves and stops after seconds,
        or a time such as `8m`.
        `compile=None` compiles models on a GPU from size 5m.
        `population` trains the seeds of an arm in one pass; None does so on a GPU below size 5m. A study continues the
        way it was started.
        `track` is a tracker or the names of trackers (`tensorboard`, `wandb`); a failing tracker never fails a run.
        `extend` continues a study in `out` with other datasets, sizes or rules, which is rejected otherwise.
        `allow_failed_check` trains user code that fails the causality check; its verdict is never `better`.
        """
        sinks = find_sinks(track)
        store = Store(Path(out) if out is not None else default_folder(self.spec))
        if not extend:
            check_same_study(store.path, self.spec)
        limit = parse_duration(time_limit) if isinstance(time_limit, str) else time_limit
        chosen = choose_device(device)
        display = choose_display(quiet)
        execution = ExecutionSettings(
            device=str(chosen),
            threads=threads,
            data_dir=str(Path(data_dir).resolve()) if data_dir else os.environ.get("H2H_DATA", ""),
            save_every=save_every,
            keep_weights=keep_weights,
            compile=compile,
            log_circuits=self.spec.log_circuits,
        )
        _check_newer(store.path)
        policy = PopulationPolicy(population, execution, frozen_population(store.path))
        count = processes(chosen, workers, threads)
        end = time.monotonic() + limit

        def planned(spec: StudySpec, rates: Rates | None = None) -> Plan:
            with progress_bar("preparing", quiet) as progress:
                step_times = FrozenStepTimes(store.path, execution, progress=progress)
                # Each tuning run has its own learning rate; they are not trained as a population.
                how = {"in_population": policy} if spec is self.spec else {}
                plan = plan_study(
                    spec, data_dir=data_dir, rates=rates, progress=progress, step_times=step_times, **how
                )
                how_checked = {"allow": allow_failed_check, "apart": count > 1}
                checks = check_plan(plan, execution, progress=progress, **how_checked)
                return dataclasses.replace(plan, checks=checks)

        def found(plan: Plan) -> dict[str, RunResult]:
            ids = [run.id for run in plan.distinct()]
            if retry_failed:
                reset_failed(store, ids)
            known, notes = valid_results(store, ids)
            for message in [*notes, *reuse_notes(store, plan, known)]:
                display.note(message)
            return known

        def done(plan: Plan) -> Summary:
            left = max(0.0, end - time.monotonic())
            with forwarding(display, store, self.spec.name, sinks) as shown:
                return execute(
                    store,
                    plan.distinct(),
                    execution,
                    shown,
                    probes=plan.spec.probes,
                    workers=count,
                    seconds=left,
                )

        if compile and self.spec.tasks:
            display.note(
                "compile has no effect on tasks: their batches vary in length, so steps are not compiled"
            )
        tuning = Tuning()
        if self.spec.tune is not None:
            store.make()
            tuned = _tuned(self.spec, store, planned, found, done, display.note)
            if isinstance(tuned, StudyResult):
                return tuned
            tuning = tuned
        plan = planned(self.spec, tuning.rates())
        store.make()
        known = found(plan)
        manifest = dataclasses.replace(plan.manifest(), tuning=tuning.rows)
        added = self._freeze(store, plan, manifest)
        for message in [*tuning.warnings(), *unprobed_note(store, known, self.spec.probes), *manifest.notes]:
            display.note(message)
        for message in check_lines(manifest.checks):
            display.note(message)
        summary = done(plan)
        result = _judge_all(store, manifest, added, known)
        result.summary = summary
        try:
            result.write(quiet=quiet, only_if_changed=not summary.done and not summary.left)
        except OSError as error:
            store.check_present()
            # The runs are stored; h2h report can write the rest later
            summary.trouble.append(f"cannot write the report to {store.path}: {error.strerror}")
            display.note(summary.trouble[-1])
        return result

    def _freeze(self, store: Store, plan: Plan, manifest: Manifest) -> frozenset[int]:
        """Write the plan to history.jsonl, study.lock.json and study.json; return the seeds added after results existed."""

        def done(run: str) -> bool:
            return store.run(run).finished()

        settings = plain(self.values)
        with History.changing(store.path) as history:
            history.plan(manifest, settings, done)
            late = planned_seeds(store.path, plan, started=any(done(run.id) for run in plan.distinct()))
            added = study_marks(store.path, manifest, late).added_seeds
            record = {
                "outline": manifest.as_dict(),
                "added_seeds": sorted(added),
                "settings": settings,
                "seconds": frozen_seconds(store.path),
            }
            write_document(store.path / "study.json", record)
        return added


@dataclass
class StudyResult:
    """A study's verdicts and its directory."""

    path: Path
    manifest: Manifest
    verdicts: list[Verdict]
    summary: Summary = field(default_factory=Summary)
    report: Path | None = None
    """Path of the page, if it was written."""
    results: dict[str, RunResult] = field(default_factory=dict, repr=False)
    """result.json of every finished run, by run id."""
    damage: list[str] = field(default_factory=list)
    """Files that could not be read and were skipped."""
    added_seeds: frozenset[int] = frozenset()
    """Seeds added after results were available."""

    @cached_property
    def analysis(self) -> Analysis:
        """What is computed from the results: trends, matrix, stability, explanations."""
        return Analysis(self.manifest, self.verdicts, self.results, Store(self.path))

    def write(self, quiet: bool = False, only_if_changed: bool = False) -> None:
        """Write verdicts.json, trends.json and matrix.json if there are any, runs.csv and the page.

        Without the chart library the page is skipped with a message. `only_if_changed` keeps an up-to-date page.
        """
        contests = self.manifest.contests()
        with History.changing(self.path) as history:
            history.report(
                [
                    {"contest": contest.title, "arm": row.label, "baseline": row.baseline_label, "p": row.p}
                    for row in self.verdicts
                    for contest in contests
                    if row.of(contest) and row.p is not None
                ]
            )
        rows = [row.as_dict() for row in self.verdicts]
        write_json(self.path / "verdicts.json", rows)
        if trends := self.analysis.trends:
            write_json(self.path / "trends.json", [trend.as_dict() for trend in trends])
        if cells := self.analysis.matrix:
            write_json(self.path / "matrix.json", [cell.as_dict() for cell in cells])
        page = self.path / "report.html"
        stamp = _stamp(self.path, self.manifest, rows, self.results)
        if only_if_changed and _carries(page, stamp) and (self.path / "runs.csv").is_file():
            self.report = page
            return
        table = runs_csv(Store(self.path), self.manifest, self.results, self.added_seeds)
        write_atomic(self.path / "runs.csv", table)
        try:
            from headtohead.report.page import write_report
        except ImportError as error:
            report_skipped(error, quiet)
            return
        self.report = write_report(self.path, self.analysis, self.damage, stamp)

    def write_charts(self, quiet: bool = False) -> list[Path]:
        """Write every chart as SVG and PNG into the study's folder `charts`; return the files."""
        try:
            from headtohead.report.figures import write_charts
        except ImportError as error:
            raise UserError(f"charts need {error.name}: pip install altair vl-convert-python") from None
        with progress_bar("drawing", quiet) as progress:
            return write_charts(self.path, self.analysis, progress)

    def sentences(self) -> list[str]:
        """Return each verdict in one sentence."""
        return [sentence(row, self.verdicts) for row in self.verdicts]

    def headlines(self) -> list[str]:
        """Return one sentence per arm, over all contests."""
        return [text for _, text in headlines(self.verdicts)]

    def trends(self) -> list[Trend]:
        """Return how each arm's gap changes with size, tokens per parameter and context, if the study has several."""
        return self.analysis.trends

    def stability(self) -> list[Stability]:
        """Return divergence rates, loss spikes and sample efficiency per arm, from the runs' training curves."""
        return [row for rows in self.analysis.stability.values() for row in rows]

    def matrix(self) -> list[Cell]:
        """Return the scores of arms trained on one corpus and tested on another, if the probe `corpora` was run."""
        return self.analysis.matrix

    def explained(self) -> list[ArmExplanation]:
        """Return the attention of each arm on its task, over seeds, if the probe `explain` was run."""
        return self.analysis.explanations

    def to_pandas(self) -> Any:
        """Return the verdicts as a pandas frame."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame([row.as_dict() for row in self.verdicts])

    def _repr_html_(self) -> str:
        from headtohead.report.templates import verdict_table

        return verdict_table(self.manifest, self.verdicts)


def _tuned(
    spec: StudySpec,
    store: Store,
    planned: Callable[[StudySpec], Plan],
    found: Callable[[Plan], object],
    done: Callable[[Plan], Summary],
    say: Callable[[str], None],
) -> Tuning | StudyResult:
    """Return the tuned rates, or a result without verdicts if tuning was stopped."""
    stopped: list[tuple[Plan, Summary]] = []

    def run(plan: Plan) -> bool:
        found(plan)  # moves damaged results aside, so that they are redone and not counted as failed rates
        summary = done(plan)
        if summary.left:
            stopped.append((plan, summary))
        return not summary.left

    tuning = tune_study(spec, store, planned, run, say)
    if tuning is not None:
        return tuning
    plan, summary = stopped[-1]
    return StudyResult(store.path, plan.manifest(), [], summary)


def report_skipped(error: ImportError, quiet: bool) -> None:
    if not quiet:
        say(
            f"page not written: {(error.name or '').partition('.')[0]} is not installed (pip install altair vl-convert-python jinja2)"
        )


def processes(device: torch.device, workers: int, threads: int = 1) -> int:
    """Return the number of training processes: `workers` (0: one per core on CPU, one on a GPU) over `threads`."""
    if workers < 0:
        raise UserError(f"workers={workers} must be 0 (one per core on CPU, one on a GPU) or more")
    return max(1, (workers or (os.cpu_count() or 1 if device.type == "cpu" else 1)) // threads)


def _check_newer(folder: Path) -> None:
    """Raise if a newer version wrote study.json, which this version would overwrite."""
    try:
        read_document(folder / "study.json")
    except UnreadableFile:  # a missing or damaged file is rewritten
        return


def open_study(path: str | Path) -> StudyResult:
    """Return a finished study's result, read from its directory."""
    folder = Path(path)
    try:
        manifest, added = read_manifest(folder / "study.json")
    except MissingFile:
        raise UserError(f"no study in {folder}: study.json is missing") from None
    return _judge_all(Store(folder), manifest, added, {})


def watch_study(path: str | Path, *, port: int = 8642, quiet: bool = False) -> None:
    """Serve a live page of a running study on 127.0.0.1 until Ctrl-C."""
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} is out of range; allowed: 0 to 65535, where 0 picks a free port")
    folder = Path(path)
    if not os.path.lexists(folder / "study.json"):
        raise UserError(f"no study in {folder}: study.json is missing")
    try:
        from headtohead.report.dashboard.server import serve
    except ImportError as error:
        raise UserError(f"watching needs {error.name}: pip install altair vl-convert-python jinja2") from None
    serve(folder, port, (lambda text: None) if quiet else (lambda text: say(text, flush=True)))


def _judge_all(
    store: Store, manifest: Manifest, added: frozenset[int], known: dict[str, RunResult]
) -> StudyResult:
    """Return the verdicts of a study; results in `known` are not read again."""
    damage: dict[str, str] = {}
    others = sorted({entry.run for entry in manifest.entries if entry.run not in known})
    results = known | store.results(others, damage)
    marks = study_marks(store.path, manifest, added)
    verdicts = study_verdicts(manifest, results, marks)
    return StudyResult(
        *(store.path, manifest, verdicts),
        results=results,
        damage=list(damage.values()),
        added_seeds=marks.added_seeds,
    )


def _stamp(path: Path, manifest: Manifest, rows: list[dict[str, Any]], results: dict[str, RunResult]) -> str:
    """Return a digest of everything the page shows."""
    checksums = sorted((run, result.checksum or "None") for run, result in results.items())
    claims = digest_file(path / CLAIMS) if (path / CLAIMS).is_file() else ""
    return digest(json.dumps([VERSION, manifest.as_dict(), rows, checksums, claims], sort_keys=True))[:32]


def _carries(page: Path, stamp: str) -> bool:
    try:
        with open_regular(page) as stream:
            return stamp.encode() in stream.read(1000)
    except (OSError, UnreadableFile):
        return False


def examine_study(path: str | Path, *, repair: bool = False, quiet: bool = False) -> list[Finding]:
    """Return what is damaged in a study's directory; `repair` repairs what is safe to repair."""
    with progress_bar("examining", quiet) as progress:
        findings = doctor.examine(Path(path), progress)
    if repair:
        doctor.repair(findings)
    return findings


def plain(value: Any) -> Any:
    """Return settings as JSON-ready values; a class given as an arm becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return (
        value
        if isinstance(value, str | int | float | bool | None)
        else getattr(value, "__name__", str(value))
    )
