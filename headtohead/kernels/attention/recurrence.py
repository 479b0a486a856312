"""Gated linear recurrences: S_t = diag(a_t) S_(t-1) + k_t^T w_t, o_t = q_t S_t, with a_t in (0, 1].

Without `beta`, w_t = v_t. With it, w_t = b_t (v_t - k_t diag(a_t) S_(t-1)): the delta rule, which replaces what the state
returns for k_t instead of adding to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.kernels.attention.linear import in_chunks
from headtohead.kernels.attention.recurrence_triton import BLOCK as TILE
from headtohead.kernels.attention.recurrence_triton import (
    chunk_scores,
    delta_systems,
    gated_walk,
    recurrence_serves,
)
from headtohead.kernels.path import is_plain, no_autocast, triton_serves

# Tokens per chunk: scores within a chunk are a matrix, between chunks there is a state.
CHUNK = 64
# Tokens of a block whose decays are computed pair by pair, if each channel has its own.
BLOCK = 4
# Chunks whose states are computed at once.
SPAN = 32
# Smallest log decay of a token in a chunk: exp(-50) is 2e-22. Sums over a chunk stay small, and so does their rounding.
FLOOR = -50.0


def gated_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o (batch, heads, time, value width) and the last state (batch, heads, key width, value width).

    q and k are (batch, heads, time, key width), v (batch, heads, time, value width), log_decay = log a <= 0 (batch, heads,
    time, key width) or (batch, heads, time, 1) if all channels of a head decay equally, beta (batch, heads, time, 1). The
    computation runs in the dtype of log_decay.
    """
    with no_autocast(q):
        if state is None:
            state = log_decay.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
        state = state.to(log_decay.dtype)
        if (
            q.shape[-2] > 1
            and triton_serves(log_decay)
            and recurrence_serves(k.shape[-1], v.shape[-1], v.device)
        ):
            return _fused(q, k, v, log_decay, state, beta)
        q, k, v = (tensor.to(log_decay.dtype) for tensor in (q, k, v))
        beta = None if beta is None else beta.to(log_decay.dtype)
        form = gated_scan_plain if is_plain() or q.shape[-2] == 1 else _chunked
        return form(q, k, v, log_decay, state, beta)


