"""Benchmark cases: every fused kernel of a training step with its inputs, plain reference, bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.kernels import linear_cross_entropy, rotary_table, short_convolution, short_convolution_plain
from headtohead.kernels.dynamics import integrator as dynamics
from headtohead.kernels.dynamics import operators as dynamics_fused
from headtohead.kernels.matmul.loss import IGNORED, linear_cross_entropy_plain
from headtohead.kernels.matmul.loss_triton import cross_entropy_rows
from headtohead.kernels.path import triton_serves
from headtohead.kernels.pointwise.norm import rms_norm_plain
from headtohead.kernels.pointwise.norm_triton import norm_rows
from headtohead.kernels.pointwise.rope_swiglu_triton import apply_rope, gate
from headtohead.kernels.pointwise.rotary import rotate_plain

Outputs = tuple[Tensor, ...]
Draw = Callable[..., Tensor]
"""draw(*shape) returns standard normal float32 numbers on the device."""
_EPS = 1e-6
_LINE = 64  # rows of logits are padded to a multiple of this


@dataclass(frozen=True)
class Given:
    """Inputs of a kernel: named tensors with gradients, and the rest without."""

    leaves: dict[str, Tensor]
    rest: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Fused:
    """A fused kernel at one shape."""

    name: str
    shape: tuple[int, ...]
    given: Callable[[torch.dtype, Draw], Given]
    kernel: Callable[..., Outputs]
    """kernel(*leaves, *rest): the Triton kernel where available, else the plain reference."""
    twin: Callable[..., Outputs]
    """The plain reference, in any precision."""
    numbers: float
    """Minimum count of numbers read and written by forward and backward, in the precision of the run."""
    flops: float
    """Additions, products and exponentials of forward and backward, without recomputation."""
    precision: str = "bf16"
    """Precision of this kernel in a bf16 training step; used for timing on a GPU."""
    overwrites: bool = False
    """The Triton kernel overwrites its first leaf with its gradient; there is no backward pass."""


def rotation(batch: int, heads: int, time: int, dim: int) -> Fused:
    """Rotary embedding of queries that are a strided view of a joint QKV projection."""

    def given(dtype: torch.dtype, draw: Draw) -> Given:
        joined = draw(batch, time, 3, heads, dim).to(dtype)
        table = rotary_table(torch.arange(time, device=joined.device), dim, 10_000.0, torch.float32)
        return Given({"x": joined[:, :, 0].transpose(1, 2)}, (table,))

    def twin(x: Tensor, table: Tensor) -> Outputs:
        return (rotate_plain(x, table),)

    def kernel(x: Tensor, table: Tensor) -> Outputs:
        return (apply_rope(x, table, False),) if triton_serves(x) else twin(x, table)

    size = batch * heads * time * dim
    return Fused("rotation", (batch, heads, time, dim), given, kernel, twin, 4 * size, 6 * size)


def gating(rows: int, hidden: int) -> Fused:
    """silu(a) * b of a gated feed-forward layer."""

    def twin(joined: Tensor) -> Outputs:
        gated, lifted = joined.chunk(2, -1)
        return (F.silu(gated) * lifted,)

    def kernel(joined: Tensor) -> Outputs:
        return (gate(joined),) if triton_serves(joined) else twin(joined)

    # Forward reads two and writes one; backward reads those two and a gradient and writes two.
    return Fused(
        "gate",
        (rows, hidden),
        lambda dtype, draw: Given({"joined": draw(rows, 2 * hidden).to(dtype)}),
        kernel,
        twin,
        numbers=8 * rows * hidden,
        flops=17 * rows * hidden,
    )


def norm(stack: int, rows: int, width: int) -> Fused:
    """RMS norm of a population, each row with its own gain; the residual stream is float32."""

    def twin(x: Tensor, gain: Tensor) -> Outputs:
        wide = x if x.dtype == torch.float64 else x.float()
        return (rms_norm_plain(wide, gain.unsqueeze(-2), _EPS).to(x.dtype),)

    def kernel(x: Tensor, gain: Tensor) -> Outputs:
        return (norm_rows(x, gain, _EPS),) if triton_serves(x) else twin(x, gain)

    def given(dtype: torch.dtype, draw: Draw) -> Given:
        return Given({"x": draw(stack, rows, width).to(dtype), "gain": 1 + 0.1 * draw(stack, width)})

    size = stack * rows * width
    return Fused("norm", (stack, rows, width), given, kernel, twin, 5 * size, 15 * size, "float32")


def convolution(
    batch: int,
    time: int,
    channels: int,
    taps: int = 4,
    *,
    biased: bool = False,
    residual: bool = False,
    silu: bool = False,
) -> Fused:
    """Short causal convolution of a part of a wider projection."""

    def given(dtype: torch.dtype, draw: Draw) -> Given:
        wider = draw(batch, time, 2 * channels).to(dtype)
        leaves = {"h": wider[..., channels:], "weight": taps**-0.5 * draw(taps, channels)}
        return Given(leaves | ({"bias": draw(channels)} if biased else {}))

    def kernel(h: Tensor, weight: Tensor, *bias: Tensor) -> Outputs:
        return (short_convolution(h, weight, *bias, residual=residual, silu=silu),)

    def twin(h: Tensor, weight: Tensor, *bias: Tensor) -> Outputs:
        return (short_convolution_plain(h, weight, *bias, residual=residual, silu=silu),)

    size = batch * time * channels
    # Forward reads and writes h; backward reads it and a gradient and writes one.
    return Fused(
        "convolution, silu" if silu else "convolution",
        (batch, time, channels),
        given,
        kernel,
        twin,
        numbers=5 * size,
        flops=(6 * taps + 2 * residual + 15 * silu) * size,
    )


def loss_rows(rows: int, vocabulary: int, smoothing: float = 0.0) -> Fused:
    """Cross-entropy of rows of logits with its gradient; every logit is read once and written once."""
    padded = -(-vocabulary // _LINE) * _LINE

    def given(dtype: torch.dtype, draw: Draw) -> Given:
        targets = _targets(draw, rows, vocabulary)
        return Given({"logits": 3 * draw(rows, padded).to(dtype)}, (targets, (targets != IGNORED).sum()))

    def twin(logits: Tensor, targets: Tensor, count: Tensor) -> Outputs:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        scores = torch.log_softmax(wide[:, :vocabulary], -1)
        counted = targets != IGNORED
        chosen = scores.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1)
        nats = torch.where(counted, -chosen, 0.0).sum() / count
        spread = torch.where(counted, -scores.mean(-1), 0.0).sum() / count
        return ((1 - smoothing) * nats + smoothing * spread if smoothing else nats), nats.detach()

    def kernel(logits: Tensor, targets: Tensor, count: Tensor) -> Outputs:
        if not triton_serves(logits):
            return twin(logits, targets, count)
        nats, objective = cross_entropy_rows(
            logits, targets, count.float(), vocabulary, ignored=IGNORED, smoothing=smoothing
        )
        return objective.sum() / count, nats.sum() / count

    size = rows * padded
    return Fused(
        *("loss rows", (rows, vocabulary), given, kernel, twin),
        numbers=2 * size,
        flops=6 * size,
        overwrites=True,
    )


def loss(rows: int, width: int, vocabulary: int, smoothing: float = 0.0, biased: bool = False) -> Fused:
    """Cross-entropy including the matrix products of the readout, chunk by chunk."""

    def given(dtype: torch.dtype, draw: Draw) -> Given:
        leaves = {"x": draw(rows, width).to(dtype), "weight": width**-0.5 * draw(vocabulary, width)}
        return Given(
            leaves | ({"bias": draw(vocabulary)} if biased else {}), (_targets(draw, rows, vocabulary),)
        )

    def of(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        def run(x: Tensor, weight: Tensor, *rest: Tensor) -> Outputs:
            return function(x, weight, rest[-1], smoothing, rest[0] if biased else None)

        return run

    return Fused(
        "loss with its products",
        (rows, width, vocabulary),
        given,
        of(linear_cross_entropy),
        of(linear_cross_entropy_plain),
        # States and weights are read in forward and backward; their gradients are written.
        numbers=3 * width * (rows + vocabulary),
        flops=6.0 * rows * width * vocabulary,
    )


def coupling(
    name: str,
    shape: tuple[int, int, int, int],
    *,
    scheme: str = "euler",
    steps: int = 1,
    hidden: int = 64,
    potential: bool = False,
    apart: bool = False,
    biased: bool = True,
) -> Fused:
    """The coupled integrator on (batch, heads, time, dim); `apart` gives each head its own weights."""
    batch, heads, time, dim = shape

    def given(dtype: torch.dtype, draw: Draw) -> Given:
        sets = (heads,) if apart else ()
        leaves = {"q": draw(batch, time, heads, dim).to(dtype), "k": draw(batch, time, heads, dim).to(dtype)}
        leaves |= {"dt": 0.1 + 0.05 * draw(heads), "w1": dim**-0.5 * draw(*sets, hidden, dim)}
        if biased:
            leaves["b1"] = 0.1 * draw(*sets, hidden)
        leaves["w2"] = draw(*sets, hidden) if potential else hidden**-0.5 * draw(*sets, dim, hidden)
        if biased and not potential:
            leaves["b2"] = 0.1 * draw(*sets, dim)
        return Given(leaves)

    def weights(found: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return w1, b1, w2, b2; absent ones are None."""
        left = list(found)
        w1, b1 = left.pop(0), left.pop(0) if biased else None
        return w1, b1, left.pop(0), left.pop(0) if left else None

    def twin(q: Tensor, k: Tensor, dt: Tensor, *found: Tensor) -> Outputs:
        w1, b1, w2, b2 = weights(found)
        narrow, state = q.dtype, torch.promote_types(q.dtype, torch.float32)

        def force(x: Tensor) -> Tensor:
            x = x.to(narrow)
            if potential:
                return dynamics.potential_force_plain(x, w1, b1, w2).to(state)
            return dynamics.head_mlp(x, w1, b1, w2, b2).to(state)

        integrate: Any = getattr(dynamics, scheme)
        q, k = integrate(q.to(state), k.to(state), dt.to(state).unsqueeze(-1), steps, force)
        return q.to(narrow), k.to(narrow)

    def kernel(q: Tensor, k: Tensor, dt: Tensor, *found: Tensor) -> Outputs:
        w1, b1, w2, b2 = weights(found)
        if not triton_serves(q):
            return twin(q, k, dt, *found)
        return dynamics_fused.integrate(q, k, dt, steps, scheme, w1, b1, w2, b2)

    rows, evaluations = batch * heads * time, steps + (scheme == "leapfrog")
    # Forward reads and writes q and k; backward reads them and both gradients and writes two. Backward has
    # twice the FLOPs of forward.
    return Fused(
        f"coupled {name}",
        shape,
        given,
        kernel,
        twin,
        numbers=10 * rows * dim,
        flops=3.0 * evaluations * 4 * hidden * dim * rows,
    )


