"""Cross-entropy of a linear output layer that never holds all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headtohead.kernels.matmul.loss_triton import cross_entropy_rows
from headtohead.kernels.path import is_compiling, is_plain, is_stacking, triton_serves

IGNORED = -1  # a target that is not scored, such as padding
# Logits held at once on a GPU: one gigabyte in bf16.
HELD = 2**29
# Rows of logits are padded to whole cache lines: with 50,257 columns the tensor cores cannot be used.
_LINE = 64


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, smoothing: float = 0.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (objective, nats): the mean training loss, and the mean nats per target without label smoothing.

    x is (rows, width), weight (vocabulary, width), targets (rows,); targets of -1 are not counted.
    """
    # Models in a population are small, and so are their logits.
    if is_plain() or is_stacking() or is_compiling():
        return linear_cross_entropy_plain(x, weight, targets, smoothing, bias)
    objective, nats = _LinearCrossEntropy.apply(x, weight, bias, targets, smoothing)
    return objective, nats


def linear_cross_entropy_plain(
    x: Tensor, weight: Tensor, targets: Tensor, smoothing: float = 0.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch reference."""
    scores = torch.log_softmax(F.linear(x, weight, bias).to(_wide(x)), -1)
    counted = (targets != IGNORED).to(scores.dtype)
    if is_stacking() and is_compiling():
        # A comparison with all columns: the compiler fuses it into a pass over the row, where a gather would store the row.
        columns = torch.arange(scores.shape[1], device=scores.device)
        chosen = torch.where(columns == targets.unsqueeze(1), scores, 0.0).sum(-1)
    else:
        chosen = scores.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
    objective = -(chosen * counted).sum() / counted.sum()
    nats = objective.detach()
    if smoothing:
        spread = -(scores.mean(-1) * counted).sum() / counted.sum()
        objective = (1 - smoothing) * objective + smoothing * spread
    return objective, nats


@torch.no_grad()
def token_nats(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return (rows,): the nats of each target, 0 if it is not scored; no gradient."""
    if triton_serves(x):
        return _Rows(x, weight, bias, targets, 0.0, needed=False).nats
    nats = x.new_empty(len(x), dtype=_wide(x))
    for part in _chunks(x, weight):
        logits = F.linear(x[part], weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        logits = logits.to(_wide(x))
        nats[part] = F.cross_entropy(logits, targets[part], ignore_index=IGNORED, reduction="none")
    return nats


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, weight: Tensor) -> list[slice]:
    """Return slices of the rows whose logits fit in a CPU core's cache, or below one gigabyte of bf16 elsewhere."""
    least, elements = (128, 2**19) if x.device.type == "cpu" else (1024, HELD)
    size = max(least, elements // len(weight))
    if x.device.type != "cpu":  # equal parts, in whole tiles of a matrix product
        parts = -(-len(x) // size)
        size = -(-len(x) // (parts * 128)) * 128
    return [slice(start, start + size) for start in range(0, len(x), size)]


class _Rows:
    """The loss on a GPU: padded products, and one kernel that overwrites the logits with their gradient."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, needed: bool
    ) -> None:
        vocabulary, width = weight.shape
        padded = -(-vocabulary // _LINE) * _LINE
        kernel = weight
        if weight.dtype != x.dtype or padded != vocabulary:
            kernel = x.new_empty(padded, width)
            kernel[:vocabulary].copy_(weight)
            kernel[vocabulary:].zero_()
        offset = None if bias is None else F.pad(bias.to(x.dtype), (0, padded - vocabulary))
        options: dict[str, Any] = {"ignored": IGNORED, "smoothing": smoothing, "needed": needed}
        self.count = (targets != IGNORED).sum().float()
        self.grad_x = torch.empty_like(x) if needed else None
        grad_weight = x.new_zeros(padded, width, dtype=torch.float32) if needed else None
        grad_bias = x.new_zeros(padded, dtype=torch.float32) if needed and bias is not None else None
        rows = []
        for part in _chunks(x, kernel):
            product = kernel.t()
            logits = torch.mm(x[part], product) if offset is None else torch.addmm(offset, x[part], product)
            rows.append(cross_entropy_rows(logits, targets[part], self.count, vocabulary, **options))
            if self.grad_x is not None and grad_weight is not None:
                torch.mm(logits, kernel, out=self.grad_x[part])
                _add_product(grad_weight, logits.t(), x[part])
                if grad_bias is not None:
                    grad_bias += logits.sum(0, dtype=torch.float32)
        self.nats = torch.cat([nats for nats, _ in rows])
        self.objective = torch.cat([objective for _, objective in rows])
        self.grad_weight = None if grad_weight is None else grad_weight[:vocabulary].to(weight.dtype)
        self.grad_bias = None
        if grad_bias is not None and bias is not None:
            self.grad_bias = grad_bias[:vocabulary].to(bias.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a float32 total; low-precision factors accumulate in float32 too, where PyTorch can."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(left, right)


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    return values if weights is None else values * weights


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradient together with the loss, chunk by chunk, so that logits are computed once and dropped."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        needed = any(ctx.needs_input_grad[:3])
        if triton_serves(x):
            found = _Rows(x, weight, bias, targets, smoothing, needed)
            if needed:
                ctx.save_for_backward(found.grad_x, found.grad_weight, found.grad_bias)
            nats = found.nats.sum() / found.count
            ctx.mark_non_differentiable(nats)
            return found.objective.sum() / found.count, nats
        kernel = weight.to(x.dtype)
        vocabulary = len(weight)
        counted = targets != IGNORED
        count = counted.sum().to(_wide(x))
        # If every target counts, and checking that is free, no weights are needed.
        every = x.device.type == "cpu" and bool(counted.all())
        weights = None if every else counted.to(count.dtype).unsqueeze(1)
        objective, nats = count.new_zeros(()), count.new_zeros(())
        grad_x = torch.empty_like(x) if needed else None
        grad_weight = torch.zeros_like(weight) if needed else None
        grad_bias = torch.zeros_like(bias) if needed and bias is not None else None
        for part in _chunks(x, weight):
            chosen = targets[part].unsqueeze(1)
            weight_of = None if weights is None else weights[part]
            chosen = chosen if weights is None else chosen.clamp_min(0)
            scores = torch.mm(x[part], kernel.t()).to(count.dtype)
            if bias is not None:
                scores += bias
            top, wanted = scores.amax(-1, keepdim=True), scores.gather(1, chosen)
            spread = scores.mean(-1, keepdim=True) if smoothing else wanted
            total = scores.sub_(top).exp_().sum(-1, keepdim=True)
            normaliser = total.log().add_(top)
            nats += _weighted(normaliser - wanted, weight_of).sum()
            if smoothing:
                wanted = (1 - smoothing) * wanted + smoothing * spread
            objective += _weighted(normaliser - wanted, weight_of).sum()
            if grad_x is not None and grad_weight is not None:
                share = _weighted(torch.reciprocal(total.mul_(count)), weight_of)
                grad = scores.mul_(share)
                minus = _weighted(torch.full_like(share, 1.0) / count, weight_of)
                grad.scatter_add_(1, chosen, minus * (smoothing - 1.0))
                if smoothing:
                    grad.sub_(smoothing / vocabulary * minus)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                grad = grad.to(x.dtype)
                torch.mm(grad, kernel, out=grad_x[part])
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.t(), x[part])
                else:
                    grad_weight += torch.mm(grad.t(), x[part])
        if grad_x is not None:
            ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        nats = nats / count
        ctx.mark_non_differentiable(nats)
        return objective / count, nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        if grad.device.type == "cpu" and grad.item() == 1.0:  # the check is free on CPU
            return grad_x, grad_weight, grad_bias, None, None
        saved = (grad_x, grad_weight, grad_bias)
        return *(None if part is None else part * grad.to(part.dtype) for part in saved), None, None