def gated_scan_plain(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Plain reference, token by token."""
    outputs = []
    for t in range(q.shape[-2]):
        now = slice(t, t + 1)
        state = log_decay[..., now, :].exp().transpose(-2, -1) * state
        written = v[..., now, :]
        if beta is not None:
            written = beta[..., now, :] * (written - k[..., now, :] @ state)
        state = state + k[..., now, :].transpose(-2, -1) @ written
        outputs.append(q[..., now, :] @ state)
    return torch.cat(outputs, -2), state


def scan_weights(q: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor | None = None) -> Tensor:
    """Return (..., time, time): the weights of the values in o, if the first state is 0."""
    time = q.shape[-2]
    since = _padded(log_decay, time).cumsum(-2)
    q, k = _padded(q, time), _padded(k, time)
    weights = decayed_scores(q, k, since)
    if beta is not None:
        beta = _padded(beta, time)
        # The columns of the inverse are scaled last: weights (I + b T)^-1 b.
        weights = _solve(k, since, beta, weights.transpose(-2, -1), transposed=True).transpose(-2, -1)
        weights = weights * beta.transpose(-2, -1)
    return weights[..., :time, :time]


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the same by chunks: pairs within a chunk, states between chunks.

    With L the sum of log decays since the start of the chunk, every factor is exp of a difference <= 0: L_i - L_j for
    j <= i within a chunk, L_i from the state before it, L_end - L_j into the state after it. Nothing is divided by a
    product of decays, so nothing overflows however fast a channel decays.

    The delta rule within a chunk is w = b (v - (k e^L) S - T w), with T the scores of k and k below the diagonal: a
    triangular system. Its solution is w = u - p S, linear in the state S before the chunk.
    """
    time = q.shape[-2]
    size = min(CHUNK, _power_of_two(time))
    # Padding tokens add nothing (k = 0) and decay nothing (log a = 0).
    q, k, v, log_decay = (in_chunks(tensor, size) for tensor in (q, k, v, log_decay.clamp_min(FLOOR)))
    since = log_decay.cumsum(-2)
    last = since[..., -1:, :]
    scores = decayed_scores(q, k, since)
    kept = (k * (last - since).exp()).transpose(-2, -1)
    if beta is None:
        written = v
        starts, end = _states(last, kept @ v, state)
    else:
        beta = in_chunks(beta, size)
        u, p = _solve(k, since, beta, beta * torch.cat((v, k * since.exp()), -1)).split(
            (v.shape[-1], k.shape[-1]), -1
        )
        written, starts, end = _delta_states(last, kept, u, p, state)
    output = scores @ written + (q * since.exp()) @ starts
    return output.flatten(2, 3)[:, :, :time], end


def _fused(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the same as `_chunked` by Triton kernels."""
    time, heads = v.shape[-2], v.shape[1]
    size = min(CHUNK, max(TILE, _power_of_two(time)))
    q, k = (tensor.expand(-1, heads, -1, -1) for tensor in (q, k))
    since = in_chunks(log_decay.clamp_min(FLOOR), size).cumsum(-2).flatten(2, 3)[:, :, :time]
    channels = since.shape[-1] > 1
    scores = chunk_scores(q, k, since, size) if channels else None
    p = None
    if beta is not None:
        v, p, _ = delta_systems(
            k, v, since, beta, chunk_scores(k, k, since, size) if channels else None, size
        )
    output, _, end = gated_walk(q, k, v, since, state, p, scores, size)
    return output, end


def _solve(k: Tensor, since: Tensor, beta: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
    """Return (I + b T)^-1 right, or with the transposed matrix; T are the decayed scores of k and k below the diagonal."""
    lower = beta * decayed_scores(k, k, since)
    if transposed:
        return torch.linalg.solve_triangular(lower.transpose(-2, -1), right, upper=True, unitriangular=True)
    return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)


def _states(last: Tensor, arriving: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk (batch, heads, chunks, key width, value width), and the final state.

    S_n = e^(last_n) S_(n-1) + arriving_n for a span of chunks at once: a matrix of the decays between chunks, per head or
    per channel, times what arrives in each.
    """
    starts = []
    for log_decay, added in zip(last.split(SPAN, 2), arriving.split(SPAN, 2), strict=True):
        # (batch, heads, key width or 1, chunks + 1, 1); the state before the span decays from its start.
        since = F.pad(log_decay.transpose(2, 4).flatten(3), (1, 0)).cumsum(-1).unsqueeze(-1)
        items = torch.cat((state.unsqueeze(2), added), 2).transpose(2, 3)
        if since.shape[2] == 1:
            items = items.transpose(2, 3).flatten(3).unsqueeze(2)
        found = _decays(since) @ items
        if since.shape[2] == 1:
            found = found.squeeze(2).unflatten(-1, state.shape[2:])
        else:
            found = found.transpose(2, 3)
        starts.append(found[:, :, :-1])
        state = found[:, :, -1]
    return torch.cat(starts, 2), state


def _delta_states(
    last: Tensor, kept: Tensor, u: Tensor, p: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return w (batch, heads, chunks, time, value width), the states before each chunk, and the final state.

    w_n = u_n - p_n S_(n-1) and S_n = e^(last_n) S_(n-1) + kept_n w_n, chunk by chunk: as matrices (key width, key width) the
    chunks could be joined, but those of a wide state take more memory and time than anything else.
    """
    written, starts = [], []
    for decay, keep, one, by_state in zip(
        last.exp().transpose(-2, -1).unbind(2), kept.unbind(2), u.unbind(2), p.unbind(2), strict=True
    ):
        starts.append(state)
        written.append(one - by_state @ state)
        state = decay * state + keep @ written[-1]
    return torch.stack(written, 2), torch.stack(starts, 2), state


def decayed_scores(q: Tensor, k: Tensor, since: Tensor) -> Tensor:
    """Return (..., time, time): sum_d q_id k_jd exp(L_id - L_jd) for j <= i, else 0, from q, k and L (..., time, dim).

    The time is a power of two. L may be (..., time, 1). Otherwise the scores between the second and the first half are one
    product of matrices, with decays up to and since the boundary; each half is split the same way, down to BLOCK tokens.
    """
    time = q.shape[-2]
    if since.shape[-1] == 1:
        return (q @ k.transpose(-2, -1)) * _decays(since)
    if time <= BLOCK:
        return decayed_scores_plain(q, k, since)
    q, k, since = (tensor.unflatten(-2, (2, time // 2)) for tensor in (q, k, since))
    first, second = decayed_scores(q, k, since).unbind(-3)
    before, after = since.unbind(-3)
    boundary = before[..., -1:, :]
    past = k.select(-3, 0) * (boundary - before).exp()
    cross = (q.select(-3, 1) * (after - boundary).exp()) @ past.transpose(-2, -1)
    return torch.cat((F.pad(first, (0, time // 2)), torch.cat((cross, second), -1)), -2)


def decayed_scores_plain(q: Tensor, k: Tensor, since: Tensor) -> Tensor:
    """Plain PyTorch reference, for any time."""
    decays = (since.unsqueeze(-2) - since.unsqueeze(-3)).clamp_max(0.0).exp()
    return (q.unsqueeze(-2) * k.unsqueeze(-3) * decays).sum(-1).tril()


def _decays(since: Tensor) -> Tensor:
    """Return (..., time, time): exp(L_i - L_j) for j <= i, else 0, from L (..., time, 1)."""
    return (since - since.transpose(-2, -1)).clamp_max(0.0).exp().tril()


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below count."""
    return 1 << (count - 1).bit_length()


def _padded(x: Tensor, time: int) -> Tensor:
    """Return (..., next power of two, dim) from (..., time, dim), padded with zeros."""
    return F.pad(x, (0, 0, 0, _power_of_two(time) - time))
