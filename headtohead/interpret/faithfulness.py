"""Where a model attends when it answers, and whether that explains the answer: attention on a task's relevant tokens.

Everything is measured at the read-out row, from which the answer is read, over real tokens only. Two explanations come
from attention averaged over heads: `rollout`, the read-out row of the product of the layers' maps, each mixed with the
identity (share 0.5; a single layer is not mixed), and `layer_mean`. `gradient` is a control, `chance` the floor. A signed
map is replaced by its absolute values, renormalized by row, and is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.common.progress import part_of
from headtohead.data.tasks.base import Example, Task, spread
from headtohead.data.text import Array
from headtohead.evaluation.loss import evaluating
from headtohead.interpret.deletion import SHARES, USUAL, deletions
from headtohead.interpret.maps import indicators, layer_maps, watching
from headtohead.interpret.readout import ReadBatch, batched, budget, chances, check_task_matches, reads_of
from headtohead.interpret.saliency import chance, gradient_x_input
from headtohead.mechanisms.contract.base import Frame, Mechanism
from headtohead.model.classifier import Pointer
from headtohead.model.decoder import Decoder

THRESHOLDS = {"10": 0.1, "33": 0.33, "50": 0.5}
"""Thresholds of Attention Confidence by name: percent, because a dot would split a path of keys."""
ATTENTION = ("rollout", "layer_mean")
EDGES: dict[str, tuple[float, ...]] = {
    "common": (0.0, 0.1, 0.33, 0.5, 1.0),
    "toy": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "hatexplain": (0.0, 0.33, 0.66, 1.0),
    "agreement": (0.0, 0.1, 0.5, 1.0),
    "squad": (0.0, 0.05, 0.1, 0.5, 1.0),
}
"""Bin edges of the heat map of (mass, probability of the right answer): a common grid, and the paper's by task."""
READS = 8
_PICTURED = 32
"""Number of examples whose maps are used for the indicators."""


@dataclass(frozen=True)
class Published:
    """One of the paper's rules of Attention Confidence; over all examples, right or wrong."""

    row: str
    threshold: float
    least: float = 0.0
    """Minimum probability of the right answer."""


# Two of the paper's rules read row 127, mostly the query of a padding token. Here the read-out row is used instead.
PUBLISHED = {
    "squad": Published("rollout", 0.1),
    "agreement": Published("first_head", 0.1, 0.1),
    "hatexplain": Published("layer_mean", 0.33),
}


