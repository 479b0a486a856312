"""Each fused operation against its plain twin: outputs, every gradient, gradcheck."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from headtohead import kernels
from headtohead.kernels.attention import attend, view_mask
from headtohead.kernels.circle import circle, circle_plain, circle_pull, circle_pull_plain
from headtohead.kernels.feedforward import swiglu, swiglu_plain
from headtohead.kernels.loss import linear_cross_entropy, linear_cross_entropy_plain, token_nats
from headtohead.kernels.norm import rms_norm, rms_norm_plain
from headtohead.kernels.projection import project, project_plain
from headtohead.kernels.rotary import rotary_table, rotate, rotate_plain


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype
    ).requires_grad_()


def agree(fast, plain, inputs: tuple[Tensor, ...], tolerance: float) -> None:  # type: ignore[no-untyped-def]
    results = []
    for function in (fast, plain):
        output = function(*inputs)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        results.append((output, *torch.autograd.grad((output * weights).sum(), inputs)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1e-30)


TOLERANCES = [(torch.float64, 1e-12), (torch.float32, 2e-5)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 1, 2), (2, 3, 7, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x, gain = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)
    agree(lambda x, g: rms_norm(x, g, 1e-6), lambda x, g: rms_norm_plain(x, g, 1e-6), (x, gain), tolerance)


def test_rms_norm_of_a_transposed_tensor() -> None:
    x, gain = draw(2, 5, 3, 8), draw(8)
    agree(
        lambda x, g: rms_norm(x.transpose(1, 2), g, 1e-6),
        lambda x, g: rms_norm_plain(x.transpose(1, 2), g, 1e-6),
        (x, gain),
        1e-12,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("rows", [1, 7, 4000])
def test_swiglu(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    inputs = (
        draw(rows, 6, dtype=dtype),
        draw(48, 6, dtype=dtype),
        draw(48, 6, dtype=dtype, seed=1),
        draw(6, 48, dtype=dtype),
    )
    agree(swiglu, swiglu_plain, inputs, tolerance)


def test_swiglu_of_features_wider_than_what_it_writes() -> None:
    inputs = (draw(2, 3, 12), draw(10, 12), draw(10, 12, seed=1), draw(6, 10))
    agree(swiglu, swiglu_plain, inputs, 1e-12)
    assert gradcheck(swiglu, inputs)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_points_of_the_circle_and_their_pull(dtype: torch.dtype, tolerance: float) -> None:
    phase = draw(2, 5, 8, dtype=dtype)
    agree(circle, circle_plain, (phase,), tolerance)
    agree(lambda x: circle(x.transpose(1, 2)), lambda x: circle_plain(x.transpose(1, 2)), (phase,), tolerance)
    agree(
        circle_pull,
        circle_pull_plain,
        (draw(2, 5, 2, dtype=dtype), draw(2, 5, 2, dtype=dtype, seed=1)),
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_project(dtype: torch.dtype, tolerance: float) -> None:
    inputs = (
        draw(2, 5, 6, dtype=dtype),
        draw(8, 6, dtype=dtype),
        draw(4, 6, dtype=dtype),
        draw(4, 6, dtype=dtype, seed=1),
    )
    agree(
        lambda x, *weights: torch.cat(project(x, weights), -1),
        lambda x, *weights: torch.cat(project_plain(x, weights), -1),
        inputs,
        tolerance,
    )


def test_a_projection_that_is_not_used_has_no_gradient() -> None:
    x, first, second = draw(3, 4), draw(4, 4), draw(4, 4, seed=1)
    project(x, (first, second))[0].sum().backward()
    assert torch.count_nonzero(second.grad) == 0
    assert torch.allclose(x.grad, first.sum(0).expand(3, 4))


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("inverse", [False, True])
def test_rotate(inverse: bool, dtype: torch.dtype, tolerance: float) -> None:
    x = draw(2, 5, 3, 8, dtype=dtype)
    table = rotary_table(torch.arange(5), 8, 10_000.0, dtype)
    agree(
        lambda x: rotate(x.transpose(1, 2), table, inverse),
        lambda x: rotate_plain(x.transpose(1, 2), table, inverse),
        (x,),
        tolerance,
    )


def test_rotating_there_and_back_changes_nothing() -> None:
    x, table = draw(1, 2, 9, 6).detach(), rotary_table(torch.arange(9), 6, 10_000.0, torch.float64)
    assert torch.allclose(rotate(rotate(x, table), table, inverse=True), x, atol=1e-14, rtol=0)


def test_rotary_angles_stay_exact_far_out() -> None:
    position = 65_536
    table = rotary_table(torch.tensor([position]), 8, 10_000.0, torch.float32)
    exact = torch.tensor([position * 10_000.0 ** (-i / 8) for i in range(0, 8, 2)], dtype=torch.float64)
    assert (table[0, :, 0].double() - exact.cos()).abs().max() < 1e-6


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [5, 3000])
def test_linear_cross_entropy(rows: int, smoothing: float) -> None:
    x, weight = draw(rows, 4), draw(300, 4)
    targets = torch.randint(0, 300, (rows,), generator=torch.Generator().manual_seed(1))
    targets[::3] = -1
    agree(
        lambda x, w: linear_cross_entropy(x, w, targets, smoothing)[0],
        lambda x, w: linear_cross_entropy_plain(x, w, targets, smoothing)[0],
        (x, weight),
        1e-11,
    )
    nats = linear_cross_entropy(x, weight, targets, smoothing)[1]
    assert torch.allclose(nats, linear_cross_entropy_plain(x, weight, targets)[0], rtol=1e-12)
    assert torch.allclose(token_nats(x, weight, targets).sum() / (targets >= 0).sum(), nats, rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_linear_cross_entropy_with_a_bias(smoothing: float) -> None:
    inputs = (draw(3000, 4), draw(300, 4), draw(300))
    targets = torch.randint(0, 300, (3000,), generator=torch.Generator().manual_seed(1))
    targets[::3] = -1
    agree(
        lambda x, w, b: 3.0 * linear_cross_entropy(x, w, targets, smoothing, b)[0],
        lambda x, w, b: 3.0 * linear_cross_entropy_plain(x, w, targets, smoothing, b)[0],
        inputs,
        1e-11,
    )
    nats = linear_cross_entropy(*inputs[:2], targets, smoothing, inputs[2])[1]
    each = token_nats(*inputs[:2], targets, inputs[2])
    assert torch.allclose(each.sum() / (targets >= 0).sum(), nats, rtol=1e-12)


def test_padding_is_never_counted() -> None:
    x, weight = draw(6, 4), draw(9, 4)
    targets = torch.tensor([1, 2, 3, 4])
    longer = torch.cat((targets, torch.tensor([-1, -1])))
    alone = linear_cross_entropy(x[:4], weight, targets)[0]
    assert torch.equal(linear_cross_entropy(x, weight, longer)[0], alone)


def test_gradients_by_gradcheck() -> None:
    assert gradcheck(lambda x, g: rms_norm(x, g, 1e-6), (draw(2, 3, 4), draw(4)))
    assert gradcheck(swiglu, (draw(5, 3), draw(7, 3), draw(7, 3, seed=1), draw(3, 7)))
    table = rotary_table(torch.arange(3), 4, 10_000.0, torch.float64)
    assert gradcheck(lambda x: rotate(x, table), (draw(2, 3, 4),))
    assert gradcheck(circle, (draw(2, 3),))
    assert gradcheck(circle_pull, (draw(2, 3, 2), draw(2, 3, 2, seed=1)))
    targets = torch.tensor([1, -1, 4])
    assert gradcheck(lambda x, w: linear_cross_entropy(x, w, targets, 0.1)[0], (draw(3, 2), draw(5, 2)))
    assert gradcheck(
        lambda q, k, v: attend(q, k, v), (draw(1, 2, 4, 2), draw(1, 1, 4, 2), draw(1, 1, 4, 2, seed=1))
    )


VIEWS = {
    "causal": {},
    "both-ways": {"causal": False},
    "window": {"window": 3},
    "strict": {"strict": True},
    "left-padding": {"padding": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7], dtype=torch.bool)},
    "strict-window": {"strict": True, "window": 4},
}


@pytest.mark.parametrize("queries", [7, 3, 1])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("view", VIEWS)
def test_attention_is_its_plain_twin(view: str, kv_heads: int, queries: int) -> None:
    inputs = (draw(2, 4, queries, 8), draw(2, kv_heads, 7, 8), draw(2, kv_heads, 7, 8, seed=1))

    def plain(*tensors: Tensor) -> Tensor:
        with kernels.plain():
            return attend(*tensors, **VIEWS[view])

    agree(lambda *tensors: attend(*tensors, **VIEWS[view]), plain, inputs, 1e-12)


def test_a_query_with_nothing_to_see_sees_itself() -> None:
    mask = view_mask(3, 3, torch.device("cpu"), causal=True, strict=True)
    assert mask.tolist() == [[True, False, False], [True, False, False], [True, True, False]]
    padded = view_mask(2, 2, torch.device("cpu"), causal=True, padding=torch.tensor([[False, True]]))
    assert padded[0, 0].tolist() == [[True, False], [False, True]]


def test_the_backend_that_runs_has_a_name() -> None:
    q = torch.zeros(1, 2, 8, 16)
    assert kernels.backend_name(q, q, q) == "flash_attention"
