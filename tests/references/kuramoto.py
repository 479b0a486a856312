"""Kuramoto attention from its equations: one sequence, one query at a time, float64.

States, features and parameters are ordered block by block: (cos, sin) of an angle are adjacent. Quaternions are 2 x 2
unitary matrices here, and rotations conjugations by them.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

_UNITS = torch.tensor(
    [
        [[1, 0], [0, 1]],
        [[1j, 0], [0, -1j]],
        [[0, 1], [-1, 0]],
        [[0, 1j], [1j, 0]],
    ],
    dtype=torch.complex128,
)


def place(kind: str, order: int, free: Tensor) -> Tensor:
    """Return points of the group from unconstrained coordinates (..., width)."""
    if kind == "s1":
        return free
    blocks = free.unflatten(-1, (-1, _numbers(kind, order)))
    if kind == "son":
        matrix = blocks.unflatten(-1, (order, order))
        return torch.linalg.matrix_exp(matrix - matrix.mT).flatten(-3)
    return (blocks / blocks.norm(dim=-1, keepdim=True)).flatten(-2)


def layer(
    x: Tensor, p: dict[str, Tensor], o: SimpleNamespace, heads: int, rope: bool, tables: dict[str, Tensor]
) -> Tensor:
    """Return the update (time, width) of states x (time, width); `o` holds the options by name."""
    time = len(x)
    if o.coupling == "off":
        return torch.zeros_like(x)
    numbers = _numbers(o.group, o.order)
    points = x.unflatten(-1, (-1, numbers))
    total = points.shape[1]
    per_head = total if o.heads == "full" else total // heads
    mine = [
        range(total) if o.heads == "full" else range(h * per_head, (h + 1) * per_head) for h in range(heads)
    ]
    seen = _matrices(o, points)
    features = _flat(o, seen)
    flat = features.flatten(1)

    # Positions.
    rates = torch.zeros(total, dtype=x.dtype)
    if rope and o.drift == "learned":
        rates = p["rate"]
    elif rope and o.drift != "none":
        turning = per_head // 2 if o.drift == "half" else per_head
        rates = torch.tensor(
            [
                10_000.0 ** (-(j % per_head) / turning) if j % per_head < turning else 0.0
                for j in range(total)
            ],
            dtype=x.dtype,
        )

    # The phases that each side uses in the score.
    shown = {}
    for side in ("q", "k"):
        turned = points
        if side in {"query": "q", "key": "k", "both": "qk"}.get(o.phase_map, ""):
            turned = points + (flat @ p[f"{side}.weight"].T).unsqueeze(-1)
        shown[side] = _matrices(o, turned)
    pair = {side: torch.ones(time, total, dtype=x.dtype) for side in ("q", "k")}
    if o.gate == "pair":
        for side in pair:
            pair[side] = 2 * torch.sigmoid(flat @ p[f"gate_{side}.weight"].T + p[f"gate_{side}.bias"])

    update = torch.zeros(time, total, features.shape[-1], dtype=x.dtype)
    coupling = []
    for h in range(heads):
        own = list(mine[h])
        rows = []
        for t in range(time):
            last = t + 1 if o.mask == "inclusive" else t
            scores = torch.stack(
                [
                    _score(o, p, tables, shown, pair, features, rates, h, own, per_head, t, u)
                    for u in range(last)
                ]
                or [torch.empty(0, dtype=x.dtype)]
            ).view(last)
            if o.mask == "strict_null":
                null = p["null"].view(total, -1)
                query = _drifted(o, shown["q"][t], rates * t)
                gates = _gates(o, p, features, h, own, per_head, t) * pair["q"][t, own]
                score = (gates.unsqueeze(-1) * _flat(o, query)[own] * null[own]).sum()
                scores = torch.cat((score.view(1), scores))
            weights = torch.softmax(scores, 0)
            weights = weights[1:] if o.mask == "strict_null" else weights
            rows.append(torch.nn.functional.pad(weights, (0, time - last)))
            for u in range(last if o.harmonics == 1 else 0):
                carried = features[u]
                if o.successor == "replace":
                    carried = features[u + 1]
                elif o.successor == "mix":
                    carried = p["here"][:, None] * features[u] + p["after"][:, None] * features[u + 1]
                chosen = torch.zeros(total, 1, dtype=x.dtype)
                chosen[own] = 1.0
                moved = weights[u] * chosen * carried
                update = update + torch.nn.functional.one_hot(torch.tensor(t), time)[:, None, None] * moved
        coupling.append(torch.stack(rows))

    if o.value == "dense":
        return update.flatten(1) @ p["v.weight"].T
    if o.harmonics > 1:
        return _kernel(o, p, points.squeeze(-1), torch.stack(coupling), mine)
    start = o.gain_start / (heads if o.heads == "full" else 1)
    kappa = torch.full((total,), 1.0 if o.successor == "mix" else start, dtype=x.dtype)
    if "kappa" in p:
        kappa = 2 * torch.sigmoid(p["kappa"]) if o.gain == "capped" else p["kappa"]
    return _tangent(o, points, seen, update, kappa).flatten(1)


def _kernel(
    o: SimpleNamespace, p: dict[str, Tensor], phase: Tensor, coupling: Tensor, mine: list[range]
) -> Tensor:
    """Return sum over heads, delays and harmonics k of c sum_u A[t, u] sin(k (th[u + delay] - th[t])), (time, width)."""
    width = phase.shape[1]
    names = {"none": {"kappa": 0}, "replace": {"kappa": 1}, "mix": {"here": 0, "after": 1}}[o.successor]
    moved = torch.zeros_like(phase)
    for name, delay in names.items():
        coefficient = p[name].view(width, o.harmonics)
        # The last state has no successor; no query attends to it then, so any value will do.
        ahead = torch.cat((phase[delay:], phase[:delay]))
        apart = ahead[None, :, :] - phase[:, None, :]
        for k in range(1, o.harmonics + 1):
            for h, own in enumerate(mine):
                pulled = (coupling[h][:, :, None] * torch.sin(k * apart)).sum(1)
                inside = torch.tensor([float(j in own) for j in range(width)], dtype=phase.dtype)
                moved = moved + inside * coefficient[:, k - 1] * pulled
    return moved


def _score(o, p, tables, shown, pair, features, rates, h, own, per_head, t, u):  # type: ignore[no-untyped-def]
    if o.coupling == "uniform":
        return torch.zeros((), dtype=features.dtype)
    if o.coupling == "random_frozen":
        shape = features.shape[1:]
        one, other = tables["frozen_q"][t].view(shape)[own], tables["frozen_k"][u].view(shape)[own]
        return o.sharpness / per_head * (one * other).sum()
    gates = _gates(o, p, features, h, own, per_head, t) * pair["q"][t, own] * pair["k"][u, own]
    if o.group == "s1":
        angle = [torch.atan2(shown[s][i, :, 1], shown[s][i, :, 0]) for s, i in (("q", t), ("k", u))]
        return (gates * torch.cos(angle[0] - angle[1] + rates * (t - u))[own]).sum()
    one, other = _drifted(o, shown["q"][t], rates * t), _drifted(o, shown["k"][u], rates * u)
    scale = 0.5 if o.group == "s3" else 1.0
    return (gates * scale * (one.conj() * other).real.flatten(1).sum(-1)[own]).sum()


def _gates(o, p, features, h, own, per_head, t):  # type: ignore[no-untyped-def]
    start = o.sharpness / per_head
    if o.gate == "const":
        return torch.full((per_head,), start, dtype=features.dtype)
    raw = p["gate"].view(-1, per_head)[h]
    if o.gate == "token":
        raw = raw + p["token_gate"][h] @ features[t, own].flatten()
    if o.gate_map == "softplus":
        return torch.log(1 + torch.exp(raw))
    if o.gate_map == "exp":
        return torch.exp(raw)
    return raw if o.gate_map == "free" else 2 * start / (1 + torch.exp(-raw))


def _numbers(kind: str, order: int) -> int:
    return {"s1": 1, "s3": 4, "so3": 4, "son": order**2, "sphere": order}[kind]


def _unitary(points: Tensor) -> Tensor:
    return torch.einsum("...a,aij->...ij", points.to(torch.complex128), _UNITS)


def _matrices(o: SimpleNamespace, points: Tensor) -> Tensor:
    """Return each block in its representation, (..., blocks, rows, columns) or (..., blocks, entries)."""
    if o.group == "s1":
        return torch.cat((points.cos(), points.sin()), -1)
    if o.group == "s3":
        return _unitary(points)
    if o.group == "so3":
        u = _unitary(points)
        units = _UNITS[1:]
        return -0.5 * torch.einsum("xij,...jk,ykl,...il->...xy", units, u, units, u.conj()).real
    if o.group == "son":
        return points.unflatten(-1, (o.order, o.order))
    return points


def _flat(o: SimpleNamespace, matrices: Tensor) -> Tensor:
    """Return the features (..., blocks, entries)."""
    if o.group == "s3":
        return _quaternion(matrices)
    return matrices.flatten(-2) if o.group in ("so3", "son") else matrices


def _quaternion(unitary: Tensor) -> Tensor:
    return 0.5 * torch.einsum("...ij,aij->...a", unitary, _UNITS.conj()).real


def _drifted(o: SimpleNamespace, matrices: Tensor, angles: Tensor) -> Tensor:
    """Return P^t times each block, (blocks, ...)."""
    cos, sin = torch.cos(angles), torch.sin(angles)
    if o.group == "s3":
        turn = torch.diag_embed(torch.exp(1j * torch.stack((angles, -angles), -1)))
        return turn @ matrices
    size = {"s1": 2, "so3": 3}.get(o.group, o.order)
    turn = torch.eye(size, dtype=cos.dtype).repeat(len(angles), 1, 1)
    for first in range(0, size - 1, 2):
        plane = torch.zeros(size, size, dtype=cos.dtype)
        plane[first, first] = plane[first + 1, first + 1] = 1.0
        across = torch.zeros(size, size, dtype=cos.dtype)
        across[first, first + 1], across[first + 1, first] = -1.0, 1.0
        turn = turn + (cos - 1)[:, None, None] * plane + sin[:, None, None] * across
    if o.group in ("s1", "sphere"):
        return (turn @ matrices.unsqueeze(-1)).squeeze(-1)
    return turn @ matrices


def _tangent(o: SimpleNamespace, points: Tensor, seen: Tensor, mean: Tensor, kappa: Tensor) -> Tensor:
    """Return kappa R (R* M - M* R) / 2 in the coordinates of the state, (time, blocks, numbers)."""
    if o.group == "s1":
        length, psi = mean.norm(dim=-1), torch.atan2(mean[..., 1], mean[..., 0])
        phase = points.squeeze(-1)
        sine = torch.where(length > 0, length * torch.sin(psi - phase), 0 * phase)
        if o.update == "tangent":
            return kappa * sine
        plane = torch.stack((phase.cos(), phase.sin()), -1) + kappa[:, None] * mean
        moved = torch.atan2(plane[..., 1], plane[..., 0]) - phase
        return moved - 2 * math.pi * torch.round(moved.detach() / (2 * math.pi))
    if o.group == "sphere":
        along = (points * mean).sum(-1, keepdim=True)
        return kappa[:, None] * (mean - along * points)
    if o.group == "s3":
        target = _unitary(mean)
    else:
        target = mean.unflatten(-1, seen.shape[-2:])
    inner = seen.conj().mT @ target
    omega = kappa[:, None, None] * (inner - inner.conj().mT) / 2
    if o.group == "s3":
        return _quaternion(seen @ omega)
    if o.group == "so3":
        axis = torch.stack((omega[..., 2, 1], omega[..., 0, 2], omega[..., 1, 0]), -1)
        half = torch.einsum("...a,aij->...ij", axis.to(torch.complex128) / 2, _UNITS[1:])
        return _quaternion(_unitary(points) @ half)
    return (seen @ omega).flatten(-2)