@dataclass
class Explained:
    """Results for every example of a split; the first dimension of an array is the example, in the split's order."""

    task: str
    mass: dict[str, Array]
    """By explanation: the share on relevant tokens, mean over annotators and reads; NaN if none are marked."""
    uniform: Array
    """The same for uniform attention over all visible tokens."""
    right: Array
    """Probability of the right answer, mean over reads."""
    correct: Array
    """Whether every read gave the right answer."""
    deleted: dict[str, Array]
    """By explanation and for chance: (examples, shares, 2), comprehensiveness and sufficiency; NaN below two tokens."""
    entropy: Array
    """(examples, layers): nats of the read-out row, mean over heads; NaN for a layer without a map."""
    sink: Array
    """(examples, layers): weight of the read-out row on the first token."""
    indicators: list[dict[str, float] | None]
    """By layer, averaged over a few examples."""
    signed: list[int] = field(default_factory=list)
    """Layers, counted from 1, whose map is signed."""
    without_map: list[str] = field(default_factory=list)
    """Layers without a map, with their mechanism."""
    reads: int = 0

    @property
    def marked(self) -> Array:
        """Whether each example has relevant tokens that the model could see."""
        return np.asarray(~np.isnan(self.uniform))

    def summary(self) -> dict[str, Any]:
        """Return all numbers, JSON-ready; undefined ones are None."""
        marked, floor = self.marked, _lost(self.deleted["chance"])
        return {
            "task": self.task,
            "examples": len(marked),
            "marked": int(marked.sum()),
            "marked_share": float(marked.mean()),
            "reads": self.reads,
            "too_short": int(np.isnan(self.deleted["chance"][:, 0, 0]).sum()),
            "accuracy": float(self.correct.mean()),
            "right": float(self.right.mean()),
            "uniform": _mean(self.uniform),
            "signed_layers": self.signed,
            "without_map": self.without_map,
            "explanations": {
                name: self._explanation(name, floor) for name in self.deleted if name != "chance"
            },
            "chance": floor,
            "published": self._rules(),
            "layers": {
                str(index + 1): {
                    "entropy": _mean(self.entropy[:, index]),
                    "sink": _mean(self.sink[:, index]),
                    "indicators": values,
                }
                for index, values in enumerate(self.indicators)
            },
            "mean": {"entropy": _mean(self.entropy), "sink": _mean(self.sink)},
        }

    def _explanation(self, name: str, floor: dict[str, float | None]) -> dict[str, Any]:
        mass, uniform, lost = _mean(self.mass[name]), _mean(self.uniform), _lost(self.deleted[name])

        def confidence(**how: bool) -> dict[str, float | None]:
            return {key: self.confidence(name, at, **how) for key, at in THRESHOLDS.items()}

        grids: list[str] = []
        if name in ATTENTION and self.marked.any():
            grids = ["common", *(prefix for prefix in EDGES if self.task.startswith(prefix))]
        return {
            "heat_maps": {
                grid: {"edges": list(EDGES[grid]), "counts": self.heat_map(name, grid).tolist()}
                for grid in grids
            },
            "mass": mass,
            "over_uniform": mass / uniform if mass is not None and uniform else None,
            "confidence": confidence(),
            "confidence_correct": confidence(correct=True),
            "confidence_all": confidence(everyone=True),
            **lost,
            "above_chance": {
                key: None if value is None or (least := floor[key]) is None else value - least
                for key, value in lost.items()
            },
        }

    def confidence(
        self, name: str, threshold: float, *, correct: bool = False, everyone: bool = False
    ) -> float | None:
        """Return the percentage of marked examples whose mass is above `threshold`.

        `correct` also requires the right answer; `everyone` divides by all examples.
        """
        marked = self.marked
        total = len(marked) if everyone else int(marked.sum())
        if not total:
            return None
        above = marked & (np.nan_to_num(self.mass[name]) > threshold) & (self.correct | (not correct))
        return 100.0 * float(above.sum()) / total

    def heat_map(self, name: str, grid: str = "common") -> Array:
        """Return the number of marked examples in each cell: rows are mass, columns the probability of the right answer."""
        marked, edges = self.marked, EDGES[grid]
        mass, right = (np.clip(values[marked], 0.0, 1.0) for values in (self.mass[name], self.right))
        return np.histogram2d(mass, right, bins=(edges, edges))[0].astype(np.int64)

    def _rules(self) -> dict[str, float | None]:
        """Return the result of each of the paper's rules by its task, and of this task's rule, if any, as `own`."""
        found: dict[str, float | None] = {}
        for task, rule in PUBLISHED.items():
            found[task] = None
            if rule.row in self.mass:
                above = self.marked & (np.nan_to_num(self.mass[rule.row]) > rule.threshold)
                above &= (self.right > rule.least) | (rule.least == 0)
                found[task] = 100.0 * float(above.mean())
        return found | {"own": next((found[name] for name in found if self.task.startswith(name)), None)}


def _mean(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _lost(deleted: Array) -> dict[str, float | None]:
    """Return comprehensiveness and sufficiency at the usual share, and their means over all shares."""
    usual = SHARES.index(USUAL)
    found: dict[str, float | None] = {}
    for index, name in enumerate(("comprehensiveness", "sufficiency")):
        found[name] = _mean(deleted[:, usual, index])
        found[f"aopc_{name}"] = _mean(deleted[:, :, index].mean(-1))
    return found


def normalised(weights: Tensor) -> Tensor:
    """Return rows of absolute values that sum to 1, or to 0 if a row attends to nothing."""
    weights = weights.nan_to_num(0.0).abs()  # a softmax over no keys is NaN
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)


def rolled_out(maps: Sequence[Tensor], places: Tensor, share: float) -> Tensor:
    """Return the rows `places` (batch,) of the product A_L ... A_1 of maps (batch, time, time), as (batch, time).

    Each A is share x map + (1 - share) x identity with renormalized rows.
    """
    row = torch.nn.functional.one_hot(places, maps[0].shape[-1]).to(maps[0].dtype)
    for weights in reversed(maps):
        # Rows of A are renormalized before the product, which is the same as dividing the vector by the row sums.
        row = row / (share * weights.sum(-1) + (1 - share)).clamp_min(1e-30)
        row = share * (row.unsqueeze(1) @ weights).squeeze(1) + (1 - share) * row
    return row


