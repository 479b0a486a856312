"""Each fused operation against its plain reference: outputs, every gradient, gradcheck."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from headtohead import kernels
from headtohead.kernels.attention.decode import attend_placed
from headtohead.kernels.attention.linear import linear_attend
from headtohead.kernels.attention.prefix import prefix_softmax
from headtohead.kernels.attention.softmax import attend, view_mask
from headtohead.kernels.attention.taylor import _taylor_flex, taylor_attend, taylor_score, taylor_weights
from headtohead.kernels.dynamics.integrator import potential_force, potential_force_plain
from headtohead.kernels.matmul.loss import linear_cross_entropy, linear_cross_entropy_plain, token_nats
from headtohead.kernels.matmul.projection import project, project_joined, project_plain
from headtohead.kernels.pointwise.circle import circle, circle_plain, circle_pull, circle_pull_plain
from headtohead.kernels.pointwise.feedforward import swiglu, swiglu_plain
from headtohead.kernels.pointwise.norm import rms_norm, rms_norm_plain
from headtohead.kernels.pointwise.rotary import rotary_table, rotate, rotate_plain
from tests.compare import agree


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype
    ).requires_grad_()


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


def test_swiglu_of_inputs_wider_than_its_output() -> None:
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
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 5, 3, 4), (2, 40, 2, 4)])
def test_potential_force(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    # 1024 hidden values: chunks of 128 rows, the last shape has 160
    inputs = (
        draw(*shape, dtype=dtype),
        draw(1024, shape[-1], dtype=dtype),
        draw(1024, dtype=dtype),
        draw(1024, dtype=dtype, seed=1),
    )
    agree(potential_force, potential_force_plain, inputs, tolerance)


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
    for biases in (None, [draw(8, dtype=dtype), draw(4, dtype=dtype), draw(4, dtype=dtype, seed=1)]):
        joined = project_joined(inputs[0], inputs[1:], biases)
        torch.testing.assert_close(joined, torch.cat(project_plain(inputs[0], inputs[1:], biases), -1))


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
def test_attention_equals_its_plain_reference(view: str, kv_heads: int, queries: int) -> None:
    inputs = (draw(2, 4, queries, 8), draw(2, kv_heads, 7, 8), draw(2, kv_heads, 7, 8, seed=1))

    def plain(*tensors: Tensor) -> Tensor:
        with kernels.plain():
            return attend(*tensors, **VIEWS[view])

    agree(lambda *tensors: attend(*tensors, **VIEWS[view]), plain, inputs, 1e-12)


@pytest.mark.parametrize("queries", [7, 3, 1])
@pytest.mark.parametrize(("keys_wide", "values_wide"), [(4, 10), (10, 4)])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_values_of_another_width_than_the_keys(
    keys_wide: int, values_wide: int, kv_heads: int, queries: int
) -> None:
    inputs = (
        draw(2, 4, queries, keys_wide),
        draw(2, kv_heads, 7, keys_wide),
        draw(2, kv_heads, 7, values_wide),
    )

    def plain(*tensors: Tensor) -> Tensor:
        with kernels.plain():
            return attend(*tensors)

    assert attend(*inputs).shape == (2, 4, queries, values_wide)
    agree(attend, plain, inputs, 1e-12)


@pytest.mark.parametrize("queries", [7, 3, 1])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("shape", [(4,), (1,), (2, 4)], ids=["heads", "one-head", "batch-heads"])
@pytest.mark.parametrize("view", VIEWS)
def test_scores_with_a_bias(view: str, shape: tuple[int, ...], kv_heads: int, queries: int) -> None:
    inputs = (
        draw(2, 4, queries, 8),
        draw(2, kv_heads, 7, 8),
        draw(2, kv_heads, 7, 8, seed=1),
        draw(*shape, queries, 7),
    )

    def fast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attend(q, k, v, bias=bias, **VIEWS[view])

    def plain(*tensors: Tensor) -> Tensor:
        with kernels.plain():
            return fast(*tensors)

    agree(fast, plain, inputs, 1e-12)


def test_a_query_without_visible_keys_attends_to_itself() -> None:
    mask = view_mask(3, 3, torch.device("cpu"), causal=True, strict=True)
    assert mask.tolist() == [[True, False, False], [True, False, False], [True, True, False]]
    padded = view_mask(2, 2, torch.device("cpu"), causal=True, padding=torch.tensor([[False, True]]))
    assert padded[0, 0].tolist() == [[True, False], [False, True]]


def test_the_backend_that_runs_has_a_name() -> None:
    q = torch.zeros(1, 2, 8, 16)
    assert kernels.backend_name(q, q, q) == "flash_attention"


def slowly(function):  # type: ignore[no-untyped-def]
    """Return the function with the plain reference."""

    def plainly(*inputs: Tensor) -> Tensor:
        with kernels.plain():
            return function(*inputs)

    return plainly


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("time", [1, 2, 7, 64, 65, 130])
def test_prefix_softmax(time: int, dtype: torch.dtype, tolerance: float) -> None:
    inputs = (draw(2, 3, time, dtype=dtype), draw(2, 3, time, 4, dtype=dtype))
    agree(
        lambda s, v: prefix_softmax(s, v)[0], slowly(lambda s, v: prefix_softmax(s, v)[0]), inputs, tolerance
    )


@pytest.mark.parametrize("cut", [1, 5, 29])
def test_prefix_softmax_continues_from_its_state(cut: int) -> None:
    with torch.no_grad():
        scores, v = 30 * draw(2, 3, 30), draw(2, 3, 30, 4)
        whole, ended = prefix_softmax(scores, v)
        first, state = prefix_softmax(scores[..., :cut], v[..., :cut, :])
        second, state = prefix_softmax(scores[..., cut:], v[..., cut:, :], state)
    assert torch.allclose(torch.cat((first, second), -2), whole, rtol=1e-12)
    assert torch.allclose(
        torch.cat([part.flatten() for part in state]), torch.cat([part.flatten() for part in ended])
    )


def test_prefix_softmax_is_differentiable() -> None:
    assert gradcheck(lambda s, v: prefix_softmax(s, v)[0], (draw(1, 2, 6), draw(1, 2, 6, 3)))


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("time", [1, 7, 64, 130])
def test_linear_attend(time: int, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    inputs = (
        draw(2, 4, time, 5, dtype=dtype),
        draw(2, groups, time, 5, dtype=dtype, seed=1),
        draw(2, groups, time, 3, dtype=dtype),
        draw(2, groups, 5, 3, dtype=dtype),
    )
    for part in (0, 1):
        agree(
            lambda q, k, v, s, part=part: linear_attend(q, k, v, s)[part] + 0 * q.sum(),
            slowly(lambda q, k, v, s, part=part: linear_attend(q, k, v, s)[part] + 0 * q.sum()),
            inputs,
            10 * tolerance,
        )


def test_bidirectional_linear_attend_uses_every_key() -> None:
    q, k, v = draw(1, 2, 5, 4), draw(1, 2, 5, 4, seed=1), draw(1, 2, 5, 3)
    assert torch.allclose(linear_attend(q, k, v, causal=False)[0], q @ k.transpose(-2, -1) @ v, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_the_log_score_gives_the_taylor_weights(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (draw(2, 3, 9, 4, dtype=dtype, seed=seed) for seed in range(3))
    mask = view_mask(9, 9, q.device, True)

    def log_score(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = taylor_score(q @ k.transpose(-2, -1) * 0.5).masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, -1) @ v

    agree(log_score, lambda q, k, v: taylor_weights(q, k, mask) @ v, (q, k, v), tolerance)
    assert torch.isfinite(taylor_score(torch.tensor([-1e9, -1.0, 0.0, 1e9]))).all()
    assert taylor_score(torch.linspace(-9, 9, 1000)).min() >= -0.6932, "at least -ln 2"


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("time", [2, 9, 70])
def test_taylor_attend(time: int, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    inputs = (
        draw(2, time, 4, 6, dtype=dtype),
        draw(2, time, groups, 6, dtype=dtype, seed=1),
        draw(2, time, groups, 6, dtype=dtype, seed=2),
    )

    def in_heads(*inputs: Tensor) -> Tensor:
        return taylor_attend(*(tensor.transpose(1, 2) for tensor in inputs))

    agree(in_heads, slowly(in_heads), inputs, 10 * tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("time", [16, 150])
def test_the_fused_taylor_form_is_the_dense_one(time: int, groups: int) -> None:
    """FlexAttention's own reference, which runs without compiling and without gradients on CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    with torch.no_grad():
        q, k, v = (
            draw(2, heads, time, 16, dtype=torch.float32, seed=seed).detach()
            for seed, heads in enumerate((4, groups, groups))
        )
        fused = _taylor_flex(q, k, v, flex_attention)
        assert torch.allclose(fused, taylor_attend(q, k, v), atol=2e-5)


def test_taylor_attend_under_padding_and_while_decoding() -> None:
    q, k, v = (draw(2, 2, 6, 4, seed=seed).detach() for seed in range(3))
    real = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    whole = taylor_attend(q, k, v, padding=real)
    last = taylor_attend(q[..., -1:, :], k, v, padding=real)
    assert torch.allclose(last, whole[..., -1:, :], rtol=1e-12)
    alone = taylor_attend(q[:1, :, 1:], k[:1, :, 1:], v[:1, :, 1:])
    assert torch.allclose(whole[:1, :, 1:], alone, rtol=1e-12)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_a_query_at_a_position_equals_the_last_query_of_that_many_keys(
    window: int, strict: bool, kv_heads: int
) -> None:
    q, k, v = draw(3, 4, 1, 8), *(draw(3, kv_heads, 6, 8, seed=seed) for seed in (1, 2))
    for place in range(6):
        so_far = (tensor[:, :, : place + 1] for tensor in (k, v))
        wanted = attend(q, *so_far, window=window, strict=strict)
        found = attend_placed(q, k, v, torch.tensor([place]), window=window, strict=strict)
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
