from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import headtohead
from headtohead.bench import growth
from headtohead.bench.slice import Slice, measure_slice
from headtohead.bench.worker_pool import WorkerPool
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder

QUICK: dict[str, Any] = {"contexts": (16, 32), "rounds": 1, "device": "cpu", "longest": 1e9}
BASE = Slice("standard", "60m", 512, 64, 2, 512, "bf16", "cpu", True, 3)


def row(arm: str, context: int, seconds: float) -> dict[str, Any]:
    """Return a measured row on the context axis."""
    one = Slice(arm, "60m", context, 32_768 // context, 2, 512, "bf16", "cpu", True, 3)
    facts = growth.facts_of(one, BASE) | one.declared
    return facts | {"seconds": seconds, "peak_bytes": 10**9}


def test_rows_hold_measured_and_declared_values(tmp_path: Path) -> None:
    document = headtohead.bench_growth(("standard", "no_attention"), out=tmp_path / "rows.json", **QUICK)
    rows = document["rows"]
    # Two contexts; off the base one more batch (a quarter is not whole), two depths and two widths.
    assert len(rows) == 2 * (2 + 1 + 2 + 2)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert all(found["seconds"] > 0 for found in rows)
    first = rows[0]
    assert (first["context"], first["batch"], first["layers"], first["width"]) == (16, 2, 2, 64)
    one = Slice("standard", "nano", 16, 2, 2, 64, "float32", "cpu", False, 1)
    model = Decoder.on_meta(one.shape, one.mechanisms)
    assert first["flops"] == 3 * 32 * model.flops(16, 2).causal
    assert first["parameters"] == model.parameter_count()
    assert {found["axis"] for found in document["growth"]} == set(growth.AXES)
    assert document["left"] == 0


def test_tokens_per_step_are_equal_along_the_context_axis() -> None:
    shapes = growth.slices(BASE, ("standard", "coupled"), ("context",), (512, 2048, 8192, 32_768))
    assert [(one.arm, one.context, one.batch) for one in shapes[:4]] == [
        ("standard", 512, 64),
        ("standard", 2048, 16),
        ("standard", 8192, 4),
        ("standard", 32_768, 1),
    ]
    assert [one.arm for one in shapes[4:]] == ["coupled"] * 4
    every = growth.slices(BASE, ("standard",), growth.AXES, (512, 2048))
    assert len(every) == len(set(every)) == 2 + 2 + 2 + 2
    assert {one.layers for one in every} == {1, 2, 4}
    assert {one.shape.heads for one in every} == {4, 8, 16}


def test_stored_rows_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H2H_COMMIT", "abc")
    out, given = tmp_path / "rows.json", QUICK | {"axes": ("context",)}
    first = headtohead.bench_growth(("standard",), out=out, **given)
    monkeypatch.setattr(Slice, "measure", lambda self: pytest.fail("measured again"))
    assert headtohead.bench_growth(("standard",), out=out, **given)["rows"] == first["rows"]


def test_a_time_limit_keeps_the_measured_rows_and_the_same_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = QUICK | {"axes": ("context",), "out": tmp_path / "rows.json"}
    clock = iter([0.0, 1.0, 99.0])
    with monkeypatch.context() as patch:
        patch.setattr(growth.time, "monotonic", lambda: next(clock))
        document = headtohead.bench_growth(("standard",), seconds=10.0, **given)
    assert (len(document["rows"]), document["left"]) == (1, 1)
    assert [found["context"] for found in headtohead.bench_growth(("standard",), **given)["rows"]] == [16, 32]


def test_a_row_that_would_take_too_long_is_skipped_with_the_reason() -> None:
    document = headtohead.bench_growth(("standard",), axes=("context",), **(QUICK | {"longest": 1e-9}))
    measured, skipped = document["rows"]
    assert measured["seconds"] > 0
    assert "more than 1e-09 s" in skipped["skipped"]
    (found,) = document["growth"]
    assert found["slopes"] == []
    assert found["words"].startswith("32 skipped: a step would take about")


def test_the_forecast_takes_the_steeper_of_flops_and_slope() -> None:
    next_one = Slice("no_attention", "60m", 8192, 4, 2, 512, "bf16", "cpu", True, 3)
    assert growth.forecast_seconds(next_one, BASE, []) == 0.0
    one = [row("no_attention", 512, 1.0)]
    assert growth.forecast_seconds(next_one, BASE, one) == pytest.approx(1.0)
    assert growth.forecast_seconds(next_one, BASE, [*one, row("no_attention", 2048, 4.0)]) == pytest.approx(
        16.0
    )


def test_an_arm_that_fails_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import headtohead\nclass Broken(headtohead.Mechanism):\n    def forward(self, x, frame):\n"
        "        raise RuntimeError('not today')\n    def flops(self, context, batch=1, mode='train'):\n"
        "        return headtohead.Flops(1.0, 1.0)\n"
    )
    arm = f"{tmp_path / 'broken.py'}:Broken"
    out = tmp_path / "rows.json"
    document = headtohead.bench_growth((arm, "no_attention"), axes=("context",), out=out, **QUICK)
    assert [found.get("error") for found in document["rows"]] == ["RuntimeError: not today"] * 2 + [None] * 2
    assert "16 failed: RuntimeError: not today" in document["growth"][0]["words"]
    # Failed rows are retried; measured ones are not.
    dates = [found["date"] for found in document["rows"]]
    again = headtohead.bench_growth((arm, "no_attention"), axes=("context",), out=out, **QUICK)
    assert [one["date"] == date for one, date in zip(again["rows"], dates, strict=True)][2:] == [True, True]
    assert sum("error" in row for row in json.loads(out.read_text())["rows"]) == 2
    (tmp_path / "broken.py").write_text((tmp_path / "broken.py").read_text().replace("raise", "return x  #"))
    repaired = headtohead.bench_growth((arm, "no_attention"), axes=("context",), out=out, **QUICK)
    assert [found.get("error") for found in repaired["rows"]] == [None] * 4


