"""The chunked recurrence equals the step-by-step one: outputs, states and gradients, at every length and decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from headtohead.kernels.attention import recurrence
from headtohead.kernels.attention.recurrence import (
    CHUNK,
    decayed_scores,
    decayed_scores_plain,
    gated_scan,
    gated_scan_plain,
)


def drawn(time: int, decay: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k, v, log decays of about the given size, and a state."""
    generator = torch.Generator().manual_seed(time)
    shapes = ((2, 3, time, 4), (2, 3, time, 4), (2, 3, time, 5), (2, 3, time, 4), (2, 3, 4, 5))
    q, k, v, log_decay, state = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return tuple(x.requires_grad_() for x in (q, k, v, -decay * log_decay.abs(), state))


def compare(inputs: tuple[Tensor, ...], tolerance: float) -> None:
    results = []
    for function in (gated_scan, gated_scan_plain):
        output, state = function(*inputs)
        score = (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum()
        results.append((output, state, *torch.autograd.grad(score + state.square().sum(), inputs)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("time", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 3])
def test_chunks_equal_steps(time: int) -> None:
    compare(drawn(time), 1e-12)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0, 1e4])
def test_chunks_equal_steps_from_remembering_all_to_forgetting_at_once(decay: float) -> None:
    """At 1e4 a chunk's product of decays is exp(-1e5): dividing by it would give infinity."""
    compare(drawn(3 * CHUNK + 1, decay), 1e-11)


def test_chunks_equal_steps_in_float32() -> None:
    compare(drawn(4 * CHUNK, dtype=torch.float32), 2e-5)


def test_channels_that_forget_at_very_different_rates() -> None:
    q, k, v, log_decay, state = drawn(2 * CHUNK + 5)
    rates = torch.tensor([0.0, 1e-4, 1.0, 500.0], dtype=torch.float64)
    compare((q, k, v, (log_decay * rates).detach().requires_grad_(), state), 1e-11)


def test_a_scan_in_two_parts_is_one_scan() -> None:
    q, k, v, log_decay, state = drawn(2 * CHUNK + 7)
    whole, last = gated_scan(q, k, v, log_decay, state)
    cut = CHUNK + 3
    first, between = gated_scan(*(x[:, :, :cut] for x in (q, k, v, log_decay)), state)
    second, end = gated_scan(*(x[:, :, cut:] for x in (q, k, v, log_decay)), between)
    assert torch.allclose(torch.cat((first, second), 2), whole, rtol=1e-11, atol=1e-13)
    assert torch.allclose(end, last, rtol=1e-11, atol=1e-13)


def test_the_length_of_a_chunk_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(50)
    wanted, _ = gated_scan(*inputs)
    for size in (1, 3, 64):
        monkeypatch.setattr(recurrence, "CHUNK", size)
        assert torch.allclose(gated_scan(*inputs)[0], wanted, rtol=1e-11, atol=1e-13)


def test_the_size_of_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _, log_decay, _ = drawn(9)
    inputs = (q, k, log_decay.detach().cumsum(-2).requires_grad_())
    found = []
    for size in (
        1,
        2 * 9 * 4,
        4 * 9 * 4,
        recurrence.BLOCK,
    ):  # blocks of 1, 2 and 4 of the 6 sequences, and all
        monkeypatch.setattr(recurrence, "BLOCK", size)
        scores = decayed_scores(*inputs)
        found.append((scores, *torch.autograd.grad(scores.square().sum(), inputs)))
    for other in found[:-1]:
        for ours, wanted in zip(other, found[-1], strict=True):
            assert torch.allclose(ours, wanted, rtol=1e-12, atol=1e-14)


def test_scores_and_their_gradients() -> None:
    q, k, _, log_decay, _ = drawn(6)
    since = log_decay.detach().cumsum(-2).requires_grad_()
    assert torch.allclose(decayed_scores(q, k, since), decayed_scores_plain(q, k, since), rtol=1e-12)
    assert gradcheck(decayed_scores, (q[:1, :1], k[:1, :1], since[:1, :1]))


@pytest.mark.parametrize("time", [1, 40])
def test_autocast_does_not_reach_into_the_state(time: int) -> None:
    inputs = drawn(time, dtype=torch.float32)
    wanted = gated_scan(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = gated_scan(*inputs)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
