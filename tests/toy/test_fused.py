"""The kernel of a window of steps, in Triton's interpreter, against the plain steps."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import torch
from headtohead.toy import fused
from headtohead.toy.runs import RATE, choose_runs
from headtohead.toy.train import Batch

runs = choose_runs(["CACO", "CACO r=5 L=128"], (1234, 1235))
assert fused.serves("CACO", 32, torch.device("cpu"))
assert not fused.serves("FACO", 32, torch.device("cpu"))
with torch.inference_mode():
    ours, theirs = (Batch(runs, torch.device("cpu")) for _ in range(2))
    for batch in (ours, theirs):
        batch._fill()
    few = slice(0, 4)
    known, ask, pull = (t[few].clone() for t in (ours.known, ours.ask, ours.pull))
    losses = fused.window_steps(ours.state, known, ask, pull, ours.target, RATE)
    theirs.known, theirs.ask, theirs.pull = (t[few] for t in (theirs.known, theirs.ask, theirs.pull))
    expected = theirs._steps()
start = Batch(runs, torch.device("cpu")).state
torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
for name, value in theirs.state.items():
    moved = (value - start[name]).norm()
    assert moved > 0
    assert (ours.state[name] - value).norm() <= 1e-4 * moved, name
"""


def test_a_window_in_one_kernel_is_its_steps_one_by_one() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
