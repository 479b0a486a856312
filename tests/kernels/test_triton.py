"""The Triton kernels: in the interpreter where there is no GPU, and the plain path where there is no Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from headtohead.kernels import path, path_name


@pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install headtohead[gpu]"
)
def test_the_kernels_in_the_interpreter() -> None:
    file = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=file.parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_without_a_gpu_or_without_triton_the_plain_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert path_name(torch.device("cpu")) == "plain"
    monkeypatch.setattr(path, "_INTERPRETED", True)
    monkeypatch.setattr(path, "_TRITON", True)
    assert path_name(torch.device("cpu")) == "triton"
    monkeypatch.setattr(path, "_TRITON", False)
    assert path_name(torch.device("cpu")) == "plain"
