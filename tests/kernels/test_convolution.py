"""Short convolutions in Triton's interpreter against the float64 plain reference: values and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from headtohead.kernels import plain, short_convolution, short_convolution_plain
from headtohead.kernels.pointwise import convolution, convolution_triton
from headtohead.mechanisms.canon import Canon, CanonOptions
from headtohead.mechanisms.contract.base import Frame, Shape, seeded_draw
from headtohead.mechanisms.gated_delta import GatedDelta, GatedDeltaOptions
from headtohead.mechanisms.selective_state import SelectiveState, SelectiveStateOptions
from tests.compare import assert_close, named, with_gradients

pytestmark = pytest.mark.usefixtures("interpreted")

NAMES = ("h", "weight", "bias")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs along time and channels, the last ones not full."""
    for name, size in {"_RUNS": 2, "_TOKENS": 3, "_CHANNELS": 4}.items():
        monkeypatch.setattr(convolution_triton, name, size)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def case(
    batch: int, time: int, channels: int, taps: int, biased: bool = False, seed: int = 0
) -> list[Tensor]:
    """h, weight and, if wanted, bias."""
    inputs = [draw(batch, time, channels, seed=seed), draw(taps, channels, seed=seed)]
    return [*inputs, draw(channels, seed=seed)] if biased else inputs


