"""Train many toy runs in one pass with plain SGD or Adam: all runs of one form and batch size share every matmul.

On a GPU a window of steps is one CUDA graph, or one kernel if `fused` supports the form. Forms run concurrently on
separate streams, because a step is about ten kernels that are too small to fill the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headtohead.data.tasks.toy import CLASSES, VOCABULARY
from headtohead.kernels.cuda_graph import CudaGraph
from headtohead.papers.faster_qk import forms, fused
from headtohead.papers.faster_qk.forms import State
from headtohead.papers.faster_qk.measure import Mark, imposed_mass, measure_gain, measure_mark
from headtohead.papers.faster_qk.runs import LOSSES, RATE, ToyRun
from headtohead.papers.faster_qk.task import CHUNK, draw_chunk

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
        return asdict(self) | {"run": self.run.as_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ToyResult:
        """Return the result stored by `as_dict`."""
        marks = {event: Mark(**mark) for event, mark in values["marks"].items()}
        run = ToyRun(**values["run"])
        return cls(run, marks, values["hundreds"], values["path"], values["gain"], values["diverged"])


def start_state(run: ToyRun) -> State:
    """Return a run's parameters at step 0 in float64; they depend only on its seed and initialization."""
    generator = torch.Generator().manual_seed(run.seed)
    draws: dict[str, forms.Start] = {"tiny": forms.tiny, "default": partial(forms.default, generator)}
    qk = forms.ATTENTION[run.form[:2]].start(draws[run.qk_start])
    state = qk | forms.OUTPUT[run.form[2:]].start(draws[run.ov_start])
    return state if run.adam is None else state | forms.moments(state)


@dataclass
class _Active:
    """A run in training."""

    result: ToyResult
    total: float = 0.0
    """Sum of the losses of the current epoch's steps."""
    recent: list[float] = field(default_factory=list)
    """Mean losses of the epochs since the last 100."""
    over: bool = False


