"""Benchmarks of kernels: what they report follows from what they time."""

from __future__ import annotations

import pytest
import torch

import headtohead as h2h
from headtohead.bench import kernels as speed


@pytest.mark.parametrize("name", ["kernels", "decode"])
def test_a_benchmark_is_a_document_with_provenance(name: str) -> None:
    document = getattr(h2h, f"bench_{name}")(device="cpu", quiet=True)
    assert {"benchmark", "date", "commit", "torch", "device", "kernels", "copy_bytes_per_second"} <= set(
        document
    )
    for row in document["rows"]:
        assert row["faster"] == pytest.approx(row["peer_seconds"] / row["seconds"])
        share = row["share_of_copy"] if name == "decode" else 1 / row["over_floor"]
        assert share == pytest.approx(row["floor_seconds"] / row["seconds"])
        assert 0 < share < 1.05, "nothing moves its bytes faster than a copy does"


def test_the_floor_counts_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1e6)
    row = speed.measure_kernels(torch.device("cpu"))["rows"][0]
    assert row["floor_seconds"] == pytest.approx(10 * 2 * 2 * 16 * 16 * 4 / 1e6)
    row = speed.measure_decode(torch.device("cpu"))["rows"][0]
    assert row["floor_seconds"] == pytest.approx(2 * 2 * 64 * 16 * 4 / 1e6)
