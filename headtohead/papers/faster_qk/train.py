"""Plain SGD, or Adam, on many toy runs in one pass: all runs of one form and batch size share every matmul.

On a GPU a window of steps is one CUDA graph, or one kernel where `fused` has it, and the forms run side by side on
streams of their own: a step is some ten kernels too small to fill the device, so what counts is how many wait for each
other.
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
"""How many points of a run's path are kept, about."""
_SLOWER = "the toy goes on without its kernel, and slower"


@dataclass
class ToyResult:
    """What became of one run."""

    run: ToyRun
    marks: dict[str, Mark] = field(default_factory=dict)
    """By event: `loss 0.1` (the first epoch whose mean is below), `stop` (the published rule), `end` (its epochs are over)."""
    hundreds: list[float] = field(default_factory=list)
    """Mean loss of every 100 epochs."""
    path: list[dict[str, float]] = field(default_factory=list)
    """Step, loss and alpha on the way."""
    gain: dict[str, float] | None = None
    """With imposed attention: the loss, and what a little more mass on distinct tokens would take off it."""

    diverged: int | None = None
    """The step at which its loss was no number any more."""

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
        """Return what `as_dict` gave."""
        marks = {event: Mark.from_dict(mark) for event, mark in values["marks"].items()}
        run = ToyRun(**values["run"])
        return cls(run, marks, values["hundreds"], values["path"], values["gain"], values["diverged"])


def start_state(run: ToyRun) -> State:
    """Return a run's parameters at step 0, in float64; they depend on its seed and start values alone."""
    generator = torch.Generator().manual_seed(run.seed)
    draws = {"tiny": tiny(), "default": default(generator)}
    qk = ATTENTION[run.form[:2]].start(draws[run.qk_start])
    state = qk | OUTPUT[run.form[2:]].start(draws[run.ov_start])
    return state if run.adam is None else state | moments(state)


def sgd_step(
    form: str, state: State, known: Tensor, ask: Tensor, pull: Tensor, target: int, rate: float
) -> Tensor:
    """Do one step of every run in place; return the error of the logits (runs, batch, vocabulary) before it.

    `known` holds log counts, or masses where they are imposed (runs, batch, vocabulary), and is overwritten; `ask`
    the classes, one-hot (runs, batch, 4); `pull` the same transposed, times lr_QK / (batch sqrt(50)).
    """
    attention, output = ATTENTION[form[:2]], OUTPUT[form[2:]]
    mass = attention.attend(state, known, ask)
    error = output.logits(state, mass).softmax(2)
    error.narrow(2, target, CLASSES).sub_(ask)
    slope = output.learn(state, mass, error, rate / error.shape[1])
    attention.learn(state, mass, slope, pull)
    return error


