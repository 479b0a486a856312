"""The fused kernel of a window of steps, in Triton's interpreter, compared with plain steps."""

from __future__ import annotations

import pytest
import torch

from headtohead.papers.faster_qk import fused
from headtohead.papers.faster_qk.runs import choose_runs
from headtohead.papers.faster_qk.train import Batch
from tests.compare import assert_close

CPU = torch.device("cpu")


@pytest.mark.usefixtures("interpreted")
@torch.inference_mode()
def test_a_window_in_one_kernel_equals_its_steps_one_by_one() -> None:
    runs = choose_runs(["CACO", "CACO r=5 L=128"], (1234, 1235))
    assert fused.serves("CACO", 32, CPU)
    assert not fused.serves("FACO", 32, CPU)
    start, ours, theirs = (Batch(runs, CPU) for _ in range(3))
    for batch in (ours, theirs):
        batch._fill()
    ours.inputs = {name: value[:4].clone() for name, value in ours.inputs.items()}
    theirs.inputs = {name: value[:4] for name, value in theirs.inputs.items()}
    losses = ours._in_one_kernel(ours.state)
    expected = theirs._steps()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    moved = {name: value - start.state[name] for name, value in theirs.state.items()}
    assert all(change.norm() > 0 for change in moved.values())
    assert_close(
        {name: value - start.state[name] for name, value in ours.state.items()}, moved, 1e-4, by="norm"
    )
