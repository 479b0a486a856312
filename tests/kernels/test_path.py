"""The path that fused operations take."""

from __future__ import annotations

import pytest
import torch

from headtohead.kernels import path, path_name


def test_without_a_gpu_or_without_triton_the_plain_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert path_name(torch.device("cpu")) == "plain"
    monkeypatch.setattr(path, "_INTERPRETED", True)
    monkeypatch.setattr(path, "_TRITON", True)
    assert path_name(torch.device("cpu")) == "triton"
    monkeypatch.setattr(path, "_TRITON", False)
    assert path_name(torch.device("cpu")) == "plain"
