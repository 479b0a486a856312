"""Measure where a toy model attends, and the norms of its circuits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headtohead.data.tasks.toy import COMMON, Source
from headtohead.papers.faster_qk.forms import ATTENTION, OUTPUT, SCALE, State
from headtohead.papers.faster_qk.runs import ToyRun
from headtohead.papers.faster_qk.task import TEST_SEED, draw_chunk, held_out

EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MORE = 0.005


@dataclass(frozen=True)
class Mark:
    """Measurements of a run at one epoch."""

    epoch: int
    loss: float
    """Mean of the epoch."""
    alpha: float
    """Mean mass on distinct tokens over the test sequences."""
    asked: float
    """Mean mass on the query's own token, which is a common token but also identifies the class."""
    heat: list[list[float]]
    """Percent of test sequences by mass (rows) and by probability of the label (columns), in five equal bins each."""
    sure: float
    """Share of test sequences whose label has probability above .8."""
    qk: float
    """Frobenius norm of the four query rows of W_QK."""
    ov: float
    """Frobenius norm of OV."""
    balance: float | None
    """||O^T O - V V^T|| / max(norms, 1e-8) of a factored output part; 0 if conserved exactly."""

    @property
    def histogram(self) -> list[float]:
        """Percent of test sequences by mass on distinct tokens."""
        return [sum(row) for row in self.heat]


def balance(v: Tensor, o: Tensor) -> float:
    """Return the relative distance of O^T O and V V^T; v is (token, inner), o is (inner, logit)."""
    ours, theirs = o @ o.T, v.T @ v
    largest = max(float(ours.norm()), float(theirs.norm()), 1e-8)
    return float((ours - theirs).norm()) / largest


def measure_mark(run: ToyRun, state: State, epoch: int, loss: float) -> Mark:
    """Return a run's mark from its parameters on the test sequences."""
    scores, ov = ATTENTION[run.form[:2]].product(state), OUTPUT[run.form[2:]].product(state)
    counts, classes = held_out(Source(0, run.length, label_in_input=run.label_in_input), ov.device)
    if run.share is None:
        mass = (scores[classes] * SCALE + counts.log()).softmax(-1)
    else:
        mass = imposed_mass(counts, run.share)
    logits = mass @ ov + state.get("bias", 0.0)
    right = logits.softmax(-1).gather(1, (classes + run.source.target)[:, None])[:, 0]
    relevant = mass[:, COMMON:].sum(1)
    bins = len(EDGES) - 1
    cell = [(values * bins).long().clamp(0, bins - 1) for values in (relevant, right)]
    heat = torch.bincount(cell[0] * bins + cell[1], minlength=bins * bins) * (100 / len(counts))
    return Mark(
        epoch=epoch,
        loss=loss,
        alpha=float(relevant.mean()),
        asked=float(mass.gather(1, (classes + run.source.last)[:, None]).mean()),
        heat=heat.view(bins, bins).tolist(),
        sure=float((right > 0.8).float().mean()),
        qk=float(scores.norm()),
        ov=float(ov.norm()),
        balance=balance(state["v"], state["o"]) if "v" in state else None,
    )


def measure_gain(run: ToyRun, state: State) -> dict[str, float]:
    """Return the loss with imposed attention on 1000 new batches, and its decrease with slightly more mass.

    gain = [loss(alpha) - loss(alpha + .005)] / .005, on the same batches, with a fixed output part; 0 at alpha 1.
    """
    assert run.share is not None
    source = replace(run.source, seed=TEST_SEED)
    ov = OUTPUT[run.form[2:]].product(state).double()
    bias = state["bias"].double() if "bias" in state else 0.0
    counts, classes = draw_chunk(source, 0, ov.device, logarithm=False)
    counts, right = counts.flatten(0, 1).double(), (classes.flatten() + source.target)[:, None]

    def loss(share: float) -> float:
        logits = imposed_mass(counts, share) @ ov + bias
        return -float(logits.log_softmax(-1).gather(1, right).mean())

    here = loss(run.share)
    more = run.share + _MORE
    return {"loss": here, "gain": (here - loss(more)) / _MORE if more <= 1 else 0.0}


def imposed_mass(counts: Tensor, share: Tensor | float) -> Tensor:
    """Return masses (..., vocabulary): `share` uniform over positions with distinct tokens, the rest over the others."""
    common, distinct = counts[..., :COMMON], counts[..., COMMON:]
    # Without distinct tokens, all mass goes to the common ones.
    have = distinct.sum(-1, keepdim=True) > 0
    kept = torch.where(have, share, 0.0)
    mine = distinct / distinct.sum(-1, keepdim=True).clamp(min=1)
    return torch.cat(((1 - kept) * common / common.sum(-1, keepdim=True), kept * mine), -1)
