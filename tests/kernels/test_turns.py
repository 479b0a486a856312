"""Rotation and gate in Triton's interpreter against their plain twins: values and gradients, odd sizes, any strides."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

TURN = """
import torch
from headtohead.kernels.rotary import rotary_table, rotate_plain
from headtohead.kernels.turns import turn

draw = torch.Generator().manual_seed(0)
for batch, heads, time, dim in ((2, 3, 5, 6), (1, 1, 1, 2), (2, 4, 40, 8)):
    table = rotary_table(torch.arange(time), dim, 10_000.0, torch.float32)
    whole = torch.randn(batch, time, 3, heads, dim, generator=draw)
    for x in (whole[:, :, 1].transpose(1, 2), whole[:, :, 0].permute(0, 2, 1, 3).contiguous()):
        for inverse in (False, True):
            results = []
            for function in (turn, rotate_plain):
                given = x.detach().requires_grad_()
                out = function(given, table, inverse)
                weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
                results.append((out, *torch.autograd.grad((out * weights).sum(), given)))
            for ours, theirs in zip(*results, strict=True):
                assert (ours - theirs).abs().max() < 1e-6
torch.library.opcheck(turn, (whole[:, :, 0].transpose(1, 2).contiguous().requires_grad_(), table, False))
"""

GATE = """
import torch
from headtohead.kernels.turns import gate
from torch.nn import functional as F

draw = torch.Generator().manual_seed(0)
for rows, hidden in ((1, 1), (7, 13), (9, 600)):
    joined = (torch.randn(rows, 2 * hidden, generator=draw) * 5).requires_grad_()
    with torch.no_grad():
        joined[0, 0], joined[-1, -1] = -200.0, 200.0
    weights = torch.linspace(-1, 1, rows * hidden).view(rows, hidden)
    results = []
    for function in (gate, lambda both: F.silu(both[:, :hidden]) * both[:, hidden:]):
        out = function(joined)
        results.append((out, *torch.autograd.grad((out * weights).sum(), joined)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    strided = torch.stack((joined.detach(), joined.detach()), -1)[..., 0]
    assert torch.equal(gate(strided), gate(joined))
torch.library.opcheck(gate, (joined,))
"""

STACKED = """
import torch
from headtohead.kernels.rotary import rotary_table
from headtohead.kernels.turns import gate, turn

draw = torch.Generator().manual_seed(0)
table = rotary_table(torch.arange(5), 6, 10_000.0, torch.float32)
x = torch.randn(3, 2, 5, 2, 6, generator=draw).transpose(2, 3).requires_grad_()
joined = torch.randn(3, 7, 26, generator=draw).requires_grad_()
for function, given in ((lambda x: turn(x, table, False), x), (gate, joined)):
    together, apart = torch.vmap(function)(given), torch.stack([function(part) for part in given])
    assert torch.equal(together, apart)
    weights = torch.linspace(-1, 1, apart.numel()).view(apart.shape)
    for place in (0, 1):
        moved = torch.vmap(function, in_dims=place)(given.movedim(0, place))
        assert torch.equal(moved, apart)
    grads = [torch.autograd.grad((out * weights).sum(), given)[0] for out in (together, apart)]
    assert torch.equal(*grads)
"""

NORM = """
import torch
from headtohead.kernels import norm_rows as kernel
from headtohead.kernels.norm import rms_norm, rms_norm_plain
from headtohead.kernels.path import stacking

draw = torch.Generator().manual_seed(0)
kernel._NUMBERS, kernel._PROGRAMS = 64, 2  # several blocks and programs, the last ones not full
for seeds, batch, time, width in ((1, 1, 1, 2), (3, 2, 5, 6), (2, 3, 7, 32), (2, 2, 2, 100)):
    x = (3 * torch.randn(seeds, batch, time, width, generator=draw)).requires_grad_()
    gain = torch.randn(seeds, width, generator=draw).requires_grad_()
    with torch.no_grad():
        x[0, 0, 0] = 0.0
        x[-1, -1, -1] *= 1e4
    weights = torch.linspace(-1, 1, x.numel()).view(x.shape)
    with stacking():
        ours = torch.vmap(lambda x, gain: rms_norm(x, gain, 1e-6))(x, gain)
    theirs = torch.stack([rms_norm_plain(one, its, 1e-6) for one, its in zip(x, gain)])
    found = [(out, *torch.autograd.grad((out * weights).sum(), (x, gain))) for out in (ours, theirs)]
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).norm() <= 2e-6 * other.norm(), (width, one, other)
torch.library.opcheck(kernel.norm_rows, (x.detach().flatten(1, 2).requires_grad_(), gain, 1e-6))
"""


@pytest.mark.parametrize("script", [TURN, GATE, STACKED, NORM], ids=["turn", "gate", "stacked", "norm"])
def test_the_kernel_is_its_plain_twin(script: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