@dataclass
class _Rows:
    """The read-out rows of a batch's maps."""

    explanations: dict[str, Tensor]
    """rollout, layer_mean and first_head: (batch, time); empty if no layer has a map."""
    entropy: Tensor
    sink: Tensor
    signed: list[int]
    without_map: list[str]


@torch.no_grad()
def attention_rows(model: Decoder, batch: ReadBatch) -> _Rows:
    """Return the explanations from the layers' maps for a batch of reads."""
    real, layers = batch.real, model.layers
    rows = torch.arange(len(real), device=real.device)
    maps: dict[int, Tensor] = {}
    at_readout: dict[int, Tensor] = {}
    signed: list[int] = []
    nothing = torch.full((len(real), len(layers)), torch.nan, dtype=torch.float64, device=real.device)
    entropy, sink = nothing, nothing.clone()

    def take(index: int, mechanism: Mechanism, x: Tensor, frame: Frame) -> None:
        weights = mechanism.attention_map(x, frame)
        if weights is None:
            return
        if mechanism.signed:
            signed.append(index + 1)
        row = normalised(weights[rows, :, batch.places].double().masked_fill(~real[:, None], 0.0))
        entropy[:, index] = -torch.special.xlogy(row, row).sum(-1).mean(-1)
        sink[:, index] = row[..., 0].mean(-1)
        at_readout[index] = row
        if len(layers) > 1:
            whole = weights.masked_fill(~(real[:, None, None] & real[:, None, :, None]), 0.0)
            maps[index] = normalised(whole).mean(1)

    frame = Frame()
    with watching(model, frame, take):
        model.hidden(batch.tokens, padding=batch.padding, frame=frame, rows=batch.places)
    found: dict[str, Tensor] = {}
    if at_readout:
        found["layer_mean"] = torch.stack([row.mean(1) for row in at_readout.values()]).mean(0)
        found["first_head"] = at_readout[max(at_readout)][:, 0]
        if len(layers) == 1:
            found["rollout"] = found["layer_mean"]
        elif len(at_readout) == len(layers):
            found["rollout"] = rolled_out([maps[index].double() for index in sorted(maps)], batch.places, 0.5)
    names = {index: f"layer {index + 1} ({block.mechanism.name})" for index, block in enumerate(layers)}
    missing = [name for index, name in names.items() if index not in at_readout]
    return _Rows(found, entropy, sink, signed, missing)


