from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headtohead
from headtohead.bench import population as stack
from headtohead.cli.main import main
from headtohead.common.errors import UserError

QUICK: dict[str, Any] = {"size": "nano", "batch": 256, "rounds": 1, "precision": "float32", "device": "cpu"}


@pytest.mark.slow
def test_a_row_holds_population_single_and_separate_rates_with_their_ratios() -> None:
    (row,) = headtohead.bench_population((2,), **QUICK)["rows"]
    assert row["seeds"] == 2
    assert row["recorded"] is False
    for other in ("single", "separate"):
        ratio = row["stacked_tokens_per_second"] / row[f"{other}_tokens_per_second"]
        assert row[f"over_{other}"] == pytest.approx(ratio)
        assert ratio > 0
    assert row["disagreement"]["eager"] < 1e-3
    assert set(row["results"]) == {"single, eager", "stacked, eager"}
    assert row["parameters"] == 117_056
    assert {"commit", "torch", "date"} <= row.keys()


@pytest.mark.slow
def test_rows_in_a_file_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H2H_COMMIT", "abc")
    monkeypatch.setattr(stack, "BURST", 1)
    out = tmp_path / "rows.json"
    first = headtohead.bench_population((1, 2), processes=False, out=out, **QUICK)
    again = headtohead.bench_population((1, 2), processes=False, out=out, **QUICK)
    assert again["rows"] == first["rows"] == json.loads(out.read_text())["rows"]
    assert [row["over_separate"] for row in again["rows"]] == [None, None]


@pytest.mark.slow
def test_a_wrong_population_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stack.Setup("nano", "standard", 256, "float32", "cpu")
    assert stack.disagreement(case) < 1e-3
    usual = stack.PopulationTrainer._clip
    monkeypatch.setattr(
        stack.PopulationTrainer, "_clip", lambda self, grads: usual(self, [grads[0].mul_(3.0), *grads[1:]])
    )
    assert stack.disagreement(case) > 1e-3


def test_a_nan_raises_in_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stack.Setup("nano", "standard", 256, "float32", "cpu")
    monkeypatch.setattr(
        stack.PopulationTrainer, "_clip", lambda self, grads: grads[0].new_full((3,), float("nan"))
    )
    with pytest.raises(RuntimeError, match="step 1 gives"):
        stack.disagreement(case)


@pytest.mark.parametrize("faster", [False, True])
def test_separate_processes_are_compiled_if_a_single_run_is_faster_compiled(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []
    monkeypatch.setattr(
        stack, "separate_rate", lambda case, count, duration, compile: requested.append(compile) or 1.0
    )
    setup = stack.Setup("nano", "standard", 256, "float32", "cpu")
    rates = {"single, compiled": 1e6 + faster, "single, eager": 1e6 + (not faster)}
    stacked = {f"stacked, {form}": {"error": "none"} for form in ("compiled", "eager")}
    results = {name: {"tokens_per_second": rate} for name, rate in rates.items()} | stacked
    found = stack.compare_kinds(setup, 2, results, 1, lambda message, share: None)
    assert requested == [faster]
    assert (found["single_tokens_per_second"], found["over_separate"]) == (1e6 + 1, None)


def test_a_failed_contender_records_its_error_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("no such graph\nmore")

    monkeypatch.setattr(stack, "BURST", 1)
    monkeypatch.setattr(stack.Setup, "stack", broken)
    (row,) = headtohead.bench_population((2,), processes=False, profile=True, **QUICK)["rows"]
    assert row["results"]["stacked, eager"] == {"error": "RuntimeError: no such graph"}
    assert row["disagreement"] == {"eager": "RuntimeError: no such graph"}
    assert row["over_single"] is None
    assert row["single_tokens_per_second"] > 0


@pytest.mark.slow
def test_a_profile_holds_the_kernel_times_of_a_population_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "BURST", 1)
    (row,) = headtohead.bench_population((2,), processes=False, profile=True, **QUICK)["rows"]
    found = row["profile"]["stacked, eager"]
    assert found["kinds"]["matrix products"] > 0
    assert found["kinds"]["attention"] > 0


@pytest.mark.slow
def test_the_last_line_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench stack 2 --size nano --arms standard coupled --batch 256 --rounds 1 --precision float32 --device cpu"
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--no-processes"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [row["arm"] for row in rows] == ["standard", "coupled"]
    assert "population tokens/s" in out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": "nanoo"}, "nano"),
        ({"arms": ("standrad",)}, "standard"),
        ({"batch": 100}, "multiple of the context 128"),
        ({"rounds": 0}, "at least 1"),
        ({"seeds": (0,)}, "at least 1"),
        ({"out": "nowhere/rows.json"}, "no directory"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        headtohead.bench_population(**{"seeds": (2,), **QUICK, **given})
