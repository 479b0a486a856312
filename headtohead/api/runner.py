"""Run a study from its definition to its report: plan, lease, train, evaluate, judge, report."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from headtohead.api.result import StudyResult, judge_study
from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.estimate import Work
from headtohead.common.progress import choose_display, progress_bar
from headtohead.common.schema import read_document, write_document
from headtohead.common.stop import Stop
from headtohead.common.text import counted
from headtohead.integrations.forwarder import forwarding
from headtohead.integrations.sinks import Sink
from headtohead.study.config.spec import StudySpec
from headtohead.study.judge.notices import budget_notices, design_notices, repetition_notices
from headtohead.study.plan.dataset import split_notes
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.freeze import definitions, planned_seeds, populations
from headtohead.study.plan.plan import Plan, Rates
from headtohead.study.plan.planner import plan_study
from headtohead.study.plan.population import TUNING, PopulationPolicy, group_populations
from headtohead.study.plan.reuse import with_stored_programs
from headtohead.study.plan.step_timing import FrozenStepTimes
from headtohead.study.plan.tuning import (
    MAX_EXTENSIONS,
    Tuning,
    extended,
    freeze_tuning,
    frozen_tuning,
    grid_spec,
    trials,
    tuning_key,
)
from headtohead.study.run.admission import check_lines, check_plan
from headtohead.study.run.cluster.engine import Engine
from headtohead.study.run.execute import Summary, execute, pending_runs, work_of
from headtohead.study.run.resume import reset_failed, reuse_notes, unprobed_note, valid_results
from headtohead.study.store.copies import Source, Wanted, copy_finished_runs
from headtohead.study.store.frozen import changing_lock, read_lock
from headtohead.study.store.history import History, study_marks
from headtohead.study.store.manifest import Manifest
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store


@dataclass(frozen=True)
class RunSettings:
    """How a study is run, besides the execution of its runs."""

    workers: int = 1
    """Training processes."""
    deadline: float = float("inf")
    """A time of `time.monotonic`."""
    retry_failed: bool = False
    population: bool | None = None
    quiet: bool = False
    sinks: Sequence[Sink] = ()
    allow_failed_check: bool = False
    reuse: Sequence[Source] = ()
    """Studies whose finished runs are copied instead of trained again."""
    engine: Engine | None = None
    """Executes the runs on a cluster."""
    planning: ExecutionSettings | None = None
    """The settings of this machine if it lacks the device of the cluster's nodes."""


@dataclass(frozen=True)
class Preview:
    """What is left of a study, as far as it is known before anything is trained."""

    plan: Plan
    left: list[RunSpec]
    """Runs without a result, with those of the tuning if it is not finished."""
    passes: int
    """How many runs or populations can be trained at the same time."""