class Batch:
    """Runs of one form and optimiser, trained together window by window; a window divides every run's epoch."""

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
        """The runs still at work."""
        return [result.run for place, result in enumerate(self.results) if place not in self.over]

    @property
    def share(self) -> float:
        """How far its slowest run has come, about."""
        return self.step / self.expected

    def _take(self, states: list[State]) -> None:
        """Stack the states of the runs at work, and make room for a window's sequences."""
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
        """Put the next window's sequences and rates in place."""
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
            self.ask = ask  # each run has a source of its own, in order: nothing needs copying
        else:
            counts = counts.index_select(1, self.of)
            torch.index_select(ask, 1, self.of, out=self.ask)
        receive = counts if self.shares is None else imposed_mass(counts, self.shares)
        if self.stream is None:
            self.known = receive
        else:
            self.known.copy_(receive)
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
        """Begin a window; on a GPU it goes on while others are begun."""
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
        """Do the first window both ways from the same state, which stays; return whether they agree."""
        states = [{name: value.clone() for name, value in self.state.items()} for _ in range(2)]
        inputs, own = self.known.clone(), self.state
        try:
            losses = self._in_one_kernel(states[0])
        except (
            Exception
        ) as error:  # whatever keeps the kernel from running here, the plain steps do without it
            warnings.warn(f"{_SLOWER}: it does not run here ({error})".splitlines()[0], stacklevel=2)
            return False
        self.state = states[1]
        expected = self._steps()
        self.state = own
        self.known.copy_(inputs)
        pairs = [(losses, expected), *((states[0][name], states[1][name]) for name in own)]
        agree = all(torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5) for ours, theirs in pairs)
        if not agree:
            warnings.warn(f"{_SLOWER}: it gives other numbers than plain steps do", stacklevel=2)
        return agree

    def ready(self) -> bool:
        """Whether the window that was begun is done."""
        return self.stream is None or self.stream.query()

    def _capture(self) -> None:
        """Record a window as a CUDA graph; the state and the sequences are as before."""
        assert self.stream is not None
        kept = {name: value.clone() for name, value in self.state.items()}
        inputs = self.known.clone()
        self._steps()  # the first use of a matmul sets up its library, which cannot be recorded
        self.graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.losses = self._steps()
        for name, value in kept.items():
            self.state[name].copy_(value)
        self.known.copy_(inputs)

    def collect(self) -> None:
        """End a window: mark what it reached, and let runs go that are over."""
        if self.stream is not None:
            self.stream.synchronize()
        self.step += self.window
        for place, loss in enumerate(self.losses.tolist()):
            if place in self.over:
                continue
            run = self.results[place].run
            if not math.isfinite(loss):
                self.results[place].diverged = self.step
                self.over.add(place)
                self.done.append(self.results[place])
                continue
            self.sums[place] += loss * self.window
            if self.step % run.batches == 0:
                mean, self.sums[place] = self.sums[place] / run.batches, 0.0
                if self._epoch(place, mean):
                    self.over.add(place)
                    self.done.append(self.results[place])
        # On a GPU a run that idles costs less than another graph.
        if self.over and (self.stream is None or 2 * len(self.over) >= len(self.results)):
            left = [place for place in range(len(self.results)) if place not in self.over]
            states = [self._one(place) for place in left]
            for name in ("results", "sums", "hundred"):
                setattr(self, name, [getattr(self, name)[place] for place in left])
            self.over = set()
            if left:
                self._take(states)

    def _epoch(self, place: int, loss: float) -> bool:
        """Note what an epoch's mean loss means for a run; return whether the run is over."""
        result = self.results[place]
        run, marks = result.run, result.marks
        epoch = self.step // run.batches
        self.hundred[place].append(loss)
        if len(self.hundred[place]) == 100:
            result.hundreds.append(sum(self.hundred[place]) / 100)
            self.hundred[place] = []
        events = [f"loss {bound:g}" for bound in LOSSES if loss < bound and f"loss {bound:g}" not in marks]
        if (epoch - 1) % 100 == 0 and loss <= 1e-3 and "stop" not in marks:
            events.append("stop")
        if epoch == run.epochs:
            events.append("end")
        if events:
            mark = self._measured(place, epoch, loss)
            marks |= dict.fromkeys(events, mark)
        if epoch == run.epochs and run.share is not None:
            result.gain = measure_gain(run, self._one(place))
        every = max(1, run.epochs // _POINTS) if run.epochs > 1 else max(1, epoch // 16)
        if (epoch % every == 0 or events) and run.share is None:
            alpha = marks[events[0]].alpha if events else self._alpha(place)
            result.path.append({"step": self.step, "loss": loss, "alpha": alpha})
        reached = not run.until or f"loss {run.until:g}" in marks
        if run.brief and reached:
            return True
        finished = epoch >= run.epochs or (run.stops and "stop" in marks)
        return finished and (reached or epoch >= run.most)

    def _one(self, place: int) -> State:
        return {name: value[place] for name, value in self.state.items()}

    def _test(self, run: ToyRun) -> tuple[Tensor, Tensor]:
        source = Source(0, run.length, label_in_input=run.label_in_input)
        if source not in self.tests:
            self.tests[source] = held_out(source, device=self.device)
        return self.tests[source]

    def _alpha(self, place: int) -> float:
        run = self.results[place].run
        counts, classes = self._test(run)
        scores = ATTENTION[run.form[:2]].product(self._one(place))
        return float(relevant_mass(scores, counts, classes).mean())

    def _measured(self, place: int, epoch: int, loss: float) -> Mark:
        run = self.results[place].run
        return measure_mark(run, self._one(place), *self._test(run), epoch, loss)


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
    progress: Callable[[str, float], None] = lambda words, share: None,
    finished: Callable[[ToyResult], None] = lambda result: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[ToyResult]:
    """Train the runs side by side; return those that came to their end, in the order given.

    `finished` is told each result as it comes; `stop` is asked between windows and ends the work early.
    """
    place = torch.device(device)
    batches = [] if stop() else [Batch(group, place) for group in batched(runs)]
    ended: dict[ToyRun, ToyResult] = {}
    for batch in batches:
        batch.launch()
    while batches and not stop():
        # A form's next window does not wait for the other forms.
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
