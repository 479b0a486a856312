"""The Triton kernels of the recurrences in Triton's interpreter, in float32 against the plain reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headtohead.kernels.attention import recurrence, recurrence_triton
from headtohead.kernels.attention.recurrence import gated_scan, gated_scan_plain
from tests.compare import assert_close

pytestmark = pytest.mark.usefixtures("interpreted")

KINDS = ["channel", "head", "channel delta", "head delta"]
NAMES = ("output", "state", "to q", "to k", "to v", "to log_decay", "to state", "to beta")


def drawn(
    time: int,
    kind: str,
    *,
    decay: float = 0.3,
    batch: int = 1,
    heads: int = 1,
    keys: int = 5,
    values: int = 7,
) -> list[Tensor]:
    """q, k, v, log decays of about the given size, a state, and beta for the delta rule, whose keys have norm 1."""
    generator = torch.Generator().manual_seed(time + keys)
    channels = 1 if "head" in kind else keys
    shapes = ((time, keys), (time, keys), (time, values), (time, channels), (keys, values))
    q, k, v, log_decay, state = (torch.randn(batch, heads, *shape, generator=generator) for shape in shapes)
    given = [q, k, v, -decay * log_decay.abs(), state]
    if "delta" in kind:
        given[1] = k / k.norm(dim=-1, keepdim=True)
        given.append(torch.rand(batch, heads, time, 1, generator=generator))
    return given


def results(function: Any, inputs: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    given = [x.detach().to(dtype).requires_grad_() for x in inputs]
    output, state = function(*given)
    score = (output * torch.linspace(-1, 1, output.numel(), dtype=dtype).view(output.shape)).sum()
    grads = torch.autograd.grad(score + state.square().sum(), given)
    return dict(zip(NAMES, (output.detach(), state.detach(), *grads), strict=False))


def compare(inputs: Sequence[Tensor], tolerance: float = 2e-6) -> None:
    found = results(gated_scan, inputs, torch.float32)
    assert_close(found, results(gated_scan_plain, inputs, torch.float64), tolerance, by="norm")


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 32 tokens: two blocks, and three chunks at 70 tokens."""
    monkeypatch.setattr(recurrence, "CHUNK", 32)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_states_and_gradients(kind: str) -> None:
    compare(drawn(70, kind, batch=2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_chunk_of_four_blocks(kind: str) -> None:
    compare(drawn(61, kind, decay=0.05))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("time", [2, 17])
def test_fewer_tokens_than_a_chunk(kind: str, time: int) -> None:
    compare(drawn(time, kind))


@pytest.mark.parametrize("kind", ["channel", "channel delta"])
def test_channels_that_forget_at_very_different_rates(kind: str) -> None:
    inputs = drawn(40, kind)
    inputs[3] = inputs[3] * torch.tensor([0.0, 1e-3, 1.0, 30.0, 1e4])
    # Decays round to e^-50, so gradients of the fastest channels keep few digits.
    compare(inputs, 1e-4)


def test_equal_keys_of_the_delta_rule() -> None:
    """The triangular systems are as far from the identity as they can be: every score is 1."""
    inputs = drawn(64, "head delta", decay=0.0)
    inputs[1] = inputs[1][:, :, :1].expand_as(inputs[1]).clone()
    inputs[5] = torch.ones_like(inputs[5])
    compare(inputs, 1e-5)


@pytest.mark.usefixtures("short_chunks")
def test_strided_inputs_and_one_head_of_queries_and_keys() -> None:
    q, k, v, log_decay, state = drawn(40, "head", batch=2, heads=2)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q[:, :1], k[:, :1], v, log_decay)]
    compare([*apart, state])


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_population_are_separate_scans(kind: str) -> None:
    def loss(*inputs: Tensor) -> Tensor:
        return gated_scan(*inputs)[0].square().sum()

    rows = [drawn(35, kind, decay=decay) for decay in (0.1, 2.0)]
    stacked = [torch.stack(parts).requires_grad_() for parts in zip(*rows, strict=True)]
    together = torch.autograd.grad(torch.vmap(loss)(*stacked).sum(), stacked)
    for index, row in enumerate(rows):
        given = [x.requires_grad_() for x in row]
        for ours, wanted in zip(together, torch.autograd.grad(loss(*given), given), strict=True):
            assert torch.allclose(ours[index], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [20, 129])
def test_other_widths_use_pytorch(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "gated_walk", None)
    inputs = drawn(20, "head", keys=keys)
    found = results(gated_scan, inputs, torch.float32)
    assert_close(found, results(gated_scan_plain, inputs, torch.float64), 1e-5, by="norm")


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_operators_have_the_shapes_they_declare(kind: str) -> None:
    inputs = drawn(20, kind)
    compiled = torch.compile(gated_scan, backend="aot_eager", fullgraph=True)
    found, wanted = (results(function, inputs, torch.float32) for function in (compiled, gated_scan))
    assert_close(found, wanted, 1e-6, by="norm")


def test_gpus_other_than_hopper_use_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, served in ((8, False), (9, True)):
        found = SimpleNamespace(major=major)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        assert recurrence_triton.recurrence_serves(32, 64, torch.device("cuda")) == served