class StudyRunner:
    """Runs one study in one directory; `run` is the whole path, step by step."""

    def __init__(
        self,
        spec: StudySpec,
        settings: dict[str, Any],
        store: Store,
        execution: ExecutionSettings,
        how: RunSettings,
    ) -> None:
        """`settings` are those of the study as given, which study.json and history.jsonl record."""
        self.spec, self.settings, self.store, self.execution, self.how = spec, settings, store, execution, how
        self.planning = how.planning or execution
        self.display = choose_display(how.quiet)
        self.phases: dict[str, float] = {}
        """Seconds by phase."""
        self._noted: set[str] = set()
        self._trial_copies: set[str] = set()
        """Trials of the tuning that this execution copied."""
        _check_newer(store)
        if how.population and all(length.startswith("time") for length in spec.lengths) and spec.tune is None:
            raise UserError(
                "population=True: runs under length=time are timed alone and cannot be rows of a population"
            )

    def run(self) -> StudyResult:
        """Run everything that has no result yet, then judge and write the report."""
        self._note_design()
        tuning = Tuning()
        if self.spec.tune is not None:
            with self._phase("tune"):
                found = self.tune()
            if isinstance(found, StudyResult):
                return dataclasses.replace(found, phases=self.phases)
            tuning = found
        self.display.estimate.spent.clear()  # of the tuning
        with self._phase("prepare"):
            plan = self.plan(self.spec, tuning.rates())
        self.store.make()
        self._remove_unprobed_copies(plan)
        self.copy(plan)
        if not self.execution.keep_weights:
            self._delete_temporary_weights(plan)
        left = [run for run in plan.runs.values() if not self.store.run(run.id).finished()]
        self._note_once([*repetition_notices(plan), *self._budget_notices(plan, left, self.how.workers)])
        known = self.finished(plan)
        manifest = dataclasses.replace(plan.manifest, tuning=tuning.rows)
        added = self.freeze(plan, manifest)
        self._note_once([*self._plan_notes(plan), *tuning.warnings()])
        self._note_once(unprobed_note(self.store, known, self.spec.probes))
        summary = self.execute(plan)
        self.phases |= {name: seconds for name, seconds in self.display.estimate.spent.items() if seconds}
        with self._phase("report"):
            result = self.report(judge_study(self.store, manifest, added, known), summary)
        return dataclasses.replace(result, phases=self.phases)

    def preview(self) -> Preview:
        """Plan and check the study as `run` does; train, time and freeze nothing.

        A contest under length = time is planned under length = tokens: the machine that trains it measures its steps.
        """
        self._note_design()
        timed = {length: "tokens" if length.startswith("time") else length for length in self.spec.lengths}
        spec = dataclasses.replace(self.spec, lengths=tuple(dict.fromkeys(timed.values())))
        tuning, trials = self._previewed_tuning()
        plan = self.plan(spec, tuning.rates())
        self._note_once([*repetition_notices(plan), *self._plan_notes(plan)])
        self.store.make()
        if self.how.retry_failed:  # also runs of a length that is not known yet
            reset_failed(self.store, [run.id for run in self.store.runs()])
        stages = [plan] if trials is None else [trials, plan]
        for stage in stages:
            self.finished(stage)
        left = [pending_runs(self.store, stage) for stage in stages]
        passes = max(len(group_populations(runs, self.execution)) for runs in left)
        return Preview(plan, [run for runs in left for run in runs], passes)

    def _previewed_tuning(self) -> tuple[Tuning, Plan | None]:
        """Return the frozen tuning, or an empty one and the plan of its trials."""
        if self.spec.tune is None:
            return Tuning(), None
        key = tuning_key(self.spec, self.plan(grid_spec(self.spec, self.spec.tune.lr[:1])))
        if (known := frozen_tuning(self.store.path, key, self.spec.tune)) is not None:
            return known, None
        return Tuning(), self.plan(grid_spec(self.spec, self.spec.tune.lr))

    def _plan_notes(self, plan: Plan) -> list[str]:
        """Return what to know about the datasets and the checked arms of a plan."""
        manifest = plan.manifest
        return [*split_notes(plan.datasets.values()), *manifest.notes, *check_lines(manifest.checks)]

    def note_forecast(self, preview: Preview, at_once: int) -> None:
        """Show the time of the runs left, `at_once` at the same time, where a race would."""
        left = [run for run in preview.left if run.id in preview.plan.runs]
        self._note_once(self._budget_notices(preview.plan, left, at_once))

    def _note_design(self) -> None:
        """Show what is noticeable about the settings."""
        self._note_once(design_notices(self.spec))
        if self.execution.compile and self.spec.tasks:
            self.display.note(
                "compile has no effect on tasks: their batches vary in length, so steps are not compiled"
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block as those of a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = time.monotonic() - began

    def policy(self, prefix: str) -> PopulationPolicy:
        """Return the policy for the contests of the study, or with the prefix `TUNING` for those of its tuning."""
        wanted = self.how.population
        if wanted is None and prefix and self.planning.device != "cpu" and self._tuned_apart():
            wanted = False
        return PopulationPolicy(wanted, self.planning, read_lock(self.store.path), prefix)

    def _tuned_apart(self) -> bool:
        """Return whether trials were trained before there was a choice; they continue as separate runs."""
        if not self.store.runs() or read_lock(self.store.path).populations or self.spec.tune is None:
            return False
        trials = plan_study(grid_spec(self.spec, self.spec.tune.lr), data_dir=self.execution.data_dir or None)
        return any(self.store.run(run).path.is_dir() for run in trials.runs)

    def plan(self, spec: StudySpec, rates: Rates | None = None) -> Plan:
        """Return the plan of the study, or of a grid of its tuning, with the arms that contain user code checked."""
        with progress_bar("preparing", self.how.quiet) as progress:
            plan = plan_study(
                spec,
                data_dir=self.execution.data_dir or None,
                rates=rates,
                progress=progress,
                step_times=FrozenStepTimes(self.store.path, self.planning, progress=progress),
                in_population=self.policy(TUNING if spec.tune is None and self.spec.tune else ""),
            )
            plan, reused = with_stored_programs(plan, self.store)
            checks = check_plan(
                plan,
                self.planning,
                allow=self.how.allow_failed_check,
                apart=self.how.workers > 1,
                progress=progress,
            )
        self._note_once(reused)
        return dataclasses.replace(plan, checks=checks)

    def _note_once(self, messages: Iterable[str]) -> None:
        """Show messages that this execution has not shown yet: tuning and study plan the same files several times."""
        for message in messages:
            if message not in self._noted:
                self._noted.add(message)
                self.display.note(message)

    def tune(self) -> Tuning | StudyResult:
        """Return the tuned rates, running missing trials, or a result without verdicts if that was stopped."""
        assert self.spec.tune is not None
        self.store.make()
        grid = self.spec.tune.lr
        key = tuning_key(self.spec, self.plan(grid_spec(self.spec, grid[:1])))
        if (known := frozen_tuning(self.store.path, key, self.spec.tune)) is not None:
            return known
        later = self._work_after_tuning()
        for extensions in range(MAX_EXTENSIONS + 1):
            plan = self.plan(grid_spec(self.spec, grid))
            if any(run.stacked for run in plan.runs.values()):
                with changing_lock(self.store.path) as lock:
                    lock.populations |= populations(plan, TUNING)
            self._trial_copies |= set(self.copy(plan, tuning=True))
            self.finished(plan)  # moves damaged results aside, so that they are not counted as failed rates
            # A trial may be a run of the study too, whose probes are taken later.
            summary = self.execute(plan, later, probed_later=bool(self.spec.probes))
            if summary.left:
                return StudyResult(self.store.path, plan.manifest, [], summary, tuning=True)
            rows = trials(self.spec, plan, self.store, grid)
            wider = extended(grid, rows)
            if wider == grid or extensions == MAX_EXTENSIONS:
                break
            grid = wider
            self.display.note(
                f"a best learning rate is at the edge: the grid is extended for all arms to {grid[0]:g} ... {grid[-1]:g}"
            )
        return freeze_tuning(self.store.path, key, rows)

    def finished(self, plan: Plan) -> dict[str, RunResult]:
        """Return the valid results of a plan's runs; damaged ones are set aside and repeated."""
        ids = list(plan.runs)
        if self.how.retry_failed:
            reset_failed(self.store, ids)
        known, notes = valid_results(self.store, ids)
        for message in notes:
            self.display.note(message)
        self._note_once(reuse_notes(self.store, plan, known))
        return known

    def freeze(self, plan: Plan, manifest: Manifest) -> frozenset[int]:
        """Write history.jsonl, study.lock.json and study.json; return the seeds added after results existed."""
        store = self.store

        @functools.cache
        def done(run: str) -> bool:
            return store.run(run).finished()

        with History.changing(store.path) as history:
            history.plan(manifest, self.settings, definitions(plan), done)
            late = planned_seeds(store.path, plan, started=any(map(done, plan.runs)))
            added = study_marks(store.path, manifest, late).added_seeds
            record = {
                "outline": manifest.as_dict(),
                "added_seeds": sorted(added),
                "settings": self.settings,
                "seconds": to_builtins(read_lock(store.path).seconds),
            }
            write_document(store.path / "study.json", record)
        return added

    def _budget_notices(self, plan: Plan, left: Sequence[RunSpec], workers: int) -> list[str]:
        """Return what to say about the time of the runs left; nothing is measured for a quiet study."""
        if self.how.quiet:
            return []
        with progress_bar("forecasting", self.how.quiet):
            return budget_notices(self.settings, plan, left, self.planning, workers)

    def _delete_temporary_weights(self, plan: Plan) -> None:
        """Delete the weights that were kept for probes, of runs that get no more: of most trials of the tuning."""
        for run in self.store.runs():
            if run.weights_are_temporary and (
                run.id not in plan.runs or not run.missing_probes(self.spec.probes)
            ):
                run.delete_weights()

    def _work_after_tuning(self) -> list[Work]:
        """Return the work of the contests, without those whose lengths are measured first."""
        lengths = tuple(length for length in self.spec.lengths if not length.startswith("time"))
        if not lengths:
            return []
        plan = self.plan(dataclasses.replace(self.spec, lengths=lengths))
        return [work_of(plan, run) for run in plan.runs.values()]

    def copy(self, plan: Plan, tuning: bool = False) -> list[str]:
        """Copy the finished runs of other studies; return their ids.

        Trials of the tuning are copied without probes: which of them become runs of the study is not known yet.
        """
        if not self.how.reuse:
            return []
        execution = dataclasses.replace(self.execution, probed_later=tuning and bool(self.spec.probes))
        wanted = []
        for run in plan.runs.values():
            if not self.store.run(run.id).path.exists():
                probes = () if tuning or run.branches else self.spec.probes
                wanted.append(Wanted(run.id, probes, execution.weights_kept(probes)))
        with progress_bar("copying", self.how.quiet) as progress:
            copied = copy_finished_runs(
                self.store,
                self.how.reuse,
                wanted,
                stop=Stop(deadline=self.how.deadline),
                progress=progress,
                note=lambda message: self._note_once([message]),
            )
        if copied:
            self.display.note(f"{counted(len(copied), 'finished run')} copied from other studies")
        elif wanted and not tuning and time.monotonic() < self.how.deadline:
            self._note_unused_sources()
        return copied

    def _remove_unprobed_copies(self, plan: Plan) -> None:
        """Remove copied trials that have become runs of the study and lack the weights for its probes."""
        for run in (self.store.run(run) for run in self._trial_copies & plan.runs.keys()):
            if not run.weights.is_file() and run.missing_probes(self.spec.probes):
                shutil.rmtree(run.path)

    def _note_unused_sources(self) -> None:
        """Name the other studies if no run of theirs was copied, by this start or an earlier one."""
        paths = [source.store.path for source in self.how.reuse if not source.same_plan]
        used = set(History.read(self.store.path).origins().values())
        if paths and not any(path.name in used for path in paths):
            self._note_once([f"no finished run of {', '.join(map(str, paths))} is a run of this study"])

    def execute(self, plan: Plan, later: Sequence[Work] = (), probed_later: bool = False) -> Summary:
        """Train and evaluate the unfinished runs of a plan until the deadline; `later` follows after it."""
        execution = dataclasses.replace(self.execution, probed_later=probed_later)
        seconds = max(0.0, self.how.deadline - time.monotonic())
        with forwarding(self.display, self.store, self.spec.name, self.how.sinks) as shown:
            return execute(
                self.store,
                plan,
                execution,
                shown,
                workers=self.how.workers,
                seconds=seconds,
                later=later,
                engine=self.how.engine,
                planning=self.how.planning,
            )

    def report(self, result: StudyResult, summary: Summary) -> StudyResult:
        """Write the verdicts and the page; return the result with the summary of its execution."""
        result.summary = summary
        try:
            result.write(quiet=self.how.quiet, only_if_changed=not summary.done and not summary.left)
        except OSError as error:
            self.store.check_present()
            # The runs are stored; h2h report can write the rest later
            summary.trouble.append(f"cannot write the report to {self.store.path}: {error.strerror}")
            summary.unreported = True
            self.display.note(summary.trouble[-1])
        return result


def _check_newer(store: Store) -> None:
    """Raise if a newer version wrote study.json, which this version would overwrite."""
    try:
        read_document(store.path / "study.json")
    except UnreadableFile:  # a missing or damaged file is rewritten
        return
