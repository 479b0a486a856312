"""Root-mean-square norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headtohead.kernels.path import eager_cpu, is_compiling, is_plain, is_stacking, triton_serves
from headtohead.kernels.pointwise.norm_triton import norm_rows


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * gain over the last dimension, the same shape as x."""
    if eager_cpu(x):
        return _RmsNorm.apply(x, gain, eps)
    if is_stacking() and is_compiling():
        # Wide as in the kernels; the compiler fuses it with its neighbors.
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm_plain(x.to(wide), gain, eps).to(x.dtype)
    if is_stacking() and gain.ndim == 1 and triton_serves(x):
        return norm_rows(x.flatten(0, -2).unsqueeze(0), gain.unsqueeze(0), eps).view(x.shape)
    if is_plain() or is_stacking():
        return rms_norm_plain(x, gain, eps)
    return F.rms_norm(x, gain.shape, gain.to(x.dtype), eps)


def rms_norm_plain(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Plain PyTorch reference."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


class _RmsNorm(torch.autograd.Function):
    """PyTorch runs this norm as a dozen passes on CPU; this one takes three forward and four backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, inverse, gain)
        return unit * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, inverse, gain = ctx.saved_tensors
        width = unit.shape[-1]
        product = grad * unit
        rows = product.reshape(-1, width)
        shrink = torch.mv(rows, gain).div_(-width).view(inverse.shape)
        grad_gain = rows.sum(0)
        grad_x = torch.mul(grad, gain, out=product)
        return grad_x.addcmul_(unit, shrink).mul_(inverse), grad_gain, None
