"""The loss kernel in Triton's interpreter against the definition: values and every gradient, odd sizes, extremes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPARE = """
import torch
from headtohead.kernels import loss, loss_rows, path

loss_rows.BLOCK, loss._LINE = 64, {line}
draw = torch.Generator().manual_seed(0)
x, weight, bias = (torch.randn(*shape, generator=draw) for shape in ((70, 6), ({vocabulary}, 6), ({vocabulary},)))
x[3] *= 1e4
targets = torch.randint(0, {vocabulary}, (70,), generator=draw)
targets[::3] = -1
assert path.triton_serves(x)
results = []
for function in (loss.linear_cross_entropy, loss.linear_cross_entropy_plain):
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)][: {inputs}]
    objective, nats = function(*inputs[:2], targets, {smoothing}, *inputs[2:])
    (3 * objective).backward()
    results.append([objective, nats, *(tensor.grad for tensor in inputs)])
for ours, theirs in zip(*results, strict=True):
    assert torch.isfinite(ours).all()
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), (ours, theirs)
each = loss.token_nats(x, weight, targets)
assert (each[targets < 0] == 0).all()
plain = loss.linear_cross_entropy_plain(x, weight, targets)[1]
assert torch.allclose(each.sum() / (targets >= 0).sum(), plain)
"""


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("vocabulary", "line", "inputs"), [(257, 64, 2), (50, 1, 3), (128, 64, 2), (300, 128, 3)]
)
def test_the_kernel_is_the_definition(vocabulary: int, line: int, inputs: int, smoothing: float) -> None:
    script = COMPARE.format(vocabulary=vocabulary, line=line, inputs=inputs, smoothing=smoothing)
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
