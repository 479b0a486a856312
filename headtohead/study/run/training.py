"""Train, score and probe runs in this process, from their specs to their results.

The rows of a population are trained in one pass; a run that is not in a population is a pass of one row. Each row is a
run of its own, with its directory, lock, checkpoints and result.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from headtohead.common.errors import NewerFile, UserError
from headtohead.common.files import write_atomic
from headtohead.common.progress import part_of
from headtohead.common.stop import NEVER, Interrupted, Stop, Stopped, interrupted_by
from headtohead.mechanisms.contract.terms import Composed
from headtohead.mechanisms.contract.user_code import describe_error, user_frame
from headtohead.model.decoder import Decoder
from headtohead.study.environment import Environment, differences, environment
from headtohead.study.plan.branches import kept_checkpoint
from headtohead.study.plan.dataset import Dataset, dataset_of
from headtohead.study.plan.execution import ExecutionSettings, layers_of, micro_batch
from headtohead.study.plan.init_from import load_weights
from headtohead.study.run.events import Emit, Event
from headtohead.study.run.restore import restore
from headtohead.study.run.scoring import (
    ExternalError,
    brief,
    finish,
    measuring,
    take_probes,
)
from headtohead.study.store.result import RunResult, Status
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import RunDirectory, Store
from headtohead.training.acceleration import compiles, records
from headtohead.training.checkpoint import checkpoint_paths
from headtohead.training.population import PopulationTrainer
from headtohead.training.trainer import Branching, Hooks, Outcome, Trainer

UNFINISHED = ("stopped", "deferred", "blocked")
"""States of a run that has no result yet."""


@dataclass(frozen=True)
class _Row:
    """A run that is ready to train."""

    spec: RunSpec
    run: RunDirectory
    trainer: Trainer
    dataset: Dataset
    changes: list[str]
    """Differences between the environments of its starts."""


class TrainingPass:
    """Trains runs that differ only in their seeds in one pass, or a single run of any kind."""

    def __init__(
        self,
        store: Store,
        specs: Sequence[RunSpec],
        execution: ExecutionSettings,
        *,
        layers: Sequence[Composed] | None = None,
        probes: Sequence[str] = (),
        stop: Stop = NEVER,
        lost: Callable[[], bool] = lambda: False,
        emit: Emit = lambda event: None,
    ) -> None:
        """`layers` are given if they cannot be built from the specs; `lost` says whether another process took over."""
        self.store, self.specs, self.execution = store, list(specs), execution
        self.layers, self.probes, self.emit = layers, probes, emit
        self.device = torch.device(execution.device)
        self.states: dict[str, str] = {}

        def requested() -> bool:
            if lost():
                raise ExternalError(
                    f"run {self.specs[0].id} was taken over by another process: the heartbeat of this one had "
                    "stopped too long"
                )
            return stop.requested()

        self.stop = dataclasses.replace(stop, requested=requested)

    def run(self) -> list[str]:
        """Train or resume the runs and take their missing probes; return the resulting state of each.

        done, diverged, failed, out of memory: the run has a result; errors of the arm are results. stopped: a stop was
        requested. deferred: the corpus is missing or changed, or another process took the run over. blocked: nothing
        can be written. External errors are reported as events, and the run is tried again at the next start.
        """
        if self.device.type == "cpu":
            torch.set_num_threads(self.execution.threads)
        runs = {spec.id: self.store.run(spec.id) for spec in self.specs}
        finished = [spec for spec in self.specs if runs[spec.id].finished()]
        for spec in finished:
            self._record(spec, partial(self._probe_finished, spec))
        left = [spec for spec in self.specs if spec not in finished]
        # Rows that have started and rows that have not are trained in two passes, so that no work is lost.
        started = [spec for spec in left if any(checkpoint_paths(runs[spec.id].checkpoints))]
        for rows in (started, [spec for spec in left if spec not in started]):
            if rows and not any(state in UNFINISHED for state in self.states.values()):
                self._train(rows)
        return [self.states.get(spec.id, "stopped") for spec in self.specs]

    def _train(self, specs: list[RunSpec]) -> None:
        """Train runs in one pass, or in two if their rows do not fit into memory together."""
        try:
            self._train_pass(specs)
            return
        except Exception as error:
            splits = isinstance(error, torch.OutOfMemoryError) and specs[0].stacked and len(specs) > 1
            if not splits or any(spec.id in self.states for spec in specs):
                # An error that affects all rows is recorded or reported for each.
                for spec in specs:
                    if spec.id not in self.states:
                        self._record(spec, partial(_raise, error))
                return
        # The error, which holds the tensors of the pass, is gone here.
        half = (len(specs) + 1) // 2
        message = f"out of memory: the {len(specs)} rows of this pass are trained in passes of {half}"
        self.emit(Event("warning", specs[0].id, message=message))
        torch.cuda.empty_cache()
        for part in (specs[:half], specs[half:]):
            if not any(state in UNFINISHED for state in self.states.values()):
                self._train(part)

    def _train_pass(self, specs: list[RunSpec]) -> None:
        rows = [self._begin(spec, len(specs)) for spec in specs]

        def ended(index: int, outcome: Outcome) -> None:
            self._record(specs[index], lambda: self._finish(rows[index], outcome, len(rows)))

        if not specs[0].stacked:
            self._until_stopped(rows, rows[0].trainer, lambda: ended(0, rows[0].trainer.run()))
            return
        population = PopulationTrainer(
            [row.trainer for row in rows],
            record=self._may_record(specs[0]) and self.execution.record is not False,
            compile=bool(self.execution.compile),  # on request: it takes longer than it saves in most studies
            save_every=self.execution.save_every,
            stop=self._after_step,
        )

        def train() -> None:
            for index, outcome in enumerate(population.run(ended)):
                if specs[index].id not in self.states:
                    ended(index, outcome)

        self._until_stopped(rows, population, train)

    def _until_stopped(
        self, rows: list[_Row], trainer: Trainer | PopulationTrainer, train: Callable[[], None]
    ) -> None:
        """Call `train`; if a stop interrupts the scoring, save the training, which is scored at the next start."""
        try:
            train()
        except Stopped as error:
            if isinstance(trainer, PopulationTrainer):
                ended = [index for index, row in enumerate(rows) if row.spec.id in self.states]
            else:
                ended = []
            if not isinstance(error, Interrupted):
                trainer.save(ended)
            self.states = {row.spec.id: "stopped" for row in rows} | self.states

    def _after_step(self) -> bool:
        """Called by a trainer after each step; if it returns True, the trainer saves and stops."""
        self.stop.advance()
        return self.stop()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Report that the pass is compiled; a stop interrupts it, but for the first progress of this start."""
        for spec in self.specs:
            if spec.id not in self.states:
                self.emit(Event("compiling", spec.id))
        with interrupted_by(self.stop):
            yield
        self.stop.advance()  # the compiled graph is kept

    def _record(self, spec: RunSpec, work: Callable[[], str]) -> None:
        """Call `work` and keep the resulting state; errors are recorded or reported as `run` describes."""
        self.states[spec.id] = self._state(self.store.run(spec.id), work)

    def _state(self, run: RunDirectory, work: Callable[[], str]) -> str:
        try:
            return work()
        except (ExternalError, NewerFile) as error:
            self.emit(Event("deferred", run.id, message=str(error)))
            return "deferred"
        except OSError as error:
            message = f"cannot write to {run.path}: {error.strerror or error}"
        except Exception as error:
            if run.finished():  # its result is still valid
                self.emit(Event("deferred", run.id, message=f"{type(error).__name__}: {error}"))
                return "deferred"
            status: Status = "out of memory" if out_of_memory(error) else "failed"
            try:
                return _fail(run, status, error)
            except OSError as second:
                message = f"cannot write to {run.path}: {second.strerror}"
        self.emit(Event("deferred", run.id, message=message))
        return "blocked"

    def _layers(self, spec: RunSpec) -> list[Composed]:
        return layers_of(spec) if self.layers is None else list(self.layers)

    def _may_record(self, spec: RunSpec) -> bool:
        return may_record(spec, self._layers(spec))

    def _begin(self, spec: RunSpec, count: int) -> _Row:
        """Return a run ready to train, alone or as one of `count` rows."""
        run, device, execution = self.store.run(spec.id), self.device, self.execution
        dataset = self._dataset(spec)
        size, training = spec.size, spec.training
        rows = count if spec.stacked else 0
        layers = self._layers(spec)
        torch.manual_seed(spec.seed)
        # The companion is cut from the train split; corpus content and options, both in the run's hash, determine it.
        model = dataset.model(size, layers, spec.seed).to(device)
        if spec.start:
            with _external_errors():
                load_weights(model, spec.start_path, spec.start)
        branching = _branching(run, spec)
        changes = _record_environment(run, environment(device, size, training.precision), branching)
        batches = dataset.batches(size, training, spec.seed)

        def progress(step: int, nats: float, rate: float) -> None:
            self.emit(Event("step", run.id, step=step, nats=nats, rate=rate))

        def evaluate() -> dict[str, dict[str, float]]:
            # A task is also scored on test, so that the result includes the test score of the best step.
            splits = ("valid", "test") if dataset.task else ("valid",)
            shown = measuring(run, self.stop, self.emit)
            found = {}
            for index, split in enumerate(splits):
                part = part_of(shown, index, index + 1, len(splits))
                found[split] = brief(dataset.score(model, split, training.precision, part))
            return found

        # A task's batches have many lengths, and each would need its own compilation or CUDA graph.
        alone = not rows and not dataset.task
        compiled = alone and compiles(execution.compile, size, device)
        trainer = Trainer(
            model,
            batches,
            training,
            micro=execution.micro or micro_batch(size, batches.sequences, device, rows),
            folder=run.checkpoints,
            save_every=execution.save_every,
            compile=compiled,
            record=alone and may_record(spec, layers) and records(execution.record, size, device, compiled),
            name=run.id,
            branching=branching,
            log_circuits=execution.log_circuits,
            sharing=rows or 1,
            hooks=Hooks(
                log=run.log,
                progress=progress,
                stop=self._after_step,
                evaluate=evaluate,
                rewind=run.rewind,
                compiling=self._compiling,
                warn=lambda message: self.emit(Event("warning", run.id, message=message)),
            ),
        )
        return _Row(spec, run, trainer, dataset, changes)

    def _finish(self, row: _Row, outcome: Outcome, count: int) -> str:
        """Score a trained run, write its result and take its probes."""
        if outcome.status == "stopped":
            return "stopped"
        status = finish(
            row.run,
            row.trainer,
            row.dataset,
            outcome,
            changes=row.changes,
            rows=count if row.spec.stacked else 0,
            weights=self.execution.weights_kept(self.probes),
            stop=self.stop,
            emit=self.emit,
        )
        if status == "done":
            missing = row.run.missing_probes(self.probes)
            self._probe(row.spec, row.run, row.trainer.model, row.dataset, missing)
        return status

    def _probe_finished(self, spec: RunSpec) -> str:
        run = self.store.run(spec.id)
        if missing := run.missing_probes(self.probes):
            with _external_errors():
                model = restore(run, spec, self._layers(spec)).to(self.device)
            self._probe(spec, run, model, self._dataset(spec), missing)
        return "done"

    def _probe(
        self, spec: RunSpec, run: RunDirectory, model: Decoder, dataset: Dataset, missing: list[str]
    ) -> None:
        """Take the missing probes; weights that were kept for them alone are deleted after the last one."""
        data_dir = self.execution.data_dir
        take_probes(run, spec, model, dataset, data_dir, missing, self.stop, self.emit)
        execution = self.execution
        last = not execution.keep_weights and not execution.probed_later
        if last and run.weights_are_temporary and not run.missing_probes(self.probes):
            run.delete_weights()

    def _dataset(self, spec: RunSpec) -> Dataset:
        with _external_errors():
            return dataset_of(self.store.run(spec.id), spec, self.execution.data_dir)


