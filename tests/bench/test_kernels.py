"""Kernel benchmarks: derived values are consistent with the timings, and errors are detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headtohead as h2h
from headtohead.bench import decode as decoding
from headtohead.bench import fused
from headtohead.bench import kernels as speed

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["kernels", "decode"])
def test_a_benchmark_is_a_document_with_provenance(name: str) -> None:
    document = getattr(h2h, f"bench_{name}")(device="cpu", quiet=True)
    assert {"benchmark", "date", "commit", "torch", "device", "kernels", "copy_bytes_per_second"} <= set(
        document
    )
    timed = [row for row in document["rows"] if "seconds" in row]
    assert timed
    for row in timed:
        assert row["faster"] == pytest.approx(row["peer_seconds"] / row["seconds"])
        share = row["share_of_copy"] if name == "decode" else 1 / row["over_floor"]
        assert share == pytest.approx(row["floor_seconds"] / row["seconds"])
        assert share > 0
    assert all("failed" not in row for row in document["rows"])
    assert all(row["error"] < 2e-5 for row in document["rows"])


def test_the_floor_counts_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (speed, decoding):
        monkeypatch.setattr(module, "copy_bandwidth", lambda device: 1e6)
    rows = {
        row["case"]: row
        for row in speed.bench_kernels(device="cpu", quiet=True)["rows"]
        if row["kind"] == "training"
    }
    state = 2 * 2 * 16 * 16 * 4
    assert rows["coupled euler"]["floor_seconds"] == pytest.approx(10 * state / 1e6)
    assert rows["rotation"]["floor_seconds"] == pytest.approx(4 * state / 1e6)
    assert rows["gate"]["floor_seconds"] == pytest.approx(8 * 64 * 48 * 4 / 1e6)
    assert rows["loss rows"]["floor_seconds"] == pytest.approx(2 * 16 * 128 * 4 / 1e6)
    row = decoding.bench_decode(device="cpu", quiet=True)["rows"][0]
    assert row["floor_seconds"] == pytest.approx(2 * 2 * 64 * 16 * 4 / 1e6)


def test_the_coupling_has_the_flops_that_the_mechanism_declares() -> None:
    from headtohead.mechanisms.contract.base import Shape
    from headtohead.mechanisms.coupled import CoupledOptions, HeadForce

    for options in (CoupledOptions(), CoupledOptions(force="potential")):
        force = HeadForce(Shape(512, 8), options, options.hidden_width, 64)
        potential = options.force == "potential"
        case = fused.coupling("", (64, 8, 512, 64), hidden=options.hidden_width, potential=potential)
        assert case.flops == 3 * force.flops() * 64 * 8 * 512


def test_every_kernel_is_measured_in_every_precision_at_an_odd_shape_and_under_vmap() -> None:
    gpu = torch.device("cuda")
    work = [(case.name.split(",")[0], dtype, kind) for case, dtype, kind in speed._work(gpu)]
    kernels = {"rotation", "gate", "norm", "loss rows", "loss with its products", "coupled euler"}
    for dtype in ("bf16", "fp16", "float32"):
        for kind in ("training", "odd"):
            assert kernels <= {name for name, one, other in work if (one, other) == (dtype, kind)}
    assert {name for name, _, kind in work if kind == "stacked"} >= {
        "rotation",
        "gate",
        "norm",
        "coupled euler",
    }


def test_a_wrong_gradient_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 1.001

    right = fused.gating(5, 7)
    wrong = fused.Fused(
        "gate",
        (5, 7),
        right.given,
        lambda x: right.twin(Wrong.apply(x)),
        right.twin,
        right.numbers,
        right.flops,
    )
    assert speed._errors(right, "float32", CPU)["within"]
    found = speed._errors(wrong, "float32", CPU)
    assert (found["worst"], found["within"]) == ("joined", False)
    assert found["error"] == pytest.approx(1e-3, rel=0.01)


def test_a_failed_kernel_is_a_row_and_the_rest_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*given: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("no such layout\nand more")

    good = fused.gating(5, 7)
    bad = fused.Fused("bad", (5, 7), good.given, broken, good.twin, good.numbers, good.flops)
    monkeypatch.setattr(speed, "training_cases", lambda gpu: [bad, good])
    monkeypatch.setattr(speed, "odd_cases", lambda gpu: [])
    file = tmp_path / "kernels.json"
    rows = speed.bench_kernels(device="cpu", out=file, quiet=True)["rows"]
    assert [row.get("failed") for row in rows] == ["RuntimeError: no such layout", None]
    assert json.loads(file.read_text())["rows"] == rows
    monkeypatch.setattr(speed, "_row", broken)
    assert speed.bench_kernels(device="cpu", out=file, quiet=True)["rows"] == rows, (
        "stored rows are not measured again"
    )


def test_another_call_continues_after_a_lost_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lost(*given: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    good = fused.gating(5, 7)
    bad = fused.Fused("bad", (5, 7), good.given, lost, good.twin, good.numbers, good.flops)
    monkeypatch.setattr(speed, "training_cases", lambda gpu: [bad, good])
    monkeypatch.setattr(speed, "odd_cases", lambda gpu: [])
    file = tmp_path / "kernels.json"
    assert [row["case"] for row in speed.bench_kernels(device="cpu", out=file, quiet=True)["rows"]] == ["bad"]
    assert [row["case"] for row in speed.bench_kernels(device="cpu", out=file, quiet=True)["rows"]] == [
        "bad",
        "gate",
    ]


def test_decoding_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, file = decoding.decode, tmp_path / "decode.json"

    def broken(q: Tensor, kv: Tensor, table: Tensor, turn: str) -> Tensor:
        if turn == "score":
            raise RuntimeError("no such layout")
        return real(q, kv, table, turn)

    monkeypatch.setattr(decoding, "decode", broken)
    rows = decoding.bench_decode(device="cpu", out=file, quiet=True)["rows"]
    assert {row["turned"] for row in rows if "failed" in row} == {"score"}
    assert all("share_of_copy" in row for row in rows if row["turned"] != "score")
    assert json.loads(file.read_text())["rows"] == rows


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_triton_kernels_equal_their_plain_reference_in_the_interpreter() -> None:
    assert speed.path_name(CPU) == "triton"
    for case in fused.odd_cases(gpu=False):
        found = [speed._errors(case, "float32", CPU)]
        if not case.name.startswith("loss"):
            found.append(speed._stacked_errors(case, "float32", CPU))
        assert all(row["within"] for row in found), (case.name, found)
