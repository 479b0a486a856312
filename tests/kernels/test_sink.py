"""Attention with a sink against its plain reference: outputs, every gradient, rows of a population, a compiled graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from headtohead.kernels import sink_attend
from headtohead.kernels.attention.sink import KERNELS, sink_weights
from headtohead.kernels.attention.softmax import per_query_head, view_mask
from tests.compare import agree, assert_close, with_gradients

SCALE = 0.4


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    mask = view_mask(q.shape[-2], k.shape[-2], q.device, True)
    return sink_weights(q, k, mask, bias, SCALE) @ per_query_head(v, q)


def fast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return sink_attend(q, k, v, bias, SCALE)


def draw(
    time: int, kv_heads: int = 4, rows: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return q and k with tokens as the outer dimension in memory, v with heads, and a score per head."""
    generator = torch.Generator().manual_seed(time)
    q, k, v = (
        torch.randn(*rows, 2, time, heads, 6, generator=generator, dtype=dtype).transpose(-3, -2)
        for heads in (4, kv_heads, kv_heads)
    )
    bias = torch.randn(*rows, 4, generator=generator, dtype=dtype) * 2
    return [tensor.requires_grad_() for tensor in (q, k, v.contiguous(), bias)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("time", [1, 7, 70])
def test_outputs_and_gradients(time: int, kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    agree(fast, plain, draw(time, kv_heads, dtype=dtype), tolerance)


def test_a_score_of_zero_needs_no_tensor() -> None:
    q, k, v, bias = draw(9)
    agree(lambda q, k, v: fast(q, k, v), lambda q, k, v: plain(q, k, v), (q, k, v), 1e-12)
    assert torch.allclose(fast(q, k, v), fast(q, k, v, torch.zeros_like(bias)), rtol=1e-12)


@pytest.mark.parametrize("score", [-1e4, 1e4])
def test_extreme_scores_have_finite_gradients(score: float) -> None:
    q, k, v, bias = draw(5)
    found = with_gradients(fast, (q, k, v, torch.full_like(bias, score).requires_grad_()), "qkvb")
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert bool(found["output"].any()) == (score < 0), "a large score takes all weight, a small one none"


def test_gradients_equal_finite_differences() -> None:
    assert gradcheck(fast, draw(4, 2), fast_mode=True)


@pytest.mark.parametrize("axis", [0, 2])
def test_rows_of_a_population_have_their_own_score(axis: int) -> None:
    inputs = draw(7, 2, rows=(3,))
    moved = [tensor.movedim(0, axis) for tensor in inputs[:3]]
    together = torch.vmap(fast, in_dims=(axis, axis, axis, 0))(*moved, inputs[3])
    apart = torch.stack([fast(*(tensor[row] for tensor in inputs)) for row in range(3)])
    weights = torch.linspace(-1, 1, apart.numel(), dtype=apart.dtype).view(apart.shape)
    grads = [torch.autograd.grad((found * weights).sum(), inputs) for found in (together, apart)]
    ours, theirs = (dict(zip("qkvb", found, strict=True)) for found in grads)
    assert_close({"output": together, **ours}, {"output": apart, **theirs}, 1e-12)


def test_autocast_narrows_the_inputs() -> None:
    inputs = draw(20, 2, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = with_gradients(fast, inputs, "qkvb")
    assert narrow["output"].dtype == torch.bfloat16
    assert_close(narrow, with_gradients(plain, inputs, "qkvb"), 2e-2, by="norm")


@pytest.mark.parametrize("given", [True, False], ids=("learned", "zero"))
def test_the_operator_passes_opcheck(given: bool) -> None:
    q, k, v, bias = draw(5)
    rows = bias.detach().expand(2, -1).clone().requires_grad_() if given else None
    torch.library.opcheck(torch.ops.headtohead.sink_attend, (q, k, v, rows, SCALE))


@pytest.mark.parametrize("name", KERNELS)
def test_this_pytorch_has_every_kernel_with_these_arguments(name: str) -> None:
    """On tensors without data: it checks names, order and shapes of the kernels that need a GPU as well."""
    q, k, v = (torch.empty(2, 70, 4, 16, device="meta").transpose(1, 2) for _ in range(3))
    out, sums = KERNELS[name].forward(q, k, v, SCALE)[:2]
    assert out.stride() == q.stride()
    assert sums.reshape(2, 4, -1)[..., :70].shape == (2, 4, 70)
    found = KERNELS[name].backward(out, q, k, v, out, torch.empty(2, 4, 70, device="meta"), SCALE)
    assert [grad.stride() for grad in found[:3]] == [q.stride()] * 3
