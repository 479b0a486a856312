"""The two circuits of the toy model, factored or collapsed, with explicit gradients, and a step of SGD or Adam on them.

    score of token l for query q   s(q, l) / sqrt(50),  s = (W_Q e_q).(W_K e_l)  or  W_QK[q, l]
    logits                         OV sum_l A_l e_l,    OV = W_O W_V             or  W_OV

The first dimension of every tensor is the run. Queries are the four tokens 5..8; other rows of W_QK and columns of W_Q
have no effect and no gradient, so only those four are stored. Output maps are stored transposed, (token, logit).
The first two letters name the attention part (FA, CA), the last two the output part (FO, CO).
The theory of the toy holds only for SGD; under Adam the product of two factors does not follow its flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headtohead.data.tasks.toy import CLASSES, FIRST_QUERY, VOCABULARY

SCALE = 1 / math.sqrt(VOCABULARY)
TINY = 1e-6
ADAM_FORMS = ("FAFO", "FACO", "CAFO", "CACO")
"""The forms that Adam supports."""
BETAS, EPSILON = (0.9, 0.999), 1e-8
_QK = ("q", "k", "qk")
State = dict[str, Tensor]
Start = Callable[..., Tensor]
"""Takes a number of rows, by default the vocabulary; returns an initial matrix (rows, vocabulary)."""
# Takes half the time of the same operator under torch.ops.
softmax_backward = torch._softmax_backward_data


def tiny(rows: int = VOCABULARY, value: float = TINY) -> Tensor:
    """Return the initialization `value` times the identity (rows, vocabulary)."""
    return value * torch.eye(rows, VOCABULARY, dtype=torch.float64)


def default(generator: torch.Generator, rows: int = VOCABULARY) -> Tensor:
    """Return the initialization uniform in +-1/sqrt(50) (rows, vocabulary)."""
    uniform = torch.rand(rows, VOCABULARY, generator=generator, dtype=torch.float64)
    return (2 * uniform - 1) * SCALE


def _queries(matrix: Tensor) -> Tensor:
    return matrix[FIRST_QUERY : FIRST_QUERY + CLASSES].contiguous()


class Attention:
    """The circuit that computes the attention weights, collapsed: `qk` is the four rows of W_QK (4, token)."""

    def start(self, start: Start) -> State:
        """Return one run's parameters."""
        return {"qk": _queries(start())}

    def attend(self, state: State, known: Tensor, ask: Tensor) -> Tensor:
        """Return each sequence's mass by token from log counts (overwritten) and one-hot classes."""
        return known.baddbmm_(ask, state["qk"], alpha=SCALE).softmax(2)

    def learn(self, state: State, mass: Tensor, slope: Tensor, pull: Tensor) -> None:
        """Update by the gradient of the loss with respect to the masses; `pull` is ask transposed times rate and scale."""
        state["qk"].baddbmm_(pull, softmax_backward(slope, mass, 2, mass.dtype), alpha=-1)

    def product(self, state: State) -> Tensor:
        """Return s(q, l) for the four queries (..., 4, vocabulary)."""
        return state["qk"]


class FactorisedAttention(Attention):
    """W_Q and W_K: `q` is (4, inner), `k` is (inner, token)."""

    def start(self, start: Start) -> State:
        return {"q": _queries(start().T), "k": start()}

    def attend(self, state: State, known: Tensor, ask: Tensor) -> Tensor:
        return known.baddbmm_(ask, torch.bmm(state["q"], state["k"]), alpha=SCALE).softmax(2)

    def learn(self, state: State, mass: Tensor, slope: Tensor, pull: Tensor) -> None:
        q, k = state["q"], state["k"]
        step = torch.bmm(pull, softmax_backward(slope, mass, 2, mass.dtype))
        q_step = torch.bmm(step, k.transpose(1, 2))  # both gradients are taken at the same point
        k.baddbmm_(q.transpose(1, 2), step, alpha=-1)
        q.sub_(q_step)

    def product(self, state: State) -> Tensor:
        return state["q"] @ state["k"]