def explain_model(
    model: Decoder,
    task: Task,
    split: str = "test",
    *,
    limit: int = 0,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> Explained:
    """Return where a model attends on a task's split; `limit` selects that many examples, spread evenly over it.

    An example with many targets is read at most at `READS` of them, spread evenly; `seed` is that of the random scores.
    """
    if split not in task.splits:
        raise UserError(f"a task has no split '{split}' (allowed: {', '.join(task.splits)})")
    check_task_matches(model, task)
    examples = spread(task.splits[split], limit)
    with evaluating(model):
        return _explained(model, task.name, examples, seed, progress)


def _explained(
    model: Decoder, name: str, examples: Sequence[Example], seed: int, progress: Callable[[float], None]
) -> Explained:
    tokens = budget(model, max(len(example.tokens) for example in examples))
    reads = reads_of(model, examples, READS, tokens, part_of(progress, 0.0, 0.02))
    columns: dict[str, Array] = {}
    facts, done, measured = None, 0, part_of(progress, 0.02, 0.97)
    for batch in batched(model, reads, tokens):
        shown = part_of(measured, done, done + len(batch.reads), len(reads))
        found, facts = _measure(model, batch, seed, shown)
        for key, values in found.items():
            if key not in columns:
                columns[key] = np.full((len(reads), *values.shape[1:]), np.nan)
            columns[key][batch.indices] = values.double().cpu().numpy()
        done += len(batch.reads)
    assert facts is not None
    owner = np.array([read.example for read in reads])
    counts = np.bincount(owner, minlength=len(examples))

    def mean(values: Array) -> Array:
        """Return the mean over an example's reads that have a value."""
        flat = values.reshape(len(values), -1)
        known = ~np.isnan(flat)
        total, number = (np.zeros((len(examples), flat.shape[1])) for _ in range(2))
        np.add.at(total, owner, np.where(known, flat, 0.0))
        np.add.at(number, owner, known)
        with np.errstate(invalid="ignore"):
            return np.asarray((total / number).reshape(len(examples), *values.shape[1:]))

    def named(prefix: str) -> dict[str, Array]:
        return {key.removeprefix(prefix): mean(columns[key]) for key in columns if key.startswith(prefix)}

    return Explained(
        task=name,
        mass=named("mass/"),
        uniform=mean(columns["uniform"]),
        right=mean(columns["right"]),
        correct=np.bincount(owner, columns["correct"], minlength=len(examples)) == counts,
        deleted=named("deleted/"),
        entropy=mean(columns["entropy"]),
        sink=mean(columns["sink"]),
        indicators=_indicators(model, examples, part_of(progress, 0.97, 1.0)),
        signed=facts.signed,
        without_map=facts.without_map,
        reads=len(reads),
    )


def _measure(
    model: Decoder, batch: ReadBatch, seed: int, progress: Callable[[float], None]
) -> tuple[dict[str, Tensor], _Rows]:
    """Return the measurements of a batch of reads by name, and its read-out rows."""
    with torch.no_grad():
        answers = chances(model, batch.tokens, batch.padding, batch.places, batch.ends)
    # A pointer's span is chosen as a whole; the position it points at is the one that is read.
    given = batch.places if isinstance(model, Pointer) else answers.argmax(-1)
    before = answers.gather(-1, given[:, None]).squeeze(-1).double()
    right = answers.gather(-1, batch.answers.clamp_min(0)[:, None]).squeeze(-1)
    rows = attention_rows(model, batch)
    progress(0.0)
    found = {
        "right": right * (batch.answers >= 0),
        "correct": given == batch.answers,
        "entropy": rows.entropy,
        "sink": rows.sink,
    }
    marks = _marks(batch)
    explanations = rows.explanations | {"gradient": gradient_x_input(model, batch, given)}
    for name, scores in explanations.items():
        found[f"mass/{name}"] = _mass(normalised(scores), marks)
    found["uniform"] = _mass(normalised(_seen(model, batch).double()), marks)
    explanations.pop("first_head", None)
    explanations["chance"] = chance(batch, seed)
    some = (batch.lengths > 1)[:, None, None]
    lost: dict[int, Tensor] = {}
    for index, (name, scores) in enumerate(explanations.items()):
        # With one layer, rollout is layer_mean; equal explanations are evaluated once.
        if id(scores) not in lost:
            shown = part_of(progress, index, index + 1, len(explanations))
            lost[id(scores)] = deletions(model, batch, scores, given, before, progress=shown)
        found[f"deleted/{name}"] = torch.where(some, lost[id(scores)], torch.nan)
    return found, rows


def _seen(model: Decoder, batch: ReadBatch) -> Tensor:
    """Return (batch, time), True at the tokens visible to the read-out row; a pointer's row may be inside the text."""
    if not getattr(model, "causal", True):
        return batch.real
    return torch.arange(batch.tokens.shape[1], device=batch.tokens.device) <= batch.places[:, None]


def _marks(batch: ReadBatch) -> Tensor:
    """Return weights (batch, annotators, time) whose sum over annotators is their mean; NaN if nothing is marked."""
    most = max(len(read.relevant) for read in batch.reads)
    marks = np.zeros((len(batch.reads), most, batch.tokens.shape[1]))
    for index, read in enumerate(batch.reads):
        marks[index, : len(read.relevant), : len(read.tokens)] = read.relevant / len(read.relevant)
        if not read.relevant.any():
            marks[index, 0, 0] = np.nan
    return torch.from_numpy(marks).to(batch.tokens.device)


def _mass(scores: Tensor, marks: Tensor) -> Tensor:
    """Return (batch,): the share of scores (batch, time) on relevant tokens, mean over annotators."""
    return torch.einsum("bt,bat->b", scores.double(), marks)


def _indicators(
    model: Decoder, examples: Sequence[Example], progress: Callable[[float], None]
) -> list[dict[str, float] | None]:
    """Return the indicators of every layer, averaged over a few examples that are run one at a time, without padding."""
    chosen, device = spread(examples, _PICTURED), model.readout.device
    found: list[list[dict[str, float]]] = [[] for _ in model.layers]
    for index, example in enumerate(chosen):
        tokens = torch.from_numpy(example.tokens[None]).to(device)
        for rows, layer in zip(found, layer_maps(model, tokens), strict=True):
            if layer.weights is not None:
                rows.append(indicators(layer.weights, layer.signed))
        progress((index + 1) / len(chosen))
    return [
        {name: float(np.mean([row[name] for row in rows if name in row])) for name in rows[0]}
        if rows
        else None
        for rows in found
    ]
