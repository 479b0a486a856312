"""Compact groups: axioms, scores from features, means and steps that stay on the group, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.contract.terms import Composed, class_term
from headtohead.mechanisms.families.groups import (
    Circle,
    Group,
    Orthogonal,
    Quaternions,
    Rotations,
    Sphere,
    conjugate,
    multiply,
    turn,
)
from headtohead.mechanisms.families.kuramoto_options import KuramotoOptions
from headtohead.mechanisms.kuramoto import Kuramoto
from headtohead.model.check import check_composed
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size

GROUPS: list[Group] = [
    Circle(),
    Quaternions(),
    Rotations(),
    Orthogonal(2),
    Orthogonal(3),
    Orthogonal(5),
    Sphere(2),
    Sphere(5),
]


def matrices(order: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: (a.unflatten(-1, (order, order)) @ b.unflatten(-1, (order, order))).flatten(-2)


# The product of two points, if it exists.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "s1": lambda a, b: a + b,
    "s3": multiply,
    "so3": multiply,
    **{f"so({n})": matrices(n) for n in (2, 3, 5)},
}


def points(group: Group, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, group.numbers, dtype=torch.float64, generator=generator)
    return group.place(group.scatter(normal))


def off_by(group: Group, point: Tensor) -> float:
    """Return how far a point is from the group."""
    if isinstance(group, Circle):
        return 0.0
    if isinstance(group, Orthogonal):
        matrix = point.unflatten(-1, (group.order, group.order))
        identity = torch.eye(group.order, dtype=point.dtype)
        return float(
            max((matrix.mT @ matrix - identity).abs().max(), (torch.linalg.det(matrix) - 1).abs().max())
        )
    return float((point.norm(dim=-1) - 1).abs().max())


def named(group: Group) -> str:
    return group.name


@pytest.mark.parametrize("group", GROUPS, ids=named)
def test_points_steps_and_means_stay_on_the_group(group: Group) -> None:
    point = points(group, 50)
    assert off_by(group, point) < 1e-13
    update = torch.randn(50, group.numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(10):
        point = group.step(point, update)
    assert off_by(group, point) < 1e-13
    average = group.features(points(group, 50, 3, seed=2)).mean(1)
    assert off_by(group, group.mean(average)) < 1e-13


@pytest.mark.parametrize("group", GROUPS, ids=named)
def test_the_score_by_definition_is_the_dot_product_of_features(group: Group) -> None:
    one, other = points(group, 40, seed=1), points(group, 40, seed=2)
    dots = (group.features(one) * group.features(other)).sum(-1)
    assert torch.allclose(group.score(one, other), dots, atol=1e-13)
    assert group.features(one).shape == (40, group.width)


@pytest.mark.parametrize("group", [group for group in GROUPS if group.name in PRODUCTS], ids=named)
def test_group_axioms_and_invariance_of_the_score(group: Group) -> None:
    product = PRODUCTS[group.name]
    a, b, c = (points(group, 30, seed=seed) for seed in range(3))
    same = lambda x, y: torch.allclose(group.features(x), group.features(y), atol=1e-12)  # noqa: E731
    assert off_by(group, product(a, b)) < 1e-13
    assert same(product(product(a, b), c), product(a, product(b, c)))
    if isinstance(group, Orthogonal):
        inverse = a.unflatten(-1, (group.order, group.order)).mT.flatten(-2)
    else:
        inverse = -a if isinstance(group, Circle) else conjugate(a)
    assert same(product(product(inverse, a), b), b)
    for moved in ((product(c, a), product(c, b)), (product(a, c), product(b, c))):
        assert torch.allclose(group.score(*moved), group.score(a, b), atol=1e-12)


@pytest.mark.parametrize("group", [group for group in GROUPS if group.name in PRODUCTS], ids=named)
def test_left_multiplication_of_all_tokens_leaves_omega(group: Group) -> None:
    product = PRODUCTS[group.name]
    others, point, moving = points(group, 20, 4), points(group, 20, seed=1), points(group, 20, seed=2)

    def omega(point: Tensor, others: Tensor) -> Tensor:
        average = group.features(others).mean(1)
        pull = group.pull(point, group.features(point), average)
        if isinstance(group, Circle):
            return pull
        if isinstance(group, Orthogonal):
            shape = (group.order, group.order)
            return point.unflatten(-1, shape).mT @ pull.unflatten(-1, shape)
        return multiply(conjugate(point), pull)

    before = omega(point, others)
    after = omega(product(moving, point), product(moving.unsqueeze(1), others))
    assert torch.allclose(after, before, atol=1e-12)


@pytest.mark.parametrize("group", GROUPS, ids=named)
def test_the_pull_climbs_the_score_and_its_mean_is_the_top(group: Group) -> None:
    average = group.features(points(group, 30, 3)).mean(1)
    point = points(group, 30, seed=3)
    agreement = lambda point: (group.features(point) * average).sum(-1)  # noqa: E731
    top = agreement(group.mean(average))
    assert (top - agreement(point)).min() > -1e-12
    before = agreement(point)
    for _ in range(400):
        moved = group.step(point, 0.4 * group.pull(point, group.features(point), average))
        assert (agreement(moved) - agreement(point)).min() > -1e-9
        point = moved
    assert (agreement(point) - before).max() > 0.1
    assert group.pull(group.mean(average), group.features(group.mean(average)), average).abs().max() < 1e-7


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_omega_is_half_the_gradient(order: int) -> None:
    group = Orthogonal(order)
    point = points(group, 1)[0]
    average = group.features(points(group, 3, seed=1)).mean(0)
    omega = point.view(order, order).T @ group.pull(point, point, average).view(order, order)
    for i in range(order):
        for j in range(i):
            basis = torch.zeros(order, order, dtype=torch.float64)
            basis[i, j], basis[j, i] = 1.0, -1.0
            angle = torch.zeros((), dtype=torch.float64, requires_grad=True)
            turned = point.view(order, order) @ torch.linalg.matrix_exp(angle * basis)
            (slope,) = torch.autograd.grad((turned.flatten() * average).sum(), angle)
            assert omega[i, j].item() == pytest.approx(slope.item() / 2, abs=1e-12)


def test_a_rotations_quaternion_moves_as_its_matrix() -> None:
    quaternions, rotations = Rotations(), Orthogonal(3)
    point = points(quaternions, 20)
    average = quaternions.features(points(quaternions, 20, 3, seed=1)).mean(1)
    matrix = quaternions.features(point)
    moved = quaternions.step(point, 0.7 * quaternions.pull(point, matrix, average))
    wanted = rotations.step(matrix, 0.7 * rotations.pull(matrix, matrix, average))
    assert torch.allclose(quaternions.features(moved), wanted, atol=1e-12)


def test_the_exponential_step_of_s3_is_the_geodesic() -> None:
    group = Quaternions()
    point, average = points(group, 20), points(group, 20, seed=1)
    tangent = group.pull(point, point, average)
    assert torch.allclose(
        tangent, multiply(point, _imaginary(multiply(conjugate(point), average))), atol=1e-14
    )
    for kappa in (0.3, 1.0, 2.5):
        length = tangent.norm(dim=-1, keepdim=True)
        angle = kappa * length
        wanted = torch.cos(angle) * point + torch.sin(angle) * tangent / length
        assert torch.allclose(group.step(point, kappa * tangent), wanted, atol=1e-13)


def _imaginary(quaternion: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(quaternion[..., :1]), quaternion[..., 1:]), -1)


@pytest.mark.parametrize("group", GROUPS, ids=named)
def test_gradients_of_every_map(group: Group) -> None:
    point = points(group, 2).requires_grad_()
    average = group.features(points(group, 2, seed=1)).detach().requires_grad_()
    update = points(group, 2, seed=2).requires_grad_()
    assert gradcheck(group.features, (point,))
    assert gradcheck(lambda p, a: group.pull(p, group.features(p), a), (point, average))
    assert gradcheck(group.step, (point, update))
    assert gradcheck(group.place, (update,))
    still = torch.zeros_like(update).requires_grad_()
    (slope,) = torch.autograd.grad(group.step(point, still).sum(), still)
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("group", GROUPS, ids=named)
def test_a_drift_is_a_multiplication_from_the_left(group: Group) -> None:
    one, other = (points(group, 1, 6, seed=seed) for seed in (0, 1))
    angle = torch.tensor([0.4, 1.3], dtype=torch.float64).view(2, 1).expand(2, 6)
    table = torch.stack((angle.cos(), angle.sin()), -1)
    features = [group.features(point) for point in (one, other)]
    drifted = [turn(group, feature, part) for feature, part in zip(features, table, strict=True)]
    # Rotating both by the same angle keeps the score; the score depends only on the difference.
    further = torch.stack(((angle + 0.9).cos(), (angle + 0.9).sin()), -1)
    more = [turn(group, feature, part) for feature, part in zip(features, further, strict=True)]
    dots = [(pair[0] * pair[1]).sum(-1) for pair in (features, drifted, more)]
    assert torch.allclose(dots[1], dots[2], atol=1e-12)
    assert not torch.allclose(dots[0], dots[1], atol=1e-3)
    if group.name in ("s1", "s3", "so3"):
        half = angle[1] / 2 if group.name == "so3" else angle[1]
        if group.name == "s1":
            moved = other + angle[1].unsqueeze(-1)
        else:
            # i rotates the plane (y, z) of vectors, k the plane (x, y): so(3) drifts in its first two rows.
            axis = (half.cos(), half.sin(), 0 * half, 0 * half)
            if group.name == "so3":
                axis = (half.cos(), 0 * half, 0 * half, half.sin())
            moved = multiply(torch.stack(axis, -1).unsqueeze(0), other)
        assert torch.allclose(group.features(moved), drifted[1], atol=1e-12)


class Planar(Group):
    """A user's group: the circle, as unit complex numbers."""

    name, numbers, width, turned = "planar", 2, 2, ((0, 1),)

    def features(self, point: Tensor) -> Tensor:
        return point

    def score(self, one: Tensor, other: Tensor) -> Tensor:
        return (one * other).sum(-1)

    def mean(self, average: Tensor) -> Tensor:
        return average / average.norm(dim=-1, keepdim=True)

    def pull(self, point: Tensor, features: Tensor, average: Tensor) -> Tensor:
        return average - (point * average).sum(-1, keepdim=True) * point

    def step(self, point: Tensor, update: Tensor) -> Tensor:
        moved = point + update - (point * update).sum(-1, keepdim=True) * point
        return moved / moved.norm(dim=-1, keepdim=True)

    def place(self, free: Tensor) -> Tensor:
        return free / free.norm(dim=-1, keepdim=True)