def test_a_shape_that_a_layout_cannot_fill_is_left_out_with_the_reason() -> None:
    document = headtohead.bench_growth(("(no_attention standard)",), axes=("layers",), **QUICK)
    assert [found["layers"] for found in document["rows"]] == [2, 4]
    (words,) = document["left_out"]
    assert "1 layers of 64" in words
    assert "cannot fill 1" in words


@pytest.mark.parametrize(
    ("exponent", "memory", "words"),
    [
        (0.0, 1.0, "as declared"),
        (1.0, 1.0, "grows faster than declared: possible defect"),
        (-0.5, 1.0, "grows less than declared: launch or memory bound"),
        (0.0, 4.0, "as declared; memory per token grows: a (time, time) tensor is stored"),
    ],
)
def test_slopes_are_described(exponent: float, memory: float, words: str) -> None:
    rows = [row("no_attention", context, (context / 512) ** exponent) for context in (512, 2048)]
    rows[1]["peak_bytes"] *= memory
    (found,) = growth.growth(rows)
    (slope,) = found["slopes"]
    assert slope["time"] == pytest.approx(exponent)
    assert slope["flops"] == 0.0
    assert slope["memory"] == pytest.approx(math.log(memory) / math.log(4))
    assert found["words"] == words


def test_attention_declares_the_flops_of_its_keys() -> None:
    low, high = (row("standard", context, 1.0)["flops"] for context in (8192, 32_768))
    per_layer = 2 * (4 * 512**2 + 3 * 512 * 2048)
    counted = [2 * (per_layer + 2 * 512 * (keys + 1)) + 2 * 256 * 512 for keys in (8192, 32_768)]
    assert high / low == pytest.approx(counted[1] / counted[0], rel=1e-3)


def test_one_compiled_block_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    graphs: list[int] = []
    plain = torch.compile

    def backend(module: torch.fx.GraphModule, given: object) -> object:
        graphs.append(1)
        return module.forward

    monkeypatch.setattr(torch, "compile", lambda work, dynamic: plain(work, dynamic=dynamic, backend=backend))
    for layers in (2, 4):
        one = Slice("standard", "nano", 16, 2, layers, 64, "float32", "cpu", True, 1)
        assert one.warm() == ""
    assert len(graphs) == 1
    assert Slice("token_mlp", "nano", 16, 2, 2, 64, "float32", "cpu", True, 1).warm() == ""
    assert len(graphs) == 2


@pytest.mark.slow
def test_a_slice_is_measured_by_the_process_that_compiled_it() -> None:
    one, other = (
        Slice(arm, "nano", 16, 2, 2, 64, "float32", "cpu", False, 1) for arm in ("standard", "no_attention")
    )
    with closing(WorkerPool(1)) as pool:
        owners = growth.compile_slices(pool, [one, other], lambda message, share: None)
        assert owners == {one: 0, other: 0}
        (found,) = pool.ask(measure_slice, {0: {"facts": asdict(one)}})
        assert found["seconds"] > 0
        pool.workers[0].process.kill()
        failed = growth.compile_slices(pool, [one, other], lambda message, share: None)
        assert set(failed.values()) <= {
            "worker process was killed (signal 9), often because memory ran out during compilation",
            "no worker process was left during compilation",
        }


@pytest.mark.slow
def test_the_last_line_is_one_document_and_the_picture_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "bench growth --arms standard no_attention --context 16 32 --rounds 1 --device cpu --for 5m --picture"
    )
    with pytest.raises(SystemExit) as end:
        main([*words.split(), str(tmp_path / "growth.svg")])
    out = capsys.readouterr().out
    assert end.value.code == 0
    document = json.loads(out.splitlines()[-1])
    assert document["benchmark"] == "growth"
    assert "slope of time" in out
    picture = (tmp_path / "growth.svg").read_text()
    assert "no_attention" in picture
    assert "32 tokens per step" in picture


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"axes": ("contxt",)}, "context"),
        ({"arms": ("standerd",)}, "standard"),
        ({"size": "nanoo"}, "nano"),
        ({"contexts": (16, 24)}, "not a multiple of the context 16"),
        ({"rounds": 0}, "above 0"),
        ({"out": "nowhere/rows.json"}, "no directory"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        headtohead.bench_growth(**{"arms": ("standard",), **QUICK, **given})


def test_a_skipped_row_is_considered_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = QUICK | {"axes": ("context",), "out": tmp_path / "rows.json"}
    first = headtohead.bench_growth(("standard",), **(settings | {"longest": 1e-9}))["rows"]
    assert ["skipped" in found for found in first] == [False, True]
    again = headtohead.bench_growth(("standard",), **settings)["rows"]
    assert again[0] == first[0]
    assert again[1]["seconds"] > 0
    assert "skipped" not in again[1]
