"""Adam on many toy runs in one pass: the published formula, with the moments stored in the state.

The theory of the toy holds only for SGD; under Adam the product of two factors does not follow its flow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.data.tasks.toy import CLASSES
from headtohead.papers.faster_qk.forms import ATTENTION, OUTPUT, SCALE, State, softmax_backward

FORMS = ("FAFO", "FACO", "CAFO", "CACO")
"""The forms that Adam supports."""
BETAS, EPSILON = (0.9, 0.999), 1e-8
_QK = ("q", "k", "qk")


def moments(state: State) -> State:
    """Return both moments of every parameter at step 0 (zeros)."""
    names = [f"{name} {moment}" for name in state for moment in ("mean", "square")]
    return {name: torch.zeros_like(state[name.partition(" ")[0]]) for name in names}


def step_sizes(first: int, rates: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias corrections of a window's steps, counted from 0, in float64.

    Step sizes of OV and QK (window, 2, runs, 1, 1) from rates (runs) and ratios (window, runs), including the first
    moment's correction; and the root of the second moment's correction (window, 1).
    """
    number = torch.arange(first, first + len(ratios), device=rates.device, dtype=torch.float64)[:, None] + 1
    size = rates / (1 - BETAS[0] ** number)
    return torch.stack((size, size * ratios), 1)[..., None, None], (1 - BETAS[1] ** number).sqrt()


def adam_step(
    form: str, state: State, target: int, known: Tensor, ask: Tensor, sizes: Tensor, root: Tensor
) -> Tensor:
    """Do one step of every run in place; return each run's mean loss before it.

    `known` and `ask` are as for `train.sgd_step`; `sizes` (2, runs, 1, 1) and `root` (1) come from `step_sizes`.
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