def may_record(spec: RunSpec, layers: Sequence[Composed]) -> bool:
    """Return whether the steps of a run may be captured as a CUDA graph.

    A CUDA graph does not repeat Python code that changes from step to step, so only mechanisms whose captured steps were
    compared with eager ones are allowed. Under length = time the seconds per step were measured without a graph.
    """
    return not spec.length.startswith("time") and all(
        not term.user_code for composed in layers for term in composed.terms
    )


@contextmanager
def _external_errors() -> Iterator[None]:
    """Turn a UserError into an ExternalError."""
    try:
        yield
    except UserError as error:
        raise ExternalError(str(error)) from None


def _raise(error: Exception) -> str:
    raise error


def _branching(run: RunDirectory, spec: RunSpec) -> Branching:
    """Return how a run relates to its trunk or its branches; a new branch first copies the trunk's rows of metrics.jsonl."""
    if (parent := spec.parent) is None:
        return Branching(marks=frozenset(spec.branches), folder=run.branches)
    trunk = RunDirectory(run.path.with_name(parent.run))
    start = kept_checkpoint(trunk, parent.step)
    if not any(run.checkpoints.glob("step-*")) and start.is_dir():
        run.keep_rows(lambda row: row.step <= parent.step, trunk)
    return Branching(start=start, trunk=parent.run)


def _fail(run: RunDirectory, status: Status, error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if user_frame(error) is not None:
        message = describe_error(error)
    write_atomic(run.path / "failure.txt", "".join(traceback.format_exception(error)))
    run.finish(RunResult(status=status, error=str(error) if isinstance(error, UserError) else message))
    return status


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out."""
    # torch's allocator on CPU raises a plain RuntimeError
    message = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in message and "memory" in message
    )


def _record_environment(run: RunDirectory, now: Environment, branching: Branching) -> list[str]:
    """Append this environment to environment.json; return the changes between consecutive ones, including the trunk's."""
    resumed = any(run.checkpoints.glob("step-*")) if run.checkpoints.is_dir() else False
    before = run.environments() if resumed else []
    if not resumed and branching.start is not None and branching.start.is_dir():
        before = RunDirectory(run.path.with_name(branching.trunk)).environments()
    starts = [*before, now]
    run.keep_environments(starts)
    return [change for before, after in pairwise(starts) for change in differences(before, after)]