def compare(inputs: list[Tensor], tolerance: float = 2e-6, **options: bool) -> None:
    names = NAMES[: len(inputs)]
    exact = [tensor.double().detach().requires_grad_() for tensor in inputs]
    ours = [tensor.float().detach().requires_grad_() for tensor in inputs]
    assert_close(
        with_gradients(lambda *given: short_convolution(*given, **options), ours, names),
        with_gradients(lambda *given: short_convolution_plain(*given, **options), exact, names),
        tolerance,
        by="norm",
    )


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that collects the shapes the kernel is called with."""
    calls: list[tuple[int, ...]] = []
    real = convolution.convolve_rows

    def count(h: Tensor, *rest: Any) -> Tensor:
        calls.append(tuple(h.shape))
        found: Tensor = real(h, *rest)
        return found

    monkeypatch.setattr(convolution, "convolve_rows", count)
    return calls


@pytest.mark.parametrize(
    ("taps", "biased", "options"),
    [
        (2, False, {}),
        (4, True, {}),
        (4, False, {"residual": True}),
        (2, True, {"residual": True}),
        (4, False, {"silu": True}),
        (4, True, {"silu": True}),
        (2, True, {"residual": True, "silu": True}),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_equals_its_plain_reference(taps: int, biased: bool, options: dict[str, bool]) -> None:
    compare(case(1, 8, 5, taps, biased), **options)


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 7, 3, 4), (1, 5, 4, 8)])
@pytest.mark.usefixtures("small_tiles")
def test_any_shape_equals_the_plain_reference(shape: tuple[int, ...]) -> None:
    compare(case(*shape, biased=True), residual=True, silu=True)  # type: ignore[misc]


@pytest.mark.parametrize("options", [{"residual": True}, {"silu": True}])
def test_the_tiles_of_a_gpu_equal_the_plain_reference(options: dict[str, bool]) -> None:
    compare(case(1, 131, 70, 4), **options)


def test_the_plain_reference_equals_pytorch() -> None:
    h, weight, bias = case(2, 7, 3, 4, biased=True)
    padded = F.pad(h.transpose(1, 2), (3, 0))
    wanted = F.conv1d(padded, weight.flip(0).t().unsqueeze(1), bias, groups=3).transpose(1, 2)
    torch.testing.assert_close(short_convolution_plain(h, weight, bias), wanted)
    wanted = F.silu(wanted + h)
    torch.testing.assert_close(short_convolution_plain(h, weight, bias, residual=True, silu=True), wanted)


@pytest.mark.usefixtures("small_tiles")
def test_sequences_are_separate() -> None:
    h, weight = (tensor.float() for tensor in case(3, 4, 3, 4))
    h.requires_grad_()
    whole = short_convolution(h, weight, silu=True)
    alone = torch.cat([short_convolution(one.unsqueeze(0), weight, silu=True) for one in h])
    assert torch.equal(whole, alone)
    (grad,) = torch.autograd.grad(whole[1].sum(), h)
    assert grad[1].abs().min() > 0
    assert not grad[0].any()
    assert not grad[2].any()


@pytest.mark.parametrize("silu", [False, True], ids=["identity", "silu"])
@pytest.mark.usefixtures("small_tiles")
def test_rows_may_be_parts_of_wider_ones(silu: bool) -> None:
    wide, weight = draw(2, 5, 9).float().requires_grad_(), draw(3, 3).float()
    part = wide[..., 3:6]
    ours = short_convolution(part, weight, silu=silu)
    copied = short_convolution(part.contiguous(), weight, silu=silu)
    assert torch.equal(ours, copied)
    grads = [torch.autograd.grad(out.sin().sum(), wide)[0] for out in (ours, copied)]
    assert torch.equal(*grads)
    assert grads[0][..., 3:6].all()


@pytest.mark.usefixtures("small_tiles")
def test_channels_need_not_be_contiguous() -> None:
    h, weight = draw(1, 4, 5).float().transpose(1, 2), draw(2, 4).float()
    assert torch.equal(short_convolution(h, weight), short_convolution(h.contiguous(), weight))


@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weights"])
@pytest.mark.usefixtures("small_tiles")
def test_a_population_equals_separate_calls(shared: bool) -> None:
    cases = [case(2, 4, 3, 2, biased=True, seed=seed) for seed in range(3)]
    inputs = [torch.stack(parts).float().requires_grad_() for parts in zip(*cases, strict=True)]
    places = [0, None if shared else 0, 0]
    inputs = [
        part if place == 0 else part.detach()[0].requires_grad_()
        for part, place in zip(inputs, places, strict=True)
    ]

    def run(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return short_convolution(h, weight, bias, silu=True)

    together = torch.vmap(run, in_dims=tuple(places))(*inputs)
    rows = [
        [part[row] if place == 0 else part for part, place in zip(inputs, places, strict=True)]
        for row in range(3)
    ]
    apart = torch.stack([run(*row) for row in rows])
    assert torch.equal(together, apart)
    found = [named(torch.autograd.grad(out.sin().sum(), inputs), NAMES) for out in (together, apart)]
    assert_close(*found, 1e-6, by="norm")


def test_autocast_narrows_the_input_and_keeps_float32_weights() -> None:
    h, weight = (tensor.float().requires_grad_() for tensor in case(1, 9, 6, 4))
    with torch.autocast("cpu", torch.bfloat16):
        ours = short_convolution(h, weight, residual=True)
    assert ours.dtype == torch.bfloat16
    exact = short_convolution_plain(h.bfloat16().double(), weight.double(), residual=True)
    assert_close({"output": ours}, {"output": exact}, 2**-7)
    grads = torch.autograd.grad(ours.float().sum(), (h, weight))
    assert [grad.dtype for grad in grads] == [torch.float32] * 2
    wanted = torch.autograd.grad(exact.sum(), (h, weight))
    assert_close(named(grads, NAMES[:2]), named(wanted, NAMES[:2]), 2**-7)


@pytest.mark.parametrize("path", [short_convolution, short_convolution_plain])
def test_every_path_returns_the_dtype_of_autocast(path: Callable[..., torch.Tensor]) -> None:
    h, weight = (tensor.float() for tensor in case(1, 9, 6, 4)[:2])
    with torch.autocast("cpu", torch.bfloat16):
        whole = path(h, weight)
        last = short_convolution_plain(h[:, -1:], weight, earlier=h[:, -4:-1])
    assert whole.dtype == last.dtype == torch.bfloat16
    assert_close({"output": whole[:, -1:]}, {"output": last}, 2**-7)


def test_many_taps_take_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    most = convolution_triton.MAX_TAPS
    for taps in (most, most + 1):
        compare(case(1, 12, 3, taps))
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_the_operators_pass_opcheck() -> None:
    h, weight = (tensor.float().unsqueeze(0) for tensor in case(1, 4, 3, 2))
    given = (h.clone().requires_grad_(), weight.clone().requires_grad_(), 2, True, True)
    torch.library.opcheck(convolution_triton.convolve_rows, given)
    torch.library.opcheck(convolution_triton.convolve_rows_backward, (h, weight, 2, False, True, h))


def test_compiling_leaves_the_operator_whole() -> None:
    h, weight = (tensor.float() for tensor in case(1, 5, 3, 4))
    compiled = torch.compile(
        lambda h, weight: short_convolution(h, weight, silu=True), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(h, weight), short_convolution(h, weight, silu=True))


@pytest.mark.parametrize(
    ("kind", "options", "calls"),
    [
        (Canon, CanonOptions(), [(1, 2, 7, 16), (1, 2, 7, 48)]),
        (Canon, CanonOptions(at="B", kernel=3, kv_heads=1), [(1, 2, 7, 32)]),
        (GatedDelta, GatedDeltaOptions(), [(1, 2, 7, 8), (1, 2, 7, 8), (1, 2, 7, 16)]),
        (SelectiveState, SelectiveStateOptions(state=4), [(1, 2, 7, 4), (1, 2, 7, 4), (1, 2, 7, 16)]),
    ],
    ids=["canon", "canon B", "gated_delta", "selective_state"],
)
def test_a_mechanism_takes_the_fused_path(
    kind: Any, options: Any, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    layer = kind(Shape(16, 2), options)
    layer.initialise(seeded_draw(1, "test", 0.3))
    x = draw(2, 7, 16).float().requires_grad_()
    padding = torch.arange(7) >= torch.tensor([[3], [0]])
    results = []
    for context in (nullcontext, plain):
        with context():
            output = layer(x, Frame(time=7, padding=padding))
        leaves = {"x": x, **dict(layer.named_parameters())}
        grads = torch.autograd.grad(output.sin().sum(), list(leaves.values()))
        results.append(named([output, *grads], ["output", *(f"d{name}" for name in leaves)]))
    assert seen == calls
    assert_close(*results, 1e-4, by="norm")
