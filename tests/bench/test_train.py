from __future__ import annotations

import json
from pathlib import Path

import pytest

import headtohead
from headtohead.bench import train as bench_train
from headtohead.bench.harness import Row
from headtohead.bench.peers import missing
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.study.plan.budgets import match_params

QUICK = {"batch": 256, "rounds": 1, "precision": "float32", "device": "cpu"}


def test_arms_share_one_row() -> None:
    document = headtohead.bench_train(("nano",), arms=("standard", "no_attention"), peers=(), **QUICK)  # type: ignore[arg-type]
    (row,) = document["rows"]
    assert set(row["results"]) == {"standard", "no_attention"}
    ours, other = row["results"].values()
    assert ours["first_over_this"] == 1.0
    assert ours["tokens_per_second"] == pytest.approx(256e3 / ours["milliseconds"])
    assert other["first_over_this"] == pytest.approx(other["milliseconds"] / ours["milliseconds"])
    assert row["better_peer"] is None
    assert row["over_better_peer"] is None
    assert ours["mfu"] is None
    assert ours["peak_bytes"] is None
    assert row["gradient_error"] < 1e-5
    assert row["parameters"] == 117_056
    assert {"commit", "torch", "date"} <= row.keys()


@pytest.mark.skipif(bool(missing("transformers")), reason="transformers is not installed")
def test_a_peer_of_the_same_shape_is_timed() -> None:
    (row,) = headtohead.bench_train(("nano",), peers=("transformers",), **QUICK)["rows"]  # type: ignore[arg-type]
    assert row["better_peer"] == "transformers"
    assert row["over_better_peer"] == row["results"]["transformers"]["first_over_this"] > 0


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "litgpt", None)
    document = headtohead.bench_train(("nano",), peers=("litgpt",), **QUICK)  # type: ignore[arg-type]
    assert "litgpt cannot be imported" in document["missing"]["litgpt"]
    assert list(document["rows"][0]["results"]) == ["standard"]


def test_rows_in_a_file_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H2H_COMMIT", "abc")
    out = tmp_path / "rows.json"
    first = headtohead.bench_train(("nano",), peers=(), out=out, **QUICK)  # type: ignore[arg-type]
    again = headtohead.bench_train(("nano",), peers=(), out=out, **QUICK)  # type: ignore[arg-type]
    assert again["rows"] == first["rows"] == json.loads(out.read_text())["rows"]
    other = headtohead.bench_train(("nano",), peers=(), out=out, **QUICK | {"batch": 512})  # type: ignore[arg-type]
    assert [row["tokens_per_step"] for row in other["rows"]] == [256, 512]
    out.write_text('{"benchmark": "decode"}')
    with pytest.raises(UserError, match="not a file of the benchmark 'train'"):
        headtohead.bench_train(("nano",), peers=(), out=out, **QUICK)  # type: ignore[arg-type]


def test_the_last_line_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench train nano --peers --batch 256 --rounds 1 --precision float32 --device cpu --profile"
    with pytest.raises(SystemExit) as end:
        main(words.split())
    out = capsys.readouterr().out
    assert end.value.code == 0
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["profile"]["kinds"]["matrix products"] > 0
    assert "tokens/s" in out
    assert "matrix products" in out


def test_arms_get_the_parameters_of_the_first() -> None:
    arms = ("standard", "sharing:tie=kv")
    as_is, matched = (
        headtohead.bench_train(("nano",), arms=arms, peers=(), shape=shape, **QUICK)["rows"][0]["results"]  # type: ignore[arg-type]
        for shape in ("as_is", "params")
    )
    assert as_is["sharing:tie=kv"]["parameters"] < as_is["standard"]["parameters"]
    assert as_is["sharing:tie=kv"]["ffn"] == as_is["standard"]["ffn"] == matched["standard"]["ffn"] == 176
    assert matched["sharing:tie=kv"]["parameters"] == pytest.approx(117_056, rel=0.005)
    assert matched["sharing:tie=kv"]["ffn"] > 176


def test_equal_parameters_take_the_roundest_width_within_the_tolerance() -> None:
    size, arm = SIZES["60m"], "differential:version=2"
    layers = parse_layout(arm).layers(size.layers)
    target = Decoder.on_meta(size, parse_layout("standard").layers(size.layers)).parameter_count()
    exact = match_params(size, layers, target)
    near = bench_train.rounder(exact, layers, target)
    assert (exact.ffn, near.ffn) == (1875, 1856)
    assert abs(Decoder.on_meta(near, layers).parameter_count() / target - 1) <= 0.005


def test_each_context_is_a_row() -> None:
    rows = headtohead.bench_train(("nano",), peers=(), contexts=(32, 64), **QUICK)["rows"]  # type: ignore[arg-type]
    assert ["context 32" in row["dims"] for row in rows] == [True, False]
    assert "context 64" in rows[1]["dims"]


BROKEN = """
import headtohead
class Broken(headtohead.Mechanism):
    def forward(self, x, frame):
        raise RuntimeError("not today\\nnor tomorrow")
"""


def test_a_failed_arm_is_recorded_and_the_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    broken = f"{tmp_path / 'broken.py'}:Broken"
    words = "bench train nano --peers --batch 256 --rounds 1 --precision float32 --device cpu --arms"
    with pytest.raises(SystemExit):
        main([*words.split(), "standard", broken, "no_attention"])
    out = capsys.readouterr().out
    results = json.loads(out.splitlines()[-1])["rows"][0]["results"]
    assert results[broken] == {"error": "RuntimeError: not today"}
    assert results["no_attention"]["first_over_this"] > 0
    assert "failed: RuntimeError: not today" in out
    (row,) = headtohead.bench_train(("nano",), arms=(broken, "standard"), peers=(), **QUICK)["rows"]  # type: ignore[arg-type]
    assert row["results"]["standard"]["first_over_this"] is None
    assert row["gradient_error"] is None


def test_contenders_are_compiled_in_parallel_first(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Row] = []
    monkeypatch.setattr(bench_train, "compile_in_parallel", lambda found, progress: orders.extend(found))
    monkeypatch.setattr(headtohead.model.decoder.Decoder, "compile_hidden", lambda self: None)
    headtohead.bench_train(
        ("nano",),
        arms=("standard", "coupled"),
        peers=(),
        compile=True,
        warm=True,
        **QUICK,  # type: ignore[arg-type]
    )
    assert [order["name"] for order in orders] == ["standard", "coupled"]
    assert bench_train.first_step(**json.loads(json.dumps(orders[1]))) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sizes": ("nano",), "shape": "parms"}, "params"),
        ({"sizes": ("nano",), "arms": ("standerd",)}, "standard"),
        ({"sizes": ("nanoo",)}, "nano"),
        ({"sizes": ("nano",), "peers": ("litgtp",)}, "litgpt"),
        ({"sizes": ("nano",), "batch": 100}, "multiple of the context 128"),
        ({"sizes": ("nano",), "rounds": 0}, "at least 1"),
        ({"sizes": ("nano",), "arms": ()}, "at least one"),
        ({"sizes": ("nano",), "out": "nowhere/rows.json"}, "no directory"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        headtohead.bench_train(**{**QUICK, "peers": (), **given})  # type: ignore[arg-type]


def test_opposite_flags_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "train", "nano", "--compile", "--no-compile"])
    assert end.value.code == 2
    assert "--compile is given twice" in capsys.readouterr().err