class Batch:
    """Runs of one form and optimizer, trained together window by window; a window divides every run's epoch."""

    def __init__(self, runs: Sequence[ToyRun], device: torch.device) -> None:
        self.form, self.device = runs[0].form, device
        self.target = runs[0].source.target
        self.active = [_Active(ToyResult(run)) for run in runs]
        self.done: list[ToyResult] = []
        self.step = 0
        self.adam = runs[0].adam is not None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        serves = not self.adam and fused.serves(self.form, runs[0].batch, device)
        self.fused = self.stream is not None and serves
        self._take([start_state(run) for run in runs])

    @property
    def runs(self) -> list[ToyRun]:
        """The unfinished runs."""
        return [one.result.run for one in self.active if not one.over]

    def _take(self, states: list[State]) -> None:
        """Stack the states of the unfinished runs."""

        def each(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=self.device)

        runs = self.runs
        self.expected = max(run.expected_steps for run in runs)
        self.window = math.gcd(self.step, *(run.batches for run in runs))
        self.state = {
            name: torch.stack([state[name].to(self.device, torch.float32) for state in states])
            for name in states[0]
        }
        self.sources = list(dict.fromkeys(run.source for run in runs))
        self.of = torch.tensor([self.sources.index(run.source) for run in runs], device=self.device)
        self.ratio, self.rise = each([run.ramp for run in runs]).unbind(1)
        self.rates = each([run.adam for run in runs]) if self.adam else None
        imposed = self.form.startswith("IA")
        self.shares = each([run.share for run in runs]).float().view(1, -1, 1, 1) if imposed else None
        self.chunk = -1
        self.inputs: dict[str, Tensor] = {}
        self.graph: CudaGraph[Tensor] | None = None

    def _fill(self) -> None:
        """Set `inputs` to the next window's sequences and rates; on a GPU in place, because a graph reads them there."""
        number, at = divmod(self.step, CHUNK)
        if number != self.chunk:
            logarithm = self.shares is None
            drawn = [draw_chunk(source, number, self.device, logarithm) for source in self.sources]
            self.counts = torch.stack([counts for counts, _ in drawn], 1)
            classes = torch.stack([classes for _, classes in drawn], 1)
            self.asks = torch.nn.functional.one_hot(classes, CLASSES).float()
            self.chunk = number
        here = slice(at, at + self.window)
        known, ask = self.counts[here], self.asks[here]
        if self.stream is not None or len(self.sources) < len(self.of):
            # On CPU no copy is needed if each run has its own source, in order.
            known, ask = known.index_select(1, self.of), ask.index_select(1, self.of)
        if self.shares is not None:
            known = imposed_mass(known, self.shares)
        steps = torch.arange(self.step, self.step + self.window, device=self.device, dtype=torch.float64)
        ratio = self.ratio + self.rise * steps[:, None]
        filled = {"known": known, "ask": ask}
        if self.rates is not None:
            sizes, roots = forms.step_sizes(self.step, self.rates, ratio)
            filled |= {"sizes": sizes.float(), "roots": roots.float()}
        else:
            rate = ratio * (RATE / known.shape[2] / math.sqrt(VOCABULARY))
            filled["pull"] = (ask.transpose(2, 3) * rate.float()[:, :, None, None]).contiguous()
        if self.stream is None or not self.inputs:
            self.inputs = filled
            return
        for name, value in filled.items():
            self.inputs[name].copy_(value)

    def _steps(self) -> Tensor:
        """Do a window of steps; return each run's mean loss."""
        steps = zip(*(value.unbind() for value in self.inputs.values()))
        if self.adam:
            losses = [forms.adam_step(self.form, self.state, self.target, *step) for step in steps]
            return torch.stack(losses).mean(0)
        errors = [forms.sgd_step(self.form, self.state, self.target, RATE, *step) for step in steps]
        right = torch.stack([error.narrow(2, self.target, CLASSES) for error in errors])
        # error at the target is p_y - 1
        return -(right * self.inputs["ask"]).sum(3).log1p().mean((0, 2))

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
                with self._trial():
                    self.graph = CudaGraph(self._steps, self.device, warmup=1, stream=self.stream)
            self.losses = self.graph.replay()

    def _in_one_kernel(self, state: State) -> Tensor:
        return fused.window_steps(state, **self.inputs, target=self.target, rate=RATE)

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Restore the state and the sequences afterwards."""
        kept, known = (
            {name: value.clone() for name, value in self.state.items()},
            self.inputs["known"].clone(),
        )
        yield
        for name, value in kept.items():
            self.state[name].copy_(value)
        self.inputs["known"].copy_(known)

    def _fused_as_plain(self) -> bool:
        """Compute the first window both ways; return whether the results agree."""
        ours = {name: value.clone() for name, value in self.state.items()}
        try:
            losses = self._in_one_kernel(ours)
        except Exception as error:  # the plain steps work without the kernel, whatever the error
            warnings.warn(f"{_SLOWER}: it fails on this device ({error})".splitlines()[0], stacklevel=2)
            return False
        with self._trial():
            pairs = [(losses, self._steps()), *((ours[name], self.state[name]) for name in ours)]
            agree = all(torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in pairs)
        if not agree:
            warnings.warn(f"{_SLOWER}: its results differ from those of plain steps", stacklevel=2)
        return agree

    def collect(self) -> None:
        """Finish a window: record its events and drop finished runs."""
        if self.stream is not None:
            self.stream.synchronize()
        self.step += self.window
        for index, (one, loss) in enumerate(zip(self.active, self.losses.tolist())):
            if one.over:
                continue
            batches = one.result.run.batches
            if not math.isfinite(loss):
                one.result.diverged, one.over = self.step, True
            else:
                one.total += loss * self.window
                if self.step % batches == 0:
                    mean, one.total = one.total / batches, 0.0
                    one.over = self._epoch(one, self._one(index), mean)
            if one.over:
                self.done.append(one.result)
        left = [index for index, one in enumerate(self.active) if not one.over]
        # On a GPU an idle run costs less than capturing another graph.
        if len(left) < len(self.active) and (self.stream is None or 2 * len(left) <= len(self.active)):
            states = [self._one(index) for index in left]
            self.active = [self.active[index] for index in left]
            if left:
                self._take(states)

    def _one(self, index: int) -> State:
        return {name: value[index] for name, value in self.state.items()}

    def _epoch(self, one: _Active, state: State, loss: float) -> bool:
        """Record the events of an epoch with this mean loss; return whether the run is finished."""
        result = one.result
        run, marks = result.run, result.marks
        epoch = self.step // run.batches
        one.recent.append(loss)
        if len(one.recent) == 100:
            result.hundreds.append(sum(one.recent) / 100)
            one.recent = []
        events = [f"loss {bound:g}" for bound in LOSSES if loss < bound and f"loss {bound:g}" not in marks]
        if (epoch - 1) % 100 == 0 and loss <= 1e-3 and "stop" not in marks:
            events.append("stop")
        if epoch == run.epochs:
            events.append("end")
        every = max(1, run.epochs // _POINTS) if run.epochs > 1 else max(1, epoch // 16)
        on_path = run.share is None and (epoch % every == 0 or bool(events))
        if events or on_path:
            mark = measure_mark(run, state, epoch, loss)
            marks |= dict.fromkeys(events, mark)
            if on_path:
                result.path.append({"step": self.step, "loss": loss, "alpha": mark.alpha})
        if epoch == run.epochs and run.share is not None:
            result.gain = measure_gain(run, state)
        reached = not run.until or f"loss {run.until:g}" in marks
        if run.brief and reached:
            return True
        finished = epoch >= run.epochs or (run.stops and "stop" in marks)
        return finished and (reached or epoch >= run.most)


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
        for batch in [one for one in batches if one.stream is None or one.stream.query()]:
            batch.collect()
            for result in batch.done:
                ended[result.run] = result
                finished(result)
            batch.done.clear()
            if not batch.runs:
                batches.remove(batch)
                continue
            share = min(1.0, *(other.step / other.expected for other in batches))
            progress(f"toy: {len(ended)} of {len(runs)} runs", share)
            batch.launch()
    return [ended[run] for run in runs if run in ended]
