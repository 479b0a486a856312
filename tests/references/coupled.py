"""Coupled dynamics of one token's (q, k) in one head, step by step from the equations, and attention over the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.references.attention import attention, turn

Pair = tuple[Tensor, Tensor]


def pair_after(q: Tensor, k: Tensor, p: dict[str, Tensor], head: int, **facts: str | int) -> Pair:
    """Return one token's (q, k), each (dim,), after all steps; p holds the stage's parameters by name."""
    rule, n, kind = facts["dynamics"], int(facts["steps"]), str(facts["force"])

    def net(side: str) -> Callable[[Tensor], Tensor]:
        return lambda z: force(z, p, f"{side}_force.", head, kind)

    if rule == "affine":
        for _ in range(n):
            s, t = net("q")(k).chunk(2)
            q = q * s.tanh().exp() + t
            s, t = net("k")(q).chunk(2)
            k = k * s.tanh().exp() + t
        return q, k
    dt = p["dt"][head if len(p["dt"]) > 1 else 0]
    if facts["dt_param"] == "softplus":
        dt = torch.log(1 + torch.exp(dt))
    for _ in range(n):
        if rule == "euler":
            seen = k if facts["force_input"] == "k" else q
            q, k = q + dt * k, k + dt * net("k")(seen)
        elif rule == "symplectic_euler":
            k = k + dt * net("k")(q)
            q = q + dt * k
        elif rule == "leapfrog":
            half = k + dt / 2 * net("k")(q)
            q = q + dt * half
            k = half + dt / 2 * net("k")(q)
        else:
            q, k = q + dt * net("q")(q), k + dt * net("k")(k)
    return q, k


def force(z: Tensor, p: dict[str, Tensor], place: str, head: int, kind: str) -> Tensor:
    """Return f(z): zero, F z, W2 silu(W1 z + b1) + b2, or minus the gradient of w2 . silu(W1 z + b1)."""
    if kind == "zero":
        return 0 * z

    def own(name: str, rank: int) -> Tensor | float:
        value = p.get(place + name)
        return 0.0 if value is None else (value[head] if value.ndim > rank else value)

    if kind == "linear":
        return own("w2", 2) @ z
    if kind == "potential":
        # By definition: minus the gradient of V, by autograd.
        def potential(z: Tensor) -> Tensor:
            inner = own("w1", 2) @ z + own("b1", 1)
            return (own("w2", 1) * (inner * torch.sigmoid(inner))).sum()

        with torch.enable_grad():
            leaf = z if z.requires_grad else z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(potential(leaf), leaf, create_graph=True)
        return -slope
    inner = own("w1", 2) @ z + own("b1", 1)
    return own("w2", 2) @ (inner * torch.sigmoid(inner)) + own("b2", 1)


def evolved(
    q: Tensor, k: Tensor, p: dict[str, Tensor], *, heads: int, rope: bool, **facts: str | int
) -> Pair:
    """Return q and k (time, heads * dim) after the dynamics, before positions; with `after_rope`, rotated back."""
    dim = q.shape[1] // heads
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i in range(len(q)):
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for head in range(heads):
            one, two = (z[i, head * dim : (head + 1) * dim] for z in (q, k))
            turned = rope and facts["order"] == "after_rope"
            if turned:
                one, two = turn(one, i), turn(two, i)
            one, two = pair_after(one, two, p, head, **facts)
            if turned:
                one, two = turn(one, -i), turn(two, -i)
            if "q_gain" in p:
                one = one / (one.square().mean() + 1e-6).sqrt() * p["q_gain"]
                two = two / (two.square().mean() + 1e-6).sqrt() * p["k_gain"]
            parts[0].append(one)
            parts[1].append(two)
        for row, part in zip(rows, parts, strict=True):
            row.append(torch.cat(part))
    return torch.stack(rows[0]), torch.stack(rows[1])


def coupled(x: Tensor, p: dict[str, Tensor], *, heads: int, rope: bool, **facts: str | int) -> Tensor:
    """Standard attention of one sequence x (time, width) over the evolved pairs."""
    q, k, v = (_affine(x, p, name) for name in "qkv")
    stage = {name.removeprefix("stages.coupled."): value for name, value in p.items()}
    q, k = evolved(q, k, stage, heads=heads, rope=rope, **facts)
    where = "score" if rope else "none"
    return attention(q, k, v, p["o.weight"], heads=heads, kv_heads=heads, rope=where, b_o=p.get("o.bias"))


def _affine(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y