class EmulatedAttention(Attention):
    """W_QK with the rate 2 eta sigma_max(W_QK), which equals a factored part along a fixed direction.

    sigma_max is tracked by one power iteration per step; `top` is the current estimate of the singular vector.
    """

    def start(self, start: Start) -> State:
        # W_QK is the product of two tiny factors.
        top = torch.full((CLASSES, 1), CLASSES**-0.5, dtype=torch.float64)
        return {"qk": _queries(tiny(value=TINY**2)), "top": top}

    def learn(self, state: State, mass: Tensor, slope: Tensor, pull: Tensor) -> None:
        qk, top = state["qk"], state["top"]
        # The norm of W^T top is about sigma; dividing first keeps float32 values far above 1e-24.
        along = torch.bmm(top.transpose(1, 2), qk)
        sigma = along.norm(dim=2, keepdim=True)
        back = torch.bmm(qk, along.transpose(1, 2) / sigma)
        torch.div(back, back.norm(dim=1, keepdim=True), out=top)
        step = torch.bmm(pull, softmax_backward(slope, mass, 2, mass.dtype))
        qk.sub_(step.mul_(2 * sigma))


class ImposedAttention(Attention):
    """No parameters: `known` already contains the masses."""

    def start(self, start: Start) -> State:
        return {}

    def attend(self, state: State, known: Tensor, ask: Tensor) -> Tensor:
        return known

    def learn(self, state: State, mass: Tensor, slope: Tensor, pull: Tensor) -> None:
        pass

    def product(self, state: State) -> Tensor:
        return torch.zeros(CLASSES, VOCABULARY)


class Output:
    """The circuit that maps attended tokens to logits, collapsed: `ov` is W_OV (token, logit)."""

    def start(self, start: Start) -> State:
        """Return one run's parameters."""
        return {"ov": start()}

    def logits(self, state: State, mass: Tensor) -> Tensor:
        """Return the logits (runs, batch, vocabulary)."""
        return torch.bmm(mass, state["ov"])

    def learn(self, state: State, mass: Tensor, error: Tensor, rate: float) -> Tensor:
        """Update by the error of the logits; return the gradient with respect to the masses, before the update."""
        slope = torch.bmm(error, state["ov"].transpose(1, 2))
        state["ov"].baddbmm_(mass.transpose(1, 2), error, alpha=-rate)
        return slope

    def product(self, state: State) -> Tensor:
        """Return OV transposed (..., token, logit)."""
        return state["ov"]


class FactorisedOutput(Output):
    """W_V and W_O: `v` is (token, inner), `o` is (inner, logit); `carried` is the output of W_V until the update."""

    def start(self, start: Start) -> State:
        return {"v": start(), "o": start()}

    def logits(self, state: State, mass: Tensor) -> Tensor:
        state["carried"] = torch.bmm(mass, state["v"])
        return torch.bmm(state["carried"], state["o"])

    def learn(self, state: State, mass: Tensor, error: Tensor, rate: float) -> Tensor:
        back = torch.bmm(error, state["o"].transpose(1, 2))
        state["o"].baddbmm_(state.pop("carried").transpose(1, 2), error, alpha=-rate)
        slope = torch.bmm(back, state["v"].transpose(1, 2))
        state["v"].baddbmm_(mass.transpose(1, 2), back, alpha=-rate)
        return slope

    def product(self, state: State) -> Tensor:
        return state["v"] @ state["o"]


class BiasedOutput(Output):
    """W_OV with a bias (1, logit): the collapsed arm of the published fixed-attention study."""

    def start(self, start: Start) -> State:
        return super().start(start) | {"bias": start(1)}

    def logits(self, state: State, mass: Tensor) -> Tensor:
        return torch.baddbmm(state["bias"], mass, state["ov"])

    def learn(self, state: State, mass: Tensor, error: Tensor, rate: float) -> Tensor:
        state["bias"].sub_(error.sum(1, keepdim=True), alpha=rate)
        return super().learn(state, mass, error, rate)


