"""The substitutes for softmax attention, one sequence at a time, from their formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.references.attention import turn

Parameters = dict[str, Tensor]


def _affine(x: Tensor, p: Parameters, name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _heads(x: Tensor, p: Parameters, name: str, heads: int, gain: bool) -> list[Tensor]:
    """Return (time, d) of each head, normalized if p has gains."""
    y = _affine(x, p, name)
    d = y.shape[1] // heads
    parts = [y[:, h * d : (h + 1) * d] for h in range(heads)]
    if gain and f"{name}_gain" in p:
        parts = [part / ((part**2).mean(1, keepdim=True) + 1e-6) ** 0.5 * p[f"{name}_gain"] for part in parts]
    return parts


def _turned(x: Tensor, rope: bool, theta: float) -> Tensor:
    return torch.stack([turn(row, i, theta) for i, row in enumerate(x)]) if rope else x


def dots(
    source: Tensor, p: Parameters, heads: int, kv_heads: int, rope: bool, theta: float = 10_000.0
) -> list[tuple[Tensor, Tensor]]:
    """Return (q, k) of each query head, both (time, d), rotated if the model has rope."""
    q = [_turned(part, rope, theta) for part in _heads(source, p, "q", heads, True)]
    k = [_turned(part, rope, theta) for part in _heads(source, p, "k", kv_heads, True)]
    return [(q[h], k[h * kv_heads // heads]) for h in range(heads)]


def written(maps: list[Tensor], x: Tensor, p: Parameters, kv_heads: int) -> Tensor:
    """Return the output (time, width): each head's map applied to its values, then W_o."""
    v = _heads(x, p, "v", kv_heads, False)
    heads = len(maps)
    mixed = torch.cat([maps[h] @ v[h * kv_heads // heads] for h in range(heads)], 1)
    return _affine(mixed, p, "o")


def softmax_map(q: Tensor, k: Tensor) -> Tensor:
    """a_ij = softmax_j(q_i . k_j / sqrt d) over j <= i."""
    rows = []
    for i in range(len(q)):
        a = torch.softmax(k[: i + 1] @ q[i] / math.sqrt(q.shape[1]), 0)
        rows.append(torch.cat((a, a.new_zeros(len(q) - i - 1))))
    return torch.stack(rows)


def taylor_map(q: Tensor, k: Tensor, features: str = "outer", normaliser: str = "joint") -> Tensor:
    """a_ij = w_ij / sum_{m <= i} w_im; per_order normalizes 1, s and the second order separately and takes their mean."""
    d, rows = q.shape[1], []
    for i in range(len(q)):
        s = k[: i + 1] @ q[i] / math.sqrt(d)
        second = s**2 / 2 if features == "outer" else (k[: i + 1] ** 2 @ q[i] ** 2) / (2 * d)
        orders = [torch.ones_like(s), s, second]
        groups = orders if normaliser == "per_order" else [sum(orders)]
        a = sum(w / (w.sum() + (0 if features == "outer" else 1e-12)) for w in groups) / len(groups)
        rows.append(torch.cat((a, a.new_zeros(len(q) - i - 1))))
    return torch.stack(rows)


def prefix_map(scores: Tensor) -> Tensor:
    """a_ij = e^{s_j} / sum_{m <= i} e^{s_m}."""
    rows = []
    for i in range(len(scores)):
        a = torch.softmax(scores[: i + 1], 0)
        rows.append(torch.cat((a, a.new_zeros(len(scores) - i - 1))))
    return torch.stack(rows)


def approximate(
    x: Tensor, p: Parameters, *, heads: int, kv_heads: int, rope: bool, features: str, normaliser: str
) -> Tensor:
    """Taylor weights."""
    pairs = dots(x, p, heads, kv_heads, rope)
    return written([taylor_map(q, k, features, normaliser) for q, k in pairs], x, p, kv_heads)


def non_approximate(x: Tensor, p: Parameters, *, heads: int, kv_heads: int, silu: str) -> Tensor:
    """One score per key."""
    maps = []
    for q, k in dots(x, p, heads, kv_heads, rope=False):
        gated = q / (1 + torch.exp(-q)) if silu == "q" else q
        maps.append(prefix_map((gated * k).sum(1) / math.sqrt(q.shape[1])))
    return written(maps, x, p, kv_heads)


def from_elsewhere(
    x: Tensor,
    source: Tensor,
    p: Parameters,
    *,
    heads: int,
    kv_heads: int,
    rope: bool,
    theta: float = 10_000.0,
) -> Tensor:
    """Softmax attention with queries and keys of another sequence of states: the companion's, or the embeddings'."""
    pairs = dots(source[: len(x)], p, heads, kv_heads, rope, theta)
    return written([softmax_map(q, k) for q, k in pairs], x, p, kv_heads)


def token_mlp(x: Tensor, p: Parameters) -> Tensor:
    """W_o W_down (SiLU(W_gate x) * W_up x), token by token."""
    gate = _affine(x, p, "gate")
    return _affine(_affine(gate / (1 + torch.exp(-gate)) * _affine(x, p, "up"), p, "down"), p, "o")


def prefix_mean(x: Tensor, p: Parameters) -> Tensor:
    """The mean of the values so far."""
    v = _affine(x, p, "v")
    return _affine(torch.stack([v[: i + 1].mean(0) for i in range(len(v))]), p, "o")


def taylor_recurrence(q: Tensor, k: Tensor, v: Tensor, features: str) -> Tensor:
    """phi(x) = [1, y, second order], S += phi(k) v^T, z += phi(k); o = phi(q) S / (phi(q) z), y = x / d^(1/4).

    features: full keeps vec(y y^T) / sqrt 2, packed u <= v with the diagonal divided by sqrt 2, elementwise y^2 / sqrt 2.
    """

    def phi(x: Tensor) -> Tensor:
        y = x / len(x) ** 0.25
        if features == "full":
            second = torch.outer(y, y).flatten() / math.sqrt(2)
        elif features == "packed":
            pairs = [(a, b) for a in range(len(y)) for b in range(a, len(y))]
            second = torch.stack([y[a] * y[b] / (math.sqrt(2) if a == b else 1.0) for a, b in pairs])
        else:
            second = y**2 / math.sqrt(2)
        return torch.cat((torch.ones_like(y[:1]), y, second))

    state, total, rows = 0.0, 0.0, []
    for i in range(len(q)):
        state, total = state + torch.outer(phi(k[i]), v[i]), total + phi(k[i])
        rows.append(phi(q[i]) @ state / (phi(q[i]) @ total))
    return torch.stack(rows)


def gate_recurrence(scores: Tensor, v: Tensor) -> Tensor:
    """o_i = o_{i-1} + g_i (v_i - o_{i-1}), g_i = sigmoid(s_i - lse_{i-1})."""
    output, lse, rows = v[0], scores[0], [v[0]]
    for i in range(1, len(v)):
        gate = torch.sigmoid(scores[i] - lse)
        output = output + gate * (v[i] - output)
        lse = torch.logaddexp(lse, scores[i])
        rows.append(output)
    return torch.stack(rows)


def two_streams(
    tokens: Tensor,
    start: Tensor | None,
    p: Parameters,
    borrows: list[bool],
    *,
    heads: int,
    theta: float,
    detach: bool = False,
) -> Tensor:
    """Return the logits (time, vocabulary) of a tied RMSNorm, SwiGLU model with its companion.

    `start` is the companion's token text, or its noise; in layers with a shared map, the data's queries and keys are the
    companion's, in the others both attend to themselves.
    """
    table = p["embedding.weight"]
    x = table[tokens]
    beside = table[start[: len(x)]] if not start.is_floating_point() else start[: len(x)]
    for layer, borrow in enumerate(borrows):
        part = {key.removeprefix(f"blocks.{layer}."): value for key, value in p.items()}
        own = {key.removeprefix("mechanism."): value for key, value in part.items()}
        facts = {"heads": heads, "kv_heads": heads, "rope": True, "theta": theta}
        normed, normed_beside = (_rms(state, part["mixer_norm.gain"]) for state in (x, beside))
        held = normed_beside.detach() if detach and borrow else normed_beside
        x = x + from_elsewhere(normed, held if borrow else normed, own, **facts)
        beside = beside + from_elsewhere(normed_beside, held, own, **facts)
        x, beside = (state + _swiglu(_rms(state, part["ffn_norm.gain"]), part) for state in (x, beside))
    return _rms(x, p["norm.gain"]) @ table.T


def _rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / ((x**2).mean(1, keepdim=True) + 1e-6) ** 0.5 * gain


def _swiglu(x: Tensor, p: Parameters) -> Tensor:
    gate, up = x @ p["ffn.gate.weight"].T, x @ p["ffn.up.weight"].T
    return (gate / (1 + torch.exp(-gate)) * up) @ p["ffn.down.weight"].T