class OnPlanar(Kuramoto):
    """Kuramoto attention on a user's group."""

    name = "on_planar"

    def make_group(self, options: Any) -> Group:
        return Planar()


def test_a_users_group_checks_and_trains() -> None:
    composed = Composed((class_term(OnPlanar),))
    found = check_composed([composed])
    assert found.findings == []
    assert found.complete
    model = Decoder(Size("tiny", 16, 2, 4, 8, 32, 16), [composed] * 2, seed=1)
    tokens = torch.randint(0, 32, (2, 16))
    model(tokens, tokens)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    shape, frame = Shape(16, 4), Frame(time=5, rotary=Rotary(10_000.0, 16))
    x = Planar().place(torch.randn(1, 5, 8, 2)).flatten(-2)
    ours, theirs = (
        OnPlanar(shape, KuramotoOptions()),
        Kuramoto(shape, KuramotoOptions(group="sphere", order=2)),
    )
    for mechanism in (ours, theirs):
        mechanism.initialise(seeded_draw(1, "x", 0.02))
    assert torch.allclose(ours(x, frame), theirs(x, frame), atol=1e-6)


def test_scattered_points_are_spread_evenly() -> None:
    phases = points(Circle(), 20_000).squeeze(-1)
    assert phases.abs().max() <= math.pi
    assert torch.histc(phases, 8, -math.pi, math.pi).std() < 80


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_steps_and_pulls_leave_autocast(group: Group) -> None:
    point, other = points(group, 6).float(), points(group, 6, seed=1).float()
    features = group.features(point)
    update = group.pull(point, features, group.features(other))
    moved, placed = group.step(point, update), group.place(other)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(group.pull(point, features, group.features(other)), update)
        assert torch.equal(group.step(point, update), moved)
        assert torch.equal(group.place(other), placed)
        # The feed-forward block returns its update in bf16.
        rounded = group.step(point, update.bfloat16())
    assert rounded.dtype == torch.float32
    assert torch.allclose(rounded, moved, atol=0.02)
