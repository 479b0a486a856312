"""The causality gate: checks of a model with user code at a study's own size, context and precision.

`raceable` verifies that a mechanism is causal at a small shape. A leak may exist only beyond some length, only in training
mode, only in large batches, or only behind a parameter that starts at zero. So the whole model gets the batches of its
study, and every check has the form: which outputs change when tokens change that must not matter?

A change that does not matter changes outputs by rounding at most, usually not at all. The size of rounding in this model is
measured with a harmless change, embeddings rounded differently, and only differences above a multiple of it count.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headtohead.mechanisms.contract.base import Frame
from headtohead.model.check.raceable import NEIGHBORS, PADDING, SECOND_TIME, future_words
from headtohead.model.decoder import Decoder

MIN_CUTS = 8
"""Minimum number of positions at which the future is cut off; a larger batch has one for every other sequence."""
_ROUNDING = {"float32": 2.0**-23, "bf16": 2.0**-8}
_LEAST = {"float32": 1e-6, "bf16": 1e-3}
"""Smaller differences, relative to the largest output, are ignored."""
_HARMLESS = 8.0
_GRADIENT = 1e-4
"""Fraction of the largest gradient that may reach inputs that must not matter, in float32."""
_BLIND = 1e-2
"""Outputs that differ by more than this fraction from call to call hide a leak of that size."""
_SEED = 20_260_101


@dataclass(frozen=True)
class Trial:
    """The batches of a study's training and evaluation."""

    train: Tensor
    """(sequences, time) tokens; two sequences or more."""
    score: Tensor
    """The same, of an evaluation pass."""
    precision: str = "float32"
    """float32 or bf16: the study's training precision. float32 is always checked too."""
    padding: Tensor | None = None
    """(sequences, time), true at real tokens, if a task's batches are padded; the same for `train` and `score`."""
    padded: bool = False
    """Whether the dataset has padded batches at all."""
    causal: bool = True
    """False for a bidirectional model."""


@dataclass(frozen=True)
class GateResult:
    """The findings of the gate, as messages."""

    failed: tuple[str, ...] = ()
    """Invalidates every score: a leak, batch dependence, state between calls, values that are not finite."""
    marks: tuple[str, ...] = ()
    """Must be mentioned with every verdict."""
    warnings: tuple[str, ...] = ()
    """For the author of the mechanism."""

    def as_dict(self) -> dict[str, list[str]]:
        """Return the result, JSON-ready."""
        return {name: list(words) for name, words in vars(self).items()}


def check_causality(model: Decoder, trial: Trial, *, shake: bool) -> GateResult:
    """Return the findings for a model; this may change the model, so pass a copy if it is still needed.

    `shake` adds noise to every parameter, once with each sign: a gate that starts at zero, or on the closed side of a
    rectifier, hides what it multiplies. Trained weights are not changed.
    """
    found = _Findings()
    where = "the initial values" if shake else "the trained weights"
    for training in (True, False):
        _finite(model, trial, training, where, found)
    if "finite" in found.words:
        return found.inspection()
    for sign in (1.0, -1.0) if shake else (0.0,):
        _perturbed(model, sign, lambda first=sign >= 0: _whole(model, trial, first, found))  # type: ignore[misc]
    return found.inspection()


@dataclass
class _Findings:
    """Findings by kind: the first message of each, and the modes in which it occurred."""

    words: dict[str, str] = field(default_factory=dict)
    modes: dict[str, dict[str, None]] = field(default_factory=dict)
    idle: list[set[str]] = field(default_factory=list)

    def add(self, kind: str, words: str, training: bool) -> None:
        self.words.setdefault(kind, words)
        self.modes.setdefault(kind, {})["training" if training else "evaluation"] = None

    def inspection(self) -> GateResult:
        messages = {
            kind: f"{text}, in {' and '.join(self.modes[kind])} mode" for kind, text in self.words.items()
        }
        marks = tuple(message for kind, message in messages.items() if kind == "random")
        failed = tuple(message for kind, message in messages.items() if kind != "random")
        idle = sorted(set.intersection(*self.idle)) if self.idle else []
        warnings = [f"the gradient of {name} is zero everywhere; is its path detached?" for name in idle]
        return GateResult(failed, marks, tuple(warnings))


