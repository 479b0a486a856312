"""Train many toy runs in one pass with plain SGD or Adam: all runs of one form and batch size share every matmul.

On a GPU a window of steps is one CUDA graph, or one kernel if `fused` supports the form. Forms run concurrently on
separate streams, because a step is about ten kernels that are too small to fill the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headtohead.data.tasks.toy import CLASSES, VOCABULARY, Source
from headtohead.papers.faster_qk import fused
from headtohead.papers.faster_qk.adam import adam_step, moments, step_sizes
from headtohead.papers.faster_qk.forms import ATTENTION, OUTPUT, State, default, tiny
from headtohead.papers.faster_qk.measure import Mark, imposed_mass, measure_gain, measure_mark, relevant_mass
from headtohead.papers.faster_qk.runs import LOSSES, RATE, ToyRun
from headtohead.papers.faster_qk.task import CHUNK, draw_chunk, held_out

_POINTS = 60
"""Approximate number of stored points of a run's path."""
_SLOWER = "the toy continues without its fused kernel, more slowly"


@dataclass
class ToyResult:
    """The result of one run."""

    run: ToyRun
    marks: dict[str, Mark] = field(default_factory=dict)
    """By event: `loss 0.1` (first epoch with a mean loss below), `stop` (the published rule), `end` (after its epochs)."""
    hundreds: list[float] = field(default_factory=list)
    """Mean loss of every 100 epochs."""
    path: list[dict[str, float]] = field(default_factory=list)
    """Step, loss and alpha during training."""
    gain: dict[str, float] | None = None
    """With imposed attention: the loss, and its decrease with slightly more mass on distinct tokens."""

    diverged: int | None = None
    """The step at which the loss was no longer finite."""

    def as_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {
            "run": self.run.as_dict(),
            "marks": {event: mark.as_dict() for event, mark in self.marks.items()},
            "hundreds": self.hundreds,
            "path": self.path,
            "gain": self.gain,
            "diverged": self.diverged,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ToyResult:
        """Return the result stored by `as_dict`."""
        marks = {event: Mark.from_dict(mark) for event, mark in values["marks"].items()}
        run = ToyRun(**values["run"])
        return cls(run, marks, values["hundreds"], values["path"], values["gain"], values["diverged"])


def start_state(run: ToyRun) -> State:
    """Return a run's parameters at step 0 in float64; they depend only on its seed and initialization."""
    generator = torch.Generator().manual_seed(run.seed)
    draws = {"tiny": tiny(), "default": default(generator)}
    qk = ATTENTION[run.form[:2]].start(draws[run.qk_start])
    state = qk | OUTPUT[run.form[2:]].start(draws[run.ov_start])
    return state if run.adam is None else state | moments(state)


def sgd_step(
    form: str, state: State, known: Tensor, ask: Tensor, pull: Tensor, target: int, rate: float
) -> Tensor:
    """Do one step of every run in place; return the error of the logits (runs, batch, vocabulary) before it.

    `known` has log counts, or imposed masses (runs, batch, vocabulary), and is overwritten; `ask` has the one-hot
    classes (runs, batch, 4); `pull` is `ask` transposed, times lr_QK / (batch sqrt(50)).
    """
    attention, output = ATTENTION[form[:2]], OUTPUT[form[2:]]
    mass = attention.attend(state, known, ask)
    error = output.logits(state, mass).softmax(2)
    error.narrow(2, target, CLASSES).sub_(ask)
    slope = output.learn(state, mass, error, rate / error.shape[1])
    attention.learn(state, mass, slope, pull)
    return error


class Batch:
    """Runs of one form and optimizer, trained together window by window; a window divides every run's epoch."""

    def __init__(self, runs: Sequence[ToyRun], device: torch.device) -> None:
        self.form, self.device = runs[0].form, device
        self.target = runs[0].source.target
        self.results = [ToyResult(run) for run in runs]
        self.step = 0
        self.sums = [0.0] * len(runs)
        self.hundred: list[list[float]] = [[] for _ in runs]
        self.tests: dict[Source, tuple[Tensor, Tensor]] = {}
        self.done: list[ToyResult] = []
        self.over: set[int] = set()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.adam = runs[0].adam is not None
        self.fused = (
            self.stream is not None and not self.adam and fused.serves(self.form, runs[0].batch, device)
        )
        self._take([start_state(run) for run in runs])

    @property
    def runs(self) -> list[ToyRun]:
        """The unfinished runs."""
        return [result.run for index, result in enumerate(self.results) if index not in self.over]

    @property
    def share(self) -> float:
        """The approximate progress of its slowest run."""
        return self.step / self.expected

    def _take(self, states: list[State]) -> None:
        """Stack the states of the unfinished runs and allocate a window's sequences."""
        runs = self.runs
        self.expected = max(run.expected_steps for run in runs)
        self.window = math.gcd(self.step, *(run.batches for run in runs))
        self.state = {
            name: torch.stack([state[name].to(self.device, torch.float32) for state in states])
            for name in states[0]
        }
        self.sources = list(dict.fromkeys(run.source for run in runs))
        self.of = torch.tensor([self.sources.index(run.source) for run in runs], device=self.device)
        ratios = torch.tensor([run.ramp for run in runs], dtype=torch.float64)
        self.ratio, self.rise = ratios.to(self.device).unbind(1)
        self.shares: Tensor | None = None
        if self.form.startswith("IA"):
            shares = [run.share for run in runs]
            self.shares = torch.tensor(shares, device=self.device).view(1, -1, 1, 1)
        batch = runs[0].batch
        size = (self.window, len(runs), batch)
        self.known = torch.empty(*size, VOCABULARY, device=self.device)
        self.ask = torch.empty(*size, CLASSES, device=self.device)
        if self.adam:
            self.rates = torch.tensor([run.adam for run in runs], device=self.device, dtype=torch.float64)
            self.sizes = torch.empty(self.window, 2, len(runs), 1, 1, device=self.device)
            self.roots = torch.empty(self.window, 1, device=self.device)
        else:
            self.pull = torch.empty(self.window, len(runs), CLASSES, batch, device=self.device)
        self.chunk = -1
        self.graph: torch.cuda.CUDAGraph | None = None

    def _fill(self) -> None:
        """Fill the buffers with the next window's sequences and rates."""
        number, at = divmod(self.step, CHUNK)
        if number != self.chunk:
            logarithm = self.shares is None
            drawn = [draw_chunk(source, number, self.device, logarithm) for source in self.sources]
            self.counts = torch.stack([counts for counts, _ in drawn], 1)
            classes = torch.stack([classes for _, classes in drawn], 1)
            self.asks = torch.nn.functional.one_hot(classes, CLASSES).float()
            self.chunk = number
        here = slice(at, at + self.window)
        counts, ask = self.counts[here], self.asks[here]
        if self.stream is None and len(self.sources) == len(self.of):
            self.ask = ask  # each run has its own source, in order: no copy needed
        else:
            counts = counts.index_select(1, self.of)
            torch.index_select(ask, 1, self.of, out=self.ask)
        known = counts if self.shares is None else imposed_mass(counts, self.shares)
        if self.stream is None:
            self.known = known
        else:
            self.known.copy_(known)
        steps = torch.arange(self.step, self.step + self.window, device=self.device, dtype=torch.float64)
        ratio = self.ratio + self.rise * steps[:, None]
        if self.adam:
            sizes, roots = step_sizes(self.step, self.rates, ratio)
            self.sizes.copy_(sizes)
            self.roots.copy_(roots)
            return
        rate = ratio * (RATE / self.known.shape[2] / math.sqrt(VOCABULARY))
        torch.mul(self.ask.transpose(2, 3), rate.float()[:, :, None, None], out=self.pull)

    def _steps(self) -> Tensor:
        """Do a window of steps; return each run's mean loss."""
        inputs = self.known.unbind(), self.ask.unbind()
        if self.adam:
            losses = [
                adam_step(self.form, self.state, known, ask, self.target, sizes, root)
                for known, ask, sizes, root in zip(*inputs, self.sizes.unbind(), self.roots.unbind())
            ]
            return torch.stack(losses).mean(0)
        errors = [
            sgd_step(self.form, self.state, known, ask, pull, self.target, RATE)
            for known, ask, pull in zip(*inputs, self.pull.unbind())
        ]
        right = torch.stack([error.narrow(2, self.target, CLASSES) for error in errors])
        # error at the target is p_y - 1
        return -(right * self.ask).sum(3).log1p().mean((0, 2))

    def launch(self) -> None:
        """Start a window; on a GPU it runs asynchronously."""
        if self.stream is None:
            self._fill()
            self.losses = self._steps()
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._fill()
            if self.fused and self.step == 0:
                self.fused = self._fused_as_plain()
            if self.fused:
                self.losses = self._in_one_kernel(self.state)
                return
            if self.graph is None:
                self._capture()
            assert self.graph is not None
            self.graph.replay()

    def _in_one_kernel(self, state: State) -> Tensor:
        return fused.window_steps(state, self.known, self.ask, self.pull, self.target, RATE)

    def _fused_as_plain(self) -> bool:
        """Compute the first window both ways from copies of the state; return whether the results agree."""
        states = [{name: value.clone() for name, value in self.state.items()} for _ in range(2)]
        inputs, own = self.known.clone(), self.state
        try:
            losses = self._in_one_kernel(states[0])
        except Exception as error:  # the plain steps work without the kernel, whatever the error
            warnings.warn(f"{_SLOWER}: it fails on this device ({error})".splitlines()[0], stacklevel=2)
            return False
        self.state = states[1]
        expected = self._steps()
        self.state = own
        self.known.copy_(inputs)
        pairs = [(losses, expected), *((states[0][name], states[1][name]) for name in own)]
        agree = all(torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5) for ours, theirs in pairs)
        if not agree:
            warnings.warn(f"{_SLOWER}: its results differ from those of plain steps", stacklevel=2)
        return agree

    def ready(self) -> bool:
        """Return whether the current window is done."""
        return self.stream is None or self.stream.query()

    def _capture(self) -> None:
        """Capture a window as a CUDA graph; restores the state and the sequences."""
        assert self.stream is not None
        kept = {name: value.clone() for name, value in self.state.items()}
        inputs = self.known.clone()
        self._steps()  # the first matmul initializes its library, which cannot be captured
        self.graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.losses = self._steps()
        for name, value in kept.items():
            self.state[name].copy_(value)
        self.known.copy_(inputs)

    def collect(self) -> None:
        """Finish a window: record its events and drop finished runs."""
        if self.stream is not None:
            self.stream.synchronize()
        self.step += self.window
        for index, loss in enumerate(self.losses.tolist()):
            if index in self.over:
                continue
            run = self.results[index].run
            if not math.isfinite(loss):
                self.results[index].diverged = self.step
                self.over.add(index)
                self.done.append(self.results[index])
                continue
            self.sums[index] += loss * self.window
            if self.step % run.batches == 0:
                mean, self.sums[index] = self.sums[index] / run.batches, 0.0
                if self._epoch(index, mean):
                    self.over.add(index)
                    self.done.append(self.results[index])
        # On a GPU an idle run costs less than capturing another graph.
        if self.over and (self.stream is None or 2 * len(self.over) >= len(self.results)):
            left = [index for index in range(len(self.results)) if index not in self.over]
            states = [self._one(index) for index in left]
            for name in ("results", "sums", "hundred"):
                setattr(self, name, [getattr(self, name)[index] for index in left])
            self.over = set()
            if left:
                self._take(states)

    def _epoch(self, index: int, loss: float) -> bool:
        """Record the events of an epoch with this mean loss; return whether the run is finished."""
        result = self.results[index]
        run, marks = result.run, result.marks
        epoch = self.step // run.batches
        self.hundred[index].append(loss)
        if len(self.hundred[index]) == 100:
            result.hundreds.append(sum(self.hundred[index]) / 100)
            self.hundred[index] = []
        events = [f"loss {bound:g}" for bound in LOSSES if loss < bound and f"loss {bound:g}" not in marks]
        if (epoch - 1) % 100 == 0 and loss <= 1e-3 and "stop" not in marks:
            events.append("stop")
        if epoch == run.epochs:
            events.append("end")
        if events:
            mark = self._measured(index, epoch, loss)
            marks |= dict.fromkeys(events, mark)
        if epoch == run.epochs and run.share is not None:
            result.gain = measure_gain(run, self._one(index))
        every = max(1, run.epochs // _POINTS) if run.epochs > 1 else max(1, epoch // 16)
        if (epoch % every == 0 or events) and run.share is None:
            alpha = marks[events[0]].alpha if events else self._alpha(index)
            result.path.append({"step": self.step, "loss": loss, "alpha": alpha})
        reached = not run.until or f"loss {run.until:g}" in marks
        if run.brief and reached:
            return True
        finished = epoch >= run.epochs or (run.stops and "stop" in marks)
        return finished and (reached or epoch >= run.most)

    def _one(self, index: int) -> State:
        return {name: value[index] for name, value in self.state.items()}

    def _test(self, run: ToyRun) -> tuple[Tensor, Tensor]:
        source = Source(0, run.length, label_in_input=run.label_in_input)
        if source not in self.tests:
            self.tests[source] = held_out(source, device=self.device)
        return self.tests[source]

    def _alpha(self, index: int) -> float:
        run = self.results[index].run
        counts, classes = self._test(run)
        scores = ATTENTION[run.form[:2]].product(self._one(index))
        return float(relevant_mass(scores, counts, classes).mean())

    def _measured(self, index: int, epoch: int, loss: float) -> Mark:
        run = self.results[index].run
        return measure_mark(run, self._one(index), *self._test(run), epoch, loss)


def batched(runs: Sequence[ToyRun]) -> list[list[ToyRun]]:
    """Return the runs in groups that can be trained in one pass."""
    groups: dict[tuple[str, str, int, bool], list[ToyRun]] = {}
    for run in runs:
        groups.setdefault((run.form, run.optimizer, run.batch, run.label_in_input), []).append(run)
    return list(groups.values())


@torch.inference_mode()
def train(
    runs: Sequence[ToyRun],
    device: torch.device | str = "cpu",
    progress: Callable[[str, float], None] = lambda message, share: None,
    finished: Callable[[ToyResult], None] = lambda result: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[ToyResult]:
    """Train the runs concurrently; return the results of the finished ones, in the order given.

    `finished` is called with each result as it completes; `stop` is checked between windows and ends training early.
    """
    where = torch.device(device)
    batches = [] if stop() else [Batch(group, where) for group in batched(runs)]
    ended: dict[ToyRun, ToyResult] = {}
    for batch in batches:
        batch.launch()
    while batches and not stop():
        # The next window of a form does not wait for other forms.
        for batch in [batch for batch in batches if batch.ready()]:
            batch.collect()
            for result in batch.done:
                ended[result.run] = result
                finished(result)
            batch.done.clear()
            if not batch.runs:
                batches.remove(batch)
                continue
            share = min(1.0, min(other.share for other in batches))
            progress(f"toy: {len(ended)} of {len(runs)} runs", share)
            batch.launch()
    return [ended[run] for run in runs if run in ended]
