"""The gated linear recurrence: S_t = diag(a_t) S_(t-1) + k_t^T v_t, o_t = q_t S_t, with a_t in (0, 1] per key channel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headtohead.kernels.attention.linear import in_chunks
from headtohead.kernels.path import is_plain, is_stacking

# Tokens per chunk: a chunk materializes the decays between all its pairs, CHUNK x key width values per token.
CHUNK = 16
# Decays of one row that are computed at once on CPU, so that they stay in a core's cache.
BLOCK = 2**18


def gated_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o (batch, heads, time, value width) and the last state (batch, heads, key width, value width).

    q, k and log_decay = log a <= 0 are (batch, heads, time, key width), v (batch, heads, time, value width); the
    computation runs in the dtype of log_decay.
    """
    q, k, v = (tensor.to(log_decay.dtype) for tensor in (q, k, v))
    if state is None:
        state = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    form = gated_scan_plain if is_plain() or q.shape[-2] == 1 else _chunked
    if q.device.type == "meta":  # FLOPs are counted here, without autocast
        return form(q, k, v, log_decay, state)
    with torch.autocast(q.device.type, enabled=False):
        return form(q, k, v, log_decay, state.to(log_decay.dtype))


def gated_scan_plain(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain reference, token by token."""
    outputs = []
    for t in range(q.shape[-2]):
        arriving = k[..., t, :].unsqueeze(-1) @ v[..., t, :].unsqueeze(-2)
        state = log_decay[..., t, :].exp().unsqueeze(-1) * state + arriving
        outputs.append(q[..., t, :].unsqueeze(-2) @ state)
    return torch.cat(outputs, -2), state


def _chunked(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same by chunks: pairs within a chunk, states between chunks.

    With L the sum of log decays since the start of the chunk, every factor is exp of a difference <= 0: L_i - L_j for
    j <= i within a chunk, L_i from the state before it, L_end - L_j into the state after it. Nothing is divided by a
    product of decays, so nothing overflows however fast a channel decays.
    """
    time = q.shape[-2]
    size = min(CHUNK, time)
    # Padding tokens add nothing (k = 0) and decay nothing (log a = 0).
    q, k, v, log_decay = (in_chunks(tensor, size) for tensor in (q, k, v, log_decay))
    since = log_decay.cumsum(-2)
    last = since[..., -1:, :]
    inside = decayed_scores(q, k, since) @ v
    arriving = (k * (last - since).exp()).transpose(-2, -1) @ v
    starts, end = _states(last.exp().transpose(-2, -1), arriving, state)
    output = inside + (q * since.exp()) @ starts
    return output.flatten(2, 3)[:, :, :time], end


def _states(decay: Tensor, arriving: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk (batch, heads, chunks, key width, value width), and the final state.

    S_n = decay_n S_(n-1) + arriving_n for all chunks at once, by recursive doubling: the partial sum of each chunk over the
    1, 2, 4, ... chunks up to it is combined with that of the chunk that far back.
    """
    first = arriving[:, :, :1] + decay[:, :, :1] * state.unsqueeze(2)
    known = torch.cat((first, arriving[:, :, 1:]), 2)
    reach = 1
    while reach < known.shape[2]:
        joined = known[:, :, reach:] + decay[:, :, reach:] * known[:, :, :-reach]
        decay = torch.cat((decay[:, :, :reach], decay[:, :, reach:] * decay[:, :, :-reach]), 2)
        known = torch.cat((known[:, :, :reach], joined), 2)
        reach *= 2
    return torch.cat((state.unsqueeze(2), known[:, :, :-1]), 2), known[:, :, -1]


def decayed_scores(q: Tensor, k: Tensor, since: Tensor) -> Tensor:
    """Return (..., time, time): sum_d q_id k_jd exp(L_id - L_jd) for j <= i, else 0, from q, k and L (..., time, dim)."""
    if is_plain() or is_stacking() or torch.compiler.is_compiling():
        return decayed_scores_plain(q, k, since)
    return _DecayedScores.apply(q, k, since)


def decayed_scores_plain(q: Tensor, k: Tensor, since: Tensor) -> Tensor:
    """Plain PyTorch reference."""
    decays = (since.unsqueeze(-2) - since.unsqueeze(-3)).clamp_max(0.0).exp()
    return (q.unsqueeze(-2) * k.unsqueeze(-3) * decays).sum(-1).tril()


class _DecayedScores(torch.autograd.Function):
    """Processes row by row the keys a row attends to; saves only q, k and L for backward, which recomputes the decays.

    With D the decays and G the gradient of the scores, dq_i = sum_j G_ij D_ij k_j, dk_j = sum_i G_ij D_ij q_i, and
    L appears only together with them: dL = q dq - k dk. Tokens and channels come first, (time, dim, rest), so that every
    pass runs over long contiguous rows: a CPU step of `nano` is a fifth shorter than with the channels last.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, since: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, since)
        time = q.shape[-2]
        scores = q.new_zeros(time, time, q.shape[:-2].numel())
        for place, (q_part, k_part, decay, part) in _blocks(*map(_tokens_first, (q, k, since)), scores):
            seen = slice(place + 1)
            weights = (decay[place] - decay[seen]).exp_().mul_(k_part[seen]).mul_(q_part[place])
            torch.sum(weights, 1, out=part[place, seen])
        return _tokens_last(scores, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, since = ctx.saved_tensors
        first = [_tokens_first(tensor) for tensor in (q, k, since, grad)]
        grads = [torch.zeros_like(tensor) for tensor in first[:2]]
        for place, (q_part, k_part, decay, given, grad_q, grad_k) in _blocks(*first, *grads):
            seen = slice(place + 1)
            weights = (decay[place] - decay[seen]).exp_().mul_(given[place, seen].unsqueeze(1))
            grad_k[seen].addcmul_(weights, q_part[place])
            torch.sum(weights.mul_(k_part[seen]), 0, out=grad_q[place])
        grad_q, grad_k = (_tokens_last(tensor, q) for tensor in grads)
        return grad_q, grad_k, q * grad_q - k * grad_k


def _tokens_first(x: Tensor) -> Tensor:
    """Return (time, dim, rest) from (..., time, dim)."""
    return x.flatten(0, -3).movedim(0, -1).contiguous()


def _tokens_last(x: Tensor, like: Tensor) -> Tensor:
    """Return a contiguous (..., time, any), as matrix products need it, from (time, any, rest)."""
    return x.movedim(-1, 0).contiguous().view(*like.shape[:-1], x.shape[1])


def _blocks(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield every row with the tensors (time, ..., rest), on CPU with as much of the rest as fits in a core's cache."""
    time, dim, rest = tensors[0].shape
    size = max(1, BLOCK // (time * dim)) if tensors[0].device.type == "cpu" else rest
    for part in zip(*(tensor.split(size, -1) for tensor in tensors), strict=True):
        for place in range(time):
            yield place, part
