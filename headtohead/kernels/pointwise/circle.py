"""Phases as points on the circle: (cos, sin) of each phase and of its multiples, and the pull of an average point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headtohead.kernels.path import eager_cpu


def circle(phase: Tensor) -> Tensor:
    """Return (..., 2) from phases (...): cosine and sine of each."""
    if eager_cpu(phase):
        return _Circle.apply(phase)
    return circle_plain(phase)


def circle_plain(phase: Tensor) -> Tensor:
    """Plain PyTorch reference."""
    return torch.stack((phase.cos(), phase.sin()), -1)


def circle_pull(point: Tensor, average: Tensor) -> Tensor:
    """Return (...): sum_u A sin(th_u - th) from point = circle(th) and average = sum_u A circle(th_u), both (..., 2)."""
    if eager_cpu(point) and point.dtype == average.dtype:
        return _Pull.apply(point, average)
    return circle_pull_plain(point, average)


def circle_pull_plain(point: Tensor, average: Tensor) -> Tensor:
    """Plain reference: cos th * S - sin th * C."""
    return point[..., 0] * average[..., 1] - point[..., 1] * average[..., 0]


def circle_harmonics(point: Tensor, count: int) -> Tensor:
    """Return (..., count, 2): circle(th), circle(2 th), ..., circle(count th) from point = circle(th), (..., 2)."""
    cos, sin = point.unbind(-1)
    found = [(cos, sin)]
    for _ in range(1, count):
        c, s = found[-1]
        found.append((c * cos - s * sin, s * cos + c * sin))
    return torch.stack([torch.stack(pair, -1) for pair in found], -2)


class _Circle(torch.autograd.Function):
    """Writes both parts into one output instead of concatenating two tensors."""

    @staticmethod
    def forward(ctx: Any, phase: Tensor) -> Tensor:
        point = phase.new_empty(*phase.shape, 2)
        torch.cos(phase, out=point[..., 0])
        torch.sin(phase, out=point[..., 1])
        ctx.save_for_backward(point)
        return point

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (point,) = ctx.saved_tensors
        return _cross(point, grad)


class _Pull(torch.autograd.Function):
    """The cross product of two plane vectors; each gradient is the other vector, rotated by 90 degrees."""

    @staticmethod
    def forward(ctx: Any, point: Tensor, average: Tensor) -> Tensor:
        ctx.save_for_backward(point, average)
        return _cross(point, average)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        point, average = ctx.saved_tensors
        minus = -grad
        grad_point = grad.new_empty(*grad.shape, 2)
        torch.mul(average[..., 1], grad, out=grad_point[..., 0])
        torch.mul(average[..., 0], minus, out=grad_point[..., 1])
        grad_average = grad.new_empty(*grad.shape, 2)
        torch.mul(point[..., 1], minus, out=grad_average[..., 0])
        torch.mul(point[..., 0], grad, out=grad_average[..., 1])
        return grad_point, grad_average


def _cross(one: Tensor, other: Tensor) -> Tensor:
    return torch.mul(one[..., 0], other[..., 1]).addcmul_(one[..., 1], other[..., 0], value=-1)
