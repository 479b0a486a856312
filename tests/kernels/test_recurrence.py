"""The chunked recurrences equal the step-by-step ones: outputs, states and gradients, at every length and decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from headtohead.kernels.attention import recurrence
from headtohead.kernels.attention.recurrence import (
    CHUNK,
    SPAN,
    decayed_scores,
    decayed_scores_plain,
    gated_scan,
    gated_scan_plain,
    scan_weights,
)

KINDS = ["channel", "head", "channel delta", "head delta"]


def drawn(
    time: int, kind: str = "channel", decay: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """q, k, v, log decays of about the given size, a state, and beta for the delta rule, whose keys have norm 1."""
    generator = torch.Generator().manual_seed(time)
    channels = 1 if "head" in kind else 4
    shapes = ((2, 3, time, 4), (2, 3, time, 4), (2, 3, time, 5), (2, 3, time, channels), (2, 3, 4, 5))
    q, k, v, log_decay, state = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    given = [q, k, v, -decay * log_decay.abs(), state]
    if "delta" in kind:
        given[1] = k / k.norm(dim=-1, keepdim=True)
        given.append(torch.rand(2, 3, time, 1, generator=generator).to(dtype))
    return tuple(x.requires_grad_() for x in given)


def compare(inputs: tuple[Tensor, ...], tolerance: float) -> None:
    results = []
    for function in (gated_scan, gated_scan_plain):
        output, state = function(*inputs)
        score = (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum()
        results.append((output, state, *torch.autograd.grad(score + state.square().sum(), inputs)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        # The smallest decay is exp(-50), so what is 0 step by step may be 1e-20 here.
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max() + 1e-15


@pytest.mark.parametrize("time", [1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_steps(kind: str, time: int) -> None:
    compare(drawn(time, kind), 1e-12)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_steps_from_remembering_all_to_forgetting_at_once(kind: str, decay: float) -> None:
    """At 1e4 a chunk's product of decays is exp(-1e5): dividing by it would give infinity."""
    compare(drawn(CHUNK + 9, kind, decay), 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_steps_in_float32(kind: str) -> None:
    compare(drawn(CHUNK + 40, kind, 0.1, torch.float32), 5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sudden_end_of_memory_keeps_later_decays_in_float32(kind: str) -> None:
    """Sums of log decays that contain -1e7 round the small decays after it away."""
    inputs = drawn(40, kind, 0.3, torch.float32)
    log_decay = inputs[3].detach().clone()
    log_decay[:, :, 10] = -1e7
    compare((*inputs[:3], log_decay.requires_grad_(), *inputs[4:]), 1e-4)


def test_channels_that_forget_at_very_different_rates() -> None:
    q, k, v, log_decay, state = drawn(CHUNK + 5)
    rates = torch.tensor([0.0, 1e-4, 1.0, 500.0], dtype=torch.float64)
    compare((q, k, v, (log_decay * rates).detach().requires_grad_(), state), 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_in_two_parts_is_one_scan(kind: str) -> None:
    *tokens, state = drawn(CHUNK + 27, kind)[:5]
    beta = drawn(CHUNK + 27, kind)[5:]
    whole, last = gated_scan(*tokens, state, *beta)
    cut = CHUNK - 3
    first, between = gated_scan(*(x[:, :, :cut] for x in tokens), state, *(x[:, :, :cut] for x in beta))
    second, end = gated_scan(*(x[:, :, cut:] for x in tokens), between, *(x[:, :, cut:] for x in beta))
    assert torch.allclose(torch.cat((first, second), 2), whole, rtol=1e-11, atol=1e-13)
    assert torch.allclose(end, last, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_of_chunks_blocks_and_spans_change_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = drawn(70, kind)
    wanted, last = gated_scan(*inputs)
    for chunk, block, span in ((1, 1, 7), (4, 2, 3), (32, 16, SPAN), (128, 1, 1)):
        monkeypatch.setattr(recurrence, "CHUNK", chunk)
        monkeypatch.setattr(recurrence, "BLOCK", block)
        monkeypatch.setattr(recurrence, "SPAN", span)
        found, end = gated_scan(*inputs)
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-13)
        assert torch.allclose(end, last, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("channels", [1, 4])
def test_scores_and_their_gradients(channels: int) -> None:
    q, k, _, log_decay, _ = drawn(16)
    since = log_decay.detach()[..., :channels].cumsum(-2).requires_grad_()
    assert torch.allclose(decayed_scores(q, k, since), decayed_scores_plain(q, k, since), rtol=1e-12)
    assert gradcheck(decayed_scores, (q[:1, :1, :8], k[:1, :1, :8], since[:1, :1, :8]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("time", [1, 21, CHUNK + 6])
def test_the_weights_of_the_values_give_the_output(kind: str, time: int) -> None:
    q, k, v, log_decay, _, *beta = drawn(time, kind)
    weights = scan_weights(q, k, log_decay, *beta)
    assert torch.equal(weights, weights.tril())
    assert torch.allclose(weights @ v, gated_scan(q, k, v, log_decay, None, *beta)[0], rtol=1e-10, atol=1e-12)


def test_queries_and_keys_of_one_head_serve_all() -> None:
    q, k, v, log_decay, state = drawn(CHUNK + 2, "head")
    shared = gated_scan(q[:, :1], k[:, :1], v, log_decay, state)
    each = gated_scan(q[:, :1].expand_as(q), k[:, :1].expand_as(k), v, log_decay, state)
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(shared, each, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_population_are_separate_scans(kind: str) -> None:
    def loss(*inputs: Tensor) -> Tensor:
        return gated_scan(*inputs)[0].square().sum()

    rows = [drawn(CHUNK + 6, kind, decay) for decay in (0.1, 2.0)]
    stacked = [torch.stack(parts).detach() for parts in zip(*rows, strict=True)]
    places = tuple(range(len(stacked)))
    together = torch.vmap(torch.func.grad(loss, places))(*stacked)
    for index, row in enumerate(rows):
        for ours, wanted in zip(together, torch.autograd.grad(loss(*row), row), strict=True):
            assert torch.allclose(ours[index], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("time", [1, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_reach_into_the_state(kind: str, time: int) -> None:
    inputs = drawn(time, kind, dtype=torch.float32)
    wanted = gated_scan(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = gated_scan(*inputs)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