ATTENTION = {
    "FA": FactorisedAttention(),
    "CA": Attention(),
    "EA": EmulatedAttention(),
    "IA": ImposedAttention(),
}
OUTPUT = {"FO": FactorisedOutput(), "CO": Output(), "BO": BiasedOutput()}


def sgd_step(
    form: str, state: State, target: int, rate: float, known: Tensor, ask: Tensor, pull: Tensor
) -> Tensor:
    """Do one step of plain SGD of every run in place; return the error of the logits (runs, batch, vocabulary) before it.

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


def moments(state: State) -> State:
    """Return both moments of Adam for every parameter at step 0 (zeros)."""
    names = [f"{name} {moment}" for name in state for moment in ("mean", "square")]
    return {name: torch.zeros_like(state[name.partition(" ")[0]]) for name in names}


def step_sizes(first: int, rates: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias corrections of Adam in a window's steps, counted from 0, in float64.

    Step sizes of OV and QK (window, 2, runs, 1, 1) from rates (runs) and ratios (window, runs), including the first
    moment's correction; and the root of the second moment's correction (window, 1).
    """
    number = torch.arange(first, first + len(ratios), device=rates.device, dtype=torch.float64)[:, None] + 1
    size = rates / (1 - BETAS[0] ** number)
    return torch.stack((size, size * ratios), 1)[..., None, None], (1 - BETAS[1] ** number).sqrt()


def adam_step(
    form: str, state: State, target: int, known: Tensor, ask: Tensor, sizes: Tensor, root: Tensor
) -> Tensor:
    """Do one step of Adam of every run in place; return each run's mean loss before it.

    `known` and `ask` are as for `sgd_step`; `sizes` (2, runs, 1, 1) and `root` (1) come from `step_sizes`.
    """
    mass = ATTENTION[form[:2]].attend(state, known, ask)
    # One step of Adam can make a model certain of a wrong label: in float32, p_y - 1 is -1 from loss 17 on.
    logarithm = OUTPUT[form[2:]].logits(state, mass).log_softmax(2)
    loss = -(logarithm.narrow(2, target, CLASSES) * ask).sum(2).mean(1)
    error = logarithm.exp_()
    error.narrow(2, target, CLASSES).sub_(ask)
    for name, gradient in _gradients(form, state, mass, error.div_(error.shape[1]), ask).items():
        mean, square = state[f"{name} mean"], state[f"{name} square"]
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        spread = square.sqrt().div_(root).add_(EPSILON)
        state[name].sub_(torch.div(mean, spread, out=spread).mul_(sizes[int(name in _QK)]))
    return loss


def _gradients(form: str, state: State, mass: Tensor, error: Tensor, ask: Tensor) -> State:
    """Return the gradient of the mean loss with respect to every parameter; `error` is divided by the batch size."""
    if form.endswith("FO"):
        back = torch.bmm(error, state["o"].transpose(1, 2))
        found = {"o": torch.bmm(state.pop("carried").transpose(1, 2), error)}
        found["v"] = torch.bmm(mass.transpose(1, 2), back)
        slope = torch.bmm(back, state["v"].transpose(1, 2))
    else:
        found = {"ov": torch.bmm(mass.transpose(1, 2), error)}
        slope = torch.bmm(error, state["ov"].transpose(1, 2))
    scores = torch.bmm(ask.transpose(1, 2), softmax_backward(slope, mass, 2, mass.dtype)).mul_(SCALE)
    if form.startswith("CA"):
        return found | {"qk": scores}
    q, k = state["q"], state["k"]
    return found | {"q": torch.bmm(scores, k.transpose(1, 2)), "k": torch.bmm(q.transpose(1, 2), scores)}