def training_cases(gpu: bool) -> list[Fused]:
    """Return every kernel at training shapes: 51m with 32,768 tokens, and the norm of a population of 16 at 1m.

    On CPU the shapes are small.
    """
    if gpu:
        pair, pointwise, couple = (64, 8, 512, 64), (32_768, 1408), (64, 8, 512, 64)
        convolved = (16, 2048, 1536)
        norms, rows, whole = [(1, 32_768, 512), (16, 8192, 128)], (8192, 50_257), (32_768, 512, 50_257)
    else:
        pair, pointwise, couple = (2, 2, 16, 16), (64, 48), (2, 2, 16, 16)
        convolved = (2, 32, 48)
        norms, rows, whole = [(1, 64, 32), (3, 16, 32)], (16, 100), (32, 16, 100)
    return [
        rotation(*pair),
        gating(*pointwise),
        convolution(*convolved, residual=True),
        convolution(*convolved, silu=True),
        *(norm(*shape) for shape in norms),
        loss_rows(*rows),
        loss(*whole),
        coupling("euler", couple),
        coupling("euler, per head", couple, hidden=8, apart=True, biased=False),
        coupling("leapfrog, potential force", couple, scheme="leapfrog", hidden=128, potential=True),
        coupling("leapfrog, 7 steps", couple, scheme="leapfrog", steps=7),
    ]


def odd_cases(gpu: bool) -> list[Fused]:
    """Return every kernel at a shape that is no multiple of a block, to measure errors, not time."""
    time = 129 if gpu else 5
    return [
        rotation(3, 5, time, 48),
        gating(time, 343),
        convolution(3, time, 79, residual=True),
        convolution(2, time, 72, 3, biased=True, silu=True),
        norm(3, 2 * time, 344),
        loss_rows(time, 5003, smoothing=0.1),
        loss(2 * time + 1, 72, 1003, smoothing=0.1, biased=True),
        coupling("euler", (2, 5, time, 48), hidden=20),
        coupling(
            *("leapfrog, potential force, per head", (2, 3, time, 24)),
            scheme="leapfrog",
            steps=3,
            hidden=12,
            potential=True,
            apart=True,
        ),
    ]


def _targets(draw: Draw, rows: int, vocabulary: int) -> Tensor:
    """Return random targets, one in sixteen of which is ignored."""
    numbers = draw(rows)
    chosen = (numbers.abs() * 1e6).long() % vocabulary
    chosen[::16] = IGNORED
    return chosen
