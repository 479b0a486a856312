"""State spaces of oscillators: the circle, unit quaternions, rotations, spheres.

A state consists of blocks, each a point of one `Group`. Kuramoto attention needs from a group a score that is a dot product
of features, the pull of an average of features on a point, and a step that stays on the group: the Lohe flow with softmax
coupling, R <- R exp(kappa (R* M - M* R) / 2), M = sum_u A R_u (Lohe 2009; arXiv 2606.11585).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headtohead.kernels import circle, circle_pull
from headtohead.kernels.path import no_autocast


class Group(Protocol):
    """One kind of block; derive from it and return it from `Kuramoto.make_group`.

    Every tensor of points is (..., numbers), every tensor of features (..., width).
    """

    name: str
    numbers: int
    """Number of state coordinates per block."""
    width: int
    """Number of features per block."""
    turned: tuple[tuple[int, int], ...] = ()
    """Pairs of features that a drift rotates: left multiplication by a rotation P^t."""
    pull_flops: float = 0.0
    """Matrix FLOPs of one pull."""

    def features(self, point: Tensor) -> Tensor:
        """Return the features whose dot product is the score."""
        ...

    def score(self, one: Tensor, other: Tensor) -> Tensor:
        """Return (...): the invariant score of two points, by definition."""
        ...

    def mean(self, average: Tensor) -> Tensor:
        """Return the point nearest to an average of features."""
        ...

    def pull(self, point: Tensor, features: Tensor, average: Tensor) -> Tensor:
        """Return the tangent (..., numbers) at a point with the given features, towards an average of features."""
        ...

    def step(self, point: Tensor, update: Tensor) -> Tensor:
        """Return the point after a step along the tangent part of `update`."""
        ...

    def place(self, free: Tensor) -> Tensor:
        """Return the point for unconstrained coordinates."""
        return free

    def scatter(self, normal: Tensor) -> Tensor:
        """Return unconstrained coordinates for points all over the group, from standard normal values."""
        return normal


class Circle(Group):
    """S1: a phase in radians; the score is cos(th_u - th_t), the pull r sin(psi - th)."""

    def __init__(self) -> None:
        self.name, self.numbers, self.width = "s1", 1, 2
        self.turned = ((0, 1),)

    def features(self, point: Tensor) -> Tensor:
        """Cosine and sine."""
        return circle(point.squeeze(-1))

    def score(self, one: Tensor, other: Tensor) -> Tensor:
        """cos(a - b)."""
        return torch.cos(one - other).squeeze(-1)

    def mean(self, average: Tensor) -> Tensor:
        """The circular mean psi."""
        return torch.atan2(average[..., 1:], average[..., :1])

    def pull(self, point: Tensor, features: Tensor, average: Tensor) -> Tensor:
        """cos th * S - sin th * C."""
        return circle_pull(features, average).unsqueeze(-1)

    def step(self, point: Tensor, update: Tensor) -> Tensor:
        """The sum: wrapping at 2 pi would have no effect."""
        return point + update

    def scatter(self, normal: Tensor) -> Tensor:
        """Uniform in (-pi, pi): erf(n / sqrt 2) is uniform in (-1, 1)."""
        return math.pi * torch.erf(normal * math.sqrt(0.5))


class Sphere(Group):
    """The unit sphere of R^n, not a group for most n: the tangent part is added, then the sum normalized."""

    def __init__(self, order: int) -> None:
        self.order, self.name = order, f"sphere({order})"
        self.numbers = self.width = order
        self.turned = tuple((first, first + 1) for first in range(0, order - 1, 2))

    def features(self, point: Tensor) -> Tensor:
        """The vector itself."""
        return point

    def score(self, one: Tensor, other: Tensor) -> Tensor:
        """The dot product."""
        return (one * other).sum(-1)

    def mean(self, average: Tensor) -> Tensor:
        """The average, normalized."""
        return _unit(average)

    def pull(self, point: Tensor, features: Tensor, average: Tensor) -> Tensor:
        """M - (x . M) x."""
        return _tangent(point, average)

    def step(self, point: Tensor, update: Tensor) -> Tensor:
        """The sum with the tangent part, normalized."""
        return _unit(point + _tangent(point, update))

    def place(self, free: Tensor) -> Tensor:
        """The unconstrained coordinates, normalized."""
        return _unit(free)


class Quaternions(Sphere):
    """S3: unit quaternions (w, x, y, z); the score is q_t . q_u, the step a geodesic."""

    def __init__(self) -> None:
        super().__init__(4)
        self.name = "s3"

    def score(self, one: Tensor, other: Tensor) -> Tensor:
        """Re(conj(a) b)."""
        return multiply(conjugate(one), other)[..., 0]

    def step(self, point: Tensor, update: Tensor) -> Tensor:
        """q exp(Im(conj(q) update)): cos(n) q + sin(n) t / n for the tangent t of length n."""
        tangent = _tangent(point, update)
        # sin(n) / n through sinc, and n through a root with a slope at 0: a step of 0 has a gradient too.
        length = (tangent.square().sum(-1, keepdim=True) + _TINY).sqrt()
        return _unit(torch.cos(length) * point + torch.sinc(length / math.pi) * tangent)


class Rotations(Quaternions):
    """SO(3), stored as unit quaternions; the features are the nine entries of R, the score tr(R_t^T R_u)."""

    def __init__(self) -> None:
        self.name, self.numbers, self.width = "so3", 4, 9
        self.turned = ((0, 3), (1, 4), (2, 5))
        self.pull_flops = 2.0 * 27

    def features(self, point: Tensor) -> Tensor:
        """The rotation matrix, row by row."""
        w, x, y, z = point.unbind(-1)
        first = w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)
        second = 2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)
        third = 2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z
        return torch.stack((*first, *second, *third), -1)

    def score(self, one: Tensor, other: Tensor) -> Tensor:
        """4 (q_t . q_u)^2 - 1."""
        return 4 * (one * other).sum(-1).square() - 1

    def mean(self, average: Tensor) -> Tensor:
        """The rotation nearest to M: the first eigenvector of the form q -> tr(R(q)^T M)."""
        m = average.unflatten(-1, (3, 3))
        trace = m.diagonal(dim1=-2, dim2=-1).sum(-1)
        axis = 0.5 * torch.stack(
            (m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]), -1
        )
        inner = 0.5 * (m + m.mT) - 0.5 * trace[..., None, None] * torch.eye(3, dtype=m.dtype, device=m.device)
        upper = torch.cat((0.5 * trace[..., None], axis), -1)
        form = torch.cat((upper.unsqueeze(-2), torch.cat((axis.unsqueeze(-1), inner), -1)), -2)
        return torch.linalg.eigh(form).eigenvectors[..., -1]

    def pull(self, point: Tensor, features: Tensor, average: Tensor) -> Tensor:
        """q (0, omega / 2), omega the axis of (R^T M - M^T R) / 2: the quaternion rotates by half its angle."""
        with no_autocast(point):
            turn = _wide(features).unflatten(-1, (3, 3)).mT @ _wide(average).unflatten(-1, (3, 3))
        axis = (turn[..., 2, 1], turn[..., 0, 2], turn[..., 1, 0])
        back = (turn[..., 1, 2], turn[..., 2, 0], turn[..., 0, 1])
        half = [0.25 * (one - other) for one, other in zip(axis, back, strict=True)]
        return multiply(point, torch.stack((torch.zeros_like(half[0]), *half), -1))


class Orthogonal(Group):
    """SO(n), as n x n matrices; the score is tr(R_t^T R_u), the step a matrix exponential.

    Products and exponentials run without autocast: `matrix_exp` in bf16 on CPU returns garbage, and a rotation rounded to
    bf16 is not a rotation.
    """

    def __init__(self, order: int) -> None:
        self.order, self.name = order, f"so({order})"
        self.numbers = self.width = order**2
        # Rows 2p and 2p + 1, column by column.
        tops = [row * order + column for row in range(0, order - 1, 2) for column in range(order)]
        self.turned = tuple((place, place + order) for place in tops)
        self.pull_flops = 4.0 * order**3

    def features(self, point: Tensor) -> Tensor:
        """The matrix itself."""
        return point

    def score(self, one: Tensor, other: Tensor) -> Tensor:
        """tr(a^T b)."""
        return (self._matrix(one).mT @ self._matrix(other)).diagonal(dim1=-2, dim2=-1).sum(-1)

    def mean(self, average: Tensor) -> Tensor:
        """The polar factor of M with determinant 1."""
        u, _, v = torch.linalg.svd(self._matrix(average))
        sign = torch.ones_like(u[..., 0, :])
        sign[..., -1] = torch.linalg.det(u @ v)
        return ((u * sign.unsqueeze(-2)) @ v).flatten(-2)

    def pull(self, point: Tensor, features: Tensor, average: Tensor) -> Tensor:
        """R (R^T M - M^T R) / 2."""
        with no_autocast(point):
            rotation = self._matrix(_wide(point))
            return (rotation @ _skew(rotation.mT @ self._matrix(_wide(average)))).flatten(-2)

    def step(self, point: Tensor, update: Tensor) -> Tensor:
        """R exp of the skew part of R^T update."""
        with no_autocast(point):
            rotation = self._matrix(_wide(point))
            turn = torch.linalg.matrix_exp(_skew(rotation.mT @ self._matrix(_wide(update))))
            return (rotation @ turn).flatten(-2)

    def place(self, free: Tensor) -> Tensor:
        """exp of the skew part: the nearest rotation has no gradient where singular values coincide."""
        with no_autocast(free):
            return torch.linalg.matrix_exp(_skew(self._matrix(_wide(free)))).flatten(-2)

    def _matrix(self, point: Tensor) -> Tensor:
        return point.unflatten(-1, (self.order, self.order))


def turn(group: Group, features: Tensor, table: Tensor) -> Tensor:
    """Return features (..., blocks, width) after a drift: `table` (..., blocks, 2) is cosine and sine of its angle."""
    cos, sin = table.unbind(-1)
    parts = list(features.unbind(-1))
    for first, second in group.turned:
        one, other = parts[first], parts[second]
        parts[first], parts[second] = cos * one - sin * other, cos * other + sin * one
    return torch.stack(parts, -1)


def multiply(one: Tensor, other: Tensor) -> Tensor:
    """Return the product of quaternions (..., 4)."""
    a, b, c, d = one.unbind(-1)
    e, f, g, h = other.unbind(-1)
    real = a * e - b * f - c * g - d * h
    i, j, k = a * f + b * e + c * h - d * g, a * g - b * h + c * e + d * f, a * h + b * g - c * f + d * e
    return torch.stack((real, i, j, k), -1)


def conjugate(quaternion: Tensor) -> Tensor:
    """Return (..., 4) with the imaginary part negated."""
    return torch.cat((quaternion[..., :1], -quaternion[..., 1:]), -1)


_TINY = 1e-30


def _unit(vector: Tensor) -> Tensor:
    return vector * torch.rsqrt(vector.square().sum(-1, keepdim=True) + _TINY)


def _tangent(point: Tensor, vector: Tensor) -> Tensor:
    return vector - (point * vector).sum(-1, keepdim=True) * point


def _wide(x: Tensor) -> Tensor:
    """Return x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _skew(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix - matrix.mT)


@dataclass(frozen=True)
class TorusOptions:
    """Options that a mechanism sets for the residual space `torus`: a product of circles, or of another group's blocks."""

    group: Group
    ffn: str = "model"
    """model, swiglu, gelu, tanh_bounded or none."""
    ffn_start: str = "zero"
    """zero, or small: normal with variance 0.25 / (2 m L)."""
    readout: str = "linear"
    """linear, or tied to the points of the embedding."""
    spread: float = 1.0
    """Fraction of the circle in which the embedding's phases are initialized."""