class _NotFinite(Exception):
    """The noise moved a mechanism out of the domain of its initial values."""


def _perturbed(model: Decoder, sign: float, check: Callable[[], None]) -> None:
    """Run a check with noise added to every parameter, with less noise if outputs are not finite."""
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(_SEED)
    noise = {name: _noise(parameter, generator) for name, parameter in model.named_parameters()}
    for scale in (1.0, 0.1, 0.01, 0.0):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name] + sign * scale * noise[name])
        try:
            check()
            break
        except _NotFinite:
            continue
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])


def _noise(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise of the size of usual weights: half of 1 / sqrt(inputs) for matrices, 0.2 for vectors."""
    inputs = math.prod(parameter.shape[1:]) if parameter.ndim > 1 else 0
    std = 0.5 / math.sqrt(inputs) if inputs else 0.2
    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std
    return drawn.to(parameter.device, parameter.dtype)


def _whole(model: Decoder, trial: Trial, first: bool, found: _Findings) -> None:
    """Run every check at the current parameters; `first`: also those that need only one set of parameters."""
    for training in (True, False):
        for precision in dict.fromkeys(("float32", trial.precision)):
            _Mode(model, trial, training, precision, found).check(first)
    _gradients(model, trial, found)


@dataclass
class _Mode:
    """The checks of one mode and precision."""

    model: Decoder
    trial: Trial
    training: bool
    precision: str
    found: _Findings

    def __post_init__(self) -> None:
        self.tokens = self.trial.train if self.training else self.trial.score
        real = self.trial.padding
        self.real = torch.ones_like(self.tokens, dtype=torch.bool) if real is None else real
        self.tolerance, self.measured = _LEAST[self.precision], False

    def states(self, tokens: Tensor, padding: Tensor | None = None, nudge: float = 0.0) -> Tensor:
        """Return the input of the output layer, (sequences, time, features), with every generator at the same seed."""
        padding = self.trial.padding if padding is None and tokens.shape == self.tokens.shape else padding
        return _states(self.model, tokens, padding, self.training, self.precision, nudge).detach()

    def after(self, tokens: Tensor, nudge: float = 0.0) -> Tensor:
        """Return the states for changed tokens, directly after a call with the unchanged ones."""
        self.states(self.tokens)
        return self.states(tokens, nudge=nudge)

    def check(self, first: bool) -> None:
        """Run the checks; `first`: also those that need only one set of parameters."""
        base = self.states(self.tokens)
        if not torch.isfinite(base).all():
            raise _NotFinite
        if first:
            self._deterministic(base)
        changes = _changed(self.tokens, self.model.size.vocabulary)
        for cuts in _cuts(self.tokens.shape, self.trial.causal):
            mixed, kept = _mixed(self.tokens, changes, cuts)
            if self.counts(base, _moved(base, self.states(mixed), kept & self.real)[0]):
                self._explain(base, changes, cuts)
                break
        if first:
            error, _ = _moved(base, self.states(self.tokens), self.real)
            if self.counts(base, error):
                self.found.add("state", _STATE.format(error=error), self.training)
            if self.trial.padded:
                self._padding(base, changes)
            if self.trial.causal and not self.training and self.precision == "float32":
                self._every_cut(base, changes)

    def counts(self, base: Tensor, error: float) -> bool:
        """Return whether a difference exceeds rounding, which is measured on first use."""
        if error > self.tolerance and not self.measured:
            self.measured = True
            nudged = self.after(self.tokens, nudge=_ROUNDING[self.precision])
            self.tolerance = max(self.tolerance, _HARMLESS * _moved(base, nudged, self.real)[0])
        return error > self.tolerance

    def _deterministic(self, base: Tensor) -> None:
        """The same input gives the same output again; if not, distinguish state from randomness.

        State that holds the last input settles when the input is repeated, layer by layer. State that grows does not, but
        copies of the model agree with each other. Anything else counts as randomness, which is a mark while it is small.
        """
        now = self.states(self.tokens)
        if torch.equal(base, now):
            return
        noise = _moved(base, now, self.real)[0]
        if self._settles(now, noise) or self._copies_agree():
            self.found.add("state", _STATE.format(error=noise), self.training)
        elif noise > _BLIND:
            self.found.add("blind", f"{SECOND_TIME} (by {noise:.1e}){_HIDES}", self.training)
        else:
            self.found.add("random", f"{SECOND_TIME} (by {noise:.1e})", self.training)
        self.tolerance = max(self.tolerance, 4 * noise)

    def _settles(self, now: Tensor, noise: float) -> bool:
        differences = []
        for _ in range(max(8, len(self.model.layers) + 4)):
            before, now = now, self.states(self.tokens)
            differences.append(_moved(before, now, self.real)[0])
        return max(differences[-4:]) < noise / 8

    def _copies_agree(self) -> bool:
        try:
            copies = [copy.deepcopy(self.model) for _ in range(2)]
        except Exception:  # the model cannot be copied
            return False
        settings = (self.tokens, self.trial.padding, self.training, self.precision)
        return torch.equal(*(_states(one, *settings).detach() for one in copies))

    def _explain(self, base: Tensor, changes: Tensor, cuts: list[int]) -> None:
        """Report whether outputs changed because of future tokens or of other sequences."""
        others, kept = _mixed(self.tokens, changes, [])
        error, _ = _moved(base, self.after(others), kept & self.real)
        alone = self.counts(base, error)
        if alone:
            self.found.add("neighbors", NEIGHBORS.format(error=f"{error:.1e}"), self.training)
        seen = [self._future(base, changes, cuts)] if not alone else self._one_by_one(changes, cuts)
        largest, where = max(seen, default=(0.0, 0))
        if largest > self.tolerance:
            self.found.add("future", future_words(where, largest), self.training)

    def _future(self, base: Tensor, changes: Tensor, cuts: list[int]) -> tuple[float, int]:
        """Return how much outputs change when only tokens from the cuts on change, and the cut of the largest change."""
        tokens, kept = _cut_off(self.tokens, changes, {2 * row: cut for row, cut in enumerate(cuts)})
        error, row = _moved(base, self.after(tokens), kept & self.real)
        return error, cuts[row // 2] if cuts else 0

    def _every_cut(self, base: Tensor, changes: Tensor) -> None:
        """Cut the future off once at every position: a leak may be in a few positions only, such as the ends of chunks.

        In evaluation mode, which gives the scores: it costs as many sequences as the context has tokens.
        """
        if {"future", "neighbors", "state", "blind"} & self.found.words.keys():
            return
        sequences, time = self.tokens.shape
        for first in range(1, time, sequences):
            cuts = dict(enumerate(range(first, min(first + sequences, time))))
            tokens, kept = _cut_off(self.tokens, changes, cuts)
            error, row = _moved(base, self.states(tokens), kept & self.real)
            if self.counts(base, error):
                self.found.add("future", future_words(cuts[row], error), self.training)
                return

    def _one_by_one(self, changes: Tensor, cuts: list[int]) -> list[tuple[float, int]]:
        """Return the same for batches of one sequence, in case sequences depend on each other."""
        found = []
        for row, cut in enumerate(cuts[:MIN_CUTS]):
            own = slice(2 * row, 2 * row + 1)
            tokens = self.tokens[own].clone()
            padding = None if self.trial.padding is None else self.trial.padding[own]
            self.states(tokens, padding)
            before = self.states(tokens, padding)
            tokens[:, cut:] = changes[own, cut:]
            kept = self.real[own].clone()
            kept[:, cut:] = False
            found.append((_moved(before, self.states(tokens, padding), kept)[0], cut))
        return found

    def _padding(self, base: Tensor, changes: Tensor) -> None:
        """Neither the tokens at padded positions nor their number affect the real tokens."""
        time = self.tokens.shape[1]
        length = time - max(1, time // 4)
        if length < 1:
            return
        real = torch.zeros_like(self.tokens, dtype=torch.bool)
        real[:, :length] = True
        filled = self.tokens.clone()
        filled[:, length:] = changes[:, length:]
        self.states(filled, real)
        before, after = self.states(self.tokens, real), self.states(filled, real)
        short = self.states(self.tokens[:, :length], real[:, :length])
        shorter = (
            _moved(short, before[:, :length], real[:, :length])[0] - 1e-4
        )  # other shapes round otherwise
        if self.counts(base, error := max(_moved(before, after, real)[0], shorter)):
            self.found.add("padding", PADDING.format(side="right", error=f"{error:.1e}"), self.training)


_HIDES = ", too much to detect a leak; torch's default generator is seeded, a generator of its own is not"
_STATE = (
    "it keeps state between calls: the same input gives another output after a different one (by {error:.1e})"
)


def _finite(model: Decoder, trial: Trial, training: bool, where: str, found: _Findings) -> None:
    """Outputs, and in training every gradient, are finite at the unchanged parameters."""
    tokens = trial.train if training else trial.score
    states = _states(model, tokens, trial.padding, training, trial.precision)
    if not torch.isfinite(states).all():
        found.add("finite", f"outputs are not finite in {trial.precision} at {where}", training)
    elif training:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(states.square().mean(), parameters, allow_unused=True)
        if not all(bool(torch.isfinite(one).all()) for one in gradients if one is not None):
            found.add("finite", f"gradients are not finite in {trial.precision} at {where}", training)


def _gradients(model: Decoder, trial: Trial, found: _Findings) -> None:
    """No gradient of kept outputs reaches cut-off inputs; noise that hides a leak in the outputs does not hide it here."""
    tokens = trial.train
    (cuts,) = _cuts(tokens.shape, trial.causal)[:1]
    _, kept = _mixed(tokens, tokens, cuts)
    real = torch.ones_like(kept) if trial.padding is None else trial.padding
    frame, entered = Frame(), list[Tensor]()
    states = _states(model, tokens, trial.padding, True, "float32", frame=frame, entered=entered)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(_SEED)).to(states.device)
    score = (states * weights)[kept & real].sum()
    if not score.requires_grad or not entered[0].requires_grad:
        return
    (reached,) = torch.autograd.grad(score, entered[0], retain_graph=True)
    sizes = reached.abs().amax(-1)
    largest = float(sizes.max())
    leaked = float(sizes[~kept & real].max()) / largest if largest and bool((~kept & real).any()) else 0.0
    if leaked > _GRADIENT and not {"future", "neighbors"} & found.words.keys():
        rows = (sizes * (~kept & real)).amax(-1)
        row = int(rows.argmax())
        words = NEIGHBORS.format(error=f"{leaked:.1e}")
        if not row % 2 and row // 2 < len(cuts):
            words = (
                f"it sees the future: outputs before position {cuts[row // 2]} have a gradient with respect to later "
                f"embeddings (by {leaked:.1e})"
            )
        found.add("neighbors" if row % 2 else "future", words, True)
    own = {
        f"blocks.{index}.mechanism.{name}": parameter
        for index, block in enumerate(model.layers)
        for name, parameter in block.mechanism.named_parameters()
        if parameter.requires_grad and block.mixes and name not in block.mechanism.idle
    }
    # The mechanisms' own loss terms may depend on any token, and train parameters that nothing else does.
    total = score + sum((value.sum() for value in frame.losses.values()), start=score.new_zeros(()))
    gradients = torch.autograd.grad(total, list(own.values()), allow_unused=True) if own else ()
    pairs = zip(own, gradients, strict=True)
    found.idle.append({name for name, one in pairs if one is None or not bool(one.any())})


def _states(
    model: Decoder,
    tokens: Tensor,
    padding: Tensor | None,
    training: bool,
    precision: str,
    nudge: float = 0.0,
    frame: Frame | None = None,
    entered: list[Tensor] | None = None,
) -> Tensor:
    """Return the normalized states (sequences, time, features) in float32; `entered` gets the embeddings."""

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if nudge:
            generator = torch.Generator().manual_seed(_SEED)
            drawn = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
            output = output * (1 + nudge * drawn)
        if entered is not None:
            entered.append(output)
        return output

    handle = model.embedding.register_forward_hook(hook)
    model.train(training)
    device = tokens.device.type
    try:
        with (
            _seeded(tokens.device),
            torch.set_grad_enabled(training),
            torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"),
        ):
            # A compiled model has its graph in the instance: call the class's code instead.
            states = type(model).hidden(model, tokens, padding=padding, frame=frame)
    finally:
        handle.remove()
    return states.float()


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Seed every default generator inside, so that dropout repeats; restore the generators on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_SEED)
            random.seed(_SEED)
            np.random.seed(_SEED % 2**32)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@torch.no_grad()
def _moved(before: Tensor, after: Tensor, kept: Tensor) -> tuple[float, int]:
    """Return the largest difference where outputs must not change, relative to the largest output, and its sequence."""
    if not bool(kept.any()):
        return 0.0, 0
    error = (after - before).abs().amax(-1).masked_fill(~kept, 0.0)
    if not torch.isfinite(error).all():
        return float("inf"), 0
    scale = max(float(before.abs().amax(-1)[kept].max()), 1e-30)
    return float(error.max()) / scale, int(error.amax(-1).argmax())


def _changed(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return different tokens at every position, deterministically."""
    generator = torch.Generator().manual_seed(_SEED)
    step = torch.randint(1, max(2, vocabulary), tokens.shape, generator=generator)
    return (tokens + step.to(tokens.device)) % vocabulary


def _mixed(tokens: Tensor, changes: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Return tokens with every second sequence changed and the others from their cuts on, and a mask of what must stay."""
    mixed, kept = tokens.clone(), torch.zeros_like(tokens, dtype=torch.bool)
    mixed[1::2], kept[::2] = changes[1::2], True
    for row, cut in enumerate(cuts):
        mixed[2 * row, cut:] = changes[2 * row, cut:]
        kept[2 * row, cut:] = False
    return mixed, kept


def _cut_off(tokens: Tensor, changes: Tensor, cuts: dict[int, int]) -> tuple[Tensor, Tensor]:
    """Return tokens with some sequences changed from their cuts on, and a mask of the positions before the cuts."""
    cut_off, kept = tokens.clone(), torch.zeros_like(tokens, dtype=torch.bool)
    for row, cut in cuts.items():
        cut_off[row, cut:], kept[row, :cut] = changes[row, cut:], True
    return cut_off, kept


def _cuts(shape: torch.Size, causal: bool) -> list[list[int]]:
    """Return the positions at which the future is cut off: for each pass, one for every other sequence.

    They also fall inside bidirectional blocks of any size: positions are even and odd, include the first and the last, and
    the rest are spaced by the golden ratio, which no block size divides.
    """
    sequences, time = shape
    rows = (sequences + 1) // 2
    if not causal or time < 2:
        return [[]]
    wanted = max(MIN_CUTS, rows)
    spread = (1 + int((0.5 + place * 0.6180339887498949) % 1 * (time - 1)) for place in range(4 * wanted))
    chosen = list(dict.fromkeys([time - 1, 1, time // 2, time // 2 + 1, *spread]))
    chosen = [cut for cut in chosen if 1 <= cut < time][:wanted]
    return [chosen[first : first + rows] for first in range(0, len(chosen), rows)]
