"""Rows of the panels that show probe results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair")

from headtohead.papers.faster_qk.findings import near
from headtohead.report.gather import ArmFacts
from headtohead.report.panels import View
from headtohead.report.panels.attention import means
from headtohead.report.panels.attention.indicators import indicator_rows
from headtohead.report.panels.attention.maps import absent_heads, map_rows
from headtohead.report.panels.attention.skip import skip_rows
from headtohead.report.panels.datasets.tasks import task_rows
from headtohead.report.panels.training.cost import cost_rows
from headtohead.report.panels.verdicts import claims
from headtohead.study.claims import ClaimResult
from headtohead.study.probes import read_found
from headtohead.study.store.manifest import Contest, Manifest
from tests.results import run_result, run_spec

CONTEST = Contest("c", "c@1", "nano", "as_is", "tokens")


def arm(label: str, **probes: Any) -> ArmFacts:
    spec = run_spec(parameters=10, flops_per_token=20.0, cache_bytes_per_token=4)
    results = {seed: run_result(test={"bits_per_byte": 2.0 + seed / 10}) for seed in (1, 2)}
    found = {
        name: {seed: read_found(name, value) for seed, value in seeds.items()}
        for name, seeds in ((name.replace("_", ":", 1), seeds) for name, seeds in probes.items())
    }
    return ArmFacts(label, label, spec, 2, results, [], {}, found)


def test_indicators_have_one_row_per_seed_and_layer_and_name_layers_without_a_map() -> None:
    layers = [
        {"layer": 1, "mechanism": "token_mlp", "none": "no map"},
        {"layer": 2, "mechanism": "standard", "signed": True, "values": {"sink": 0.5}},
    ]
    found = {"windows": 4, "layers": layers, "mean": {}, "log_largest_score": None}
    rows, missing, windows = indicator_rows(
        [arm("a", indicators={1: found, 2: found}), arm("b", indicators={1: {"none": "no map"}}), arm("c")]
    )
    assert [(row["arm"], row["seed"], row["layer"], row["sink"], row["signed"]) for row in rows] == [
        ("a", 1, 2, 0.5, True),
        ("a", 2, 2, 0.5, True),
    ]
    assert rows[0]["entropy"] is None
    assert missing == ["a layer 1 (token_mlp)", "b"]
    assert windows == 4


def test_numbers_of_probes_without_a_chart_are_shown_as_means_over_seeds(tmp_path: Path) -> None:
    copies = {
        seed: {"windows": 4, "tokens": {}, "nats": {}, "copied": 1.0 + seed, "new": None} for seed in (1, 3)
    }
    manifest = Manifest("s", (("a", "a"), ("b", "b")), "a", None, 0.01, (1, 3), ())
    view = View(tmp_path, manifest, CONTEST, [arm("a", copies=copies), arm("b")], [])
    found = means.figure("copies", view)
    assert found is not None
    assert found.table is not None
    assert found.table.head == ("arm", "after a match", "others")
    assert found.table.rows == [("a", "3.000 ± 1.414", "–")]
    assert means.figure("phases", view) is None


def test_maps_are_of_the_first_seed_and_a_large_study_leaves_arms_out() -> None:
    one = {"layer": 2, "head": 1, "why": "most local", "mechanism": "standard", "signed": False}
    found = {"tokens": ["ab", "c"], "group": 2, "scale": 1000, "maps": [one | {"rows": [[1000], [250, 750]]}]}
    maps, tokens, left_out = map_rows([arm("a", maps={2: found, 1: found}), arm("b")])
    assert [(row["arm"], row["seed"], row["layer"], row["w"]) for row in maps] == [
        ("a", 1, "2", [1.0, 0.25, 0.75])
    ]
    assert [row["text"] for row in tokens] == ["ab", "c"]
    assert left_out == []
    huge = found | {"maps": [one | {"rows": [[0]] * 400_000}]}
    maps, _, left_out = map_rows([arm("a", maps={1: huge}), arm("b", maps={1: huge})])
    assert ({row["arm"] for row in maps}, left_out) == ({"a"}, ["b"])
    lacking = found | {"absent": ["9.9"]}
    assert absent_heads([arm("a", maps={1: lacking, 2: lacking}), arm("b", maps={1: found})]) == ["9.9 of a"]


def test_scores_of_several_probes_are_joined() -> None:
    def scores(name: str, accuracy: float) -> dict[str, Any]:
        unknown = dict.fromkeys(
            ("standard_error", "accuracy_by_bytes", "standard_error_by_bytes", "one_answer")
        )
        known = {"task": "x", "accuracy": accuracy, "chance": 0.5, "n": 4, "nats": 1.0, "cut": 0}
        return {"tasks": {name: known | unknown}, "mean": {"accuracy": accuracy, "chance": 0.5}}

    rows = task_rows(
        [
            arm(
                "a",
                tasks_copa={1: scores("copa", 0.25)},
                tasks_rte={1: scores("rte", 0.75)},
            )
        ]
    )
    assert [(row["task"], row["seed"], row["value"]) for row in rows] == [
        ("copa", 1, 0.25),
        ("rte", 1, 0.75),
    ]


def test_skipped_layers_without_a_number_are_left_out() -> None:
    block, attention = ({"bits_per_byte": 2.0, "rise": rise} for rise in (0.5, None))
    part = {"block": block, "attention": attention, "layers": [1]}
    found = {"tokens": 9, "whole": 1.5, "variant": part, "standard": part}
    rows = skip_rows([arm("a", skip={1: found}), arm("b", skip={1: {"none": "x"}})])
    assert [(row["skipped"], row["value"]) for row in rows] == [
        ("variant layers", 0.5),
        ("standard layers", 0.5),
    ]


def test_decode_speed_is_a_cost_and_higher_is_better() -> None:
    found = {"device": "cpu", "cached": True, "context": 8, "tokens_per_second": {}, "bytes": None}
    slow, fast = (found | {"headline": rate} for rate in (5.0, 9.0))
    means, _ = cost_rows([arm("slow", decode={1: slow}), arm("fast", decode={1: fast}), arm("none")])
    assert [row["decode"] for row in means] == [5.0, 9.0, None]
    assert [row["front decode"] for row in means] == [False, True, False]


@pytest.mark.parametrize("content", ["[", "{}", "[]", '[{"id": 3}]', '["x"]', "null"])
def test_an_invalid_claims_file_shows_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "claims.json").write_text(content)
    manifest = Manifest("s", (("a", "a"),), "a", None, 0.005, (1,), ())
    assert claims.figure([View(tmp_path, manifest, CONTEST, [], [])]) is None


def test_decided_claims_come_first(tmp_path: Path) -> None:
    words = dict.fromkeys(("statement", "published", "size", "scale", "reason"), "open")
    rows = [
        {"id": name, "direction": direction, "measured": []} | words
        for name, direction in zip("xyz", ("open", "supported", "contradicted"), strict=True)
    ]
    (tmp_path / "claims.json").write_text(json.dumps(rows))
    manifest = Manifest("s", (("a", "a"),), "a", None, 0.005, (1,), ())
    found = claims.figure([View(tmp_path, manifest, CONTEST, [], [])])
    assert found is not None
    assert found.table is not None
    assert [row[0] for row in found.table.rows] == ["y", "z", "x"]
    assert "1 supported, 1 contradicted, 1 open" in found.words
    assert found.links == []


def test_claims_decided_by_a_toy_show_with_links_to_the_papers_other_pages(tmp_path: Path) -> None:
    words = dict.fromkeys(("id", "statement", "published", "direction", "size", "scale", "reason"), "open")
    (tmp_path / "claims.json").write_text(
        json.dumps([words | {"measured": [near("t1", "x", [1.0], 1, 1).as_dict()]}])
    )
    for page in ("lists/report.html", "toy.html"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text("")
    manifest = Manifest("s", (("a", "a"),), "a", None, 0.005, (1,), ())
    found = claims.figure([View(tmp_path, manifest, CONTEST, [], [])])
    assert found is not None
    assert found.links == [("lists", "lists/report.html"), ("toy", "toy.html")]


def a_claim(*measured: dict[str, Any], **fields: Any) -> ClaimResult:
    words = dict.fromkeys(("statement", "published", "direction", "size", "scale", "reason"), "open")
    return ClaimResult(**({"id": "p.1", "measured": list(measured)} | words | fields))


def effect_row(difference: float, low: float, high: float, *published: float) -> dict[str, Any]:
    row = {"what": "a - b", "unit": "bits_per_byte", "n": 5, "difference": difference}
    return row | {"ci_low": low, "ci_high": high, "published": list(published) or None}


def test_measured_effects_are_drawn_in_percent_of_the_published_ones() -> None:
    chart = claims.forest(
        [
            a_claim(effect_row(-0.01, -0.03, 0.01, -0.02), direction="supported"),
            a_claim(effect_row(9.0, 8.0, 10.0, 1.0) | {"direction": "contradicted"}, id="p.2"),
            a_claim(effect_row(0.5, 0.4, 0.6), id="p.3"),
            a_claim(effect_row(0.5, 0.4, 0.6, 1.0) | {"decides": False}, id="p.4"),
        ]
    )
    assert chart is not None
    definition = chart.to_dict()  # valid Vega-Lite
    rows = definition["datasets"]["means"]
    assert [row["line"] for row in rows] == ["p.1, supported|open|a - b", "p.2, open|open|a - b"]
    assert [rows[0][key] for key in ("mean", "low", "high")] == pytest.approx([0.5, -0.5, 1.5])
    assert [row["words"] for row in rows] == ["50 %", ""]
    assert [row["beyond"] for row in rows] == ["", "900 % (800 % to 1000 %) →"]
    assert [row["direction"] for row in rows] == ["supported", "contradicted"]
    diamonds = [layer for layer in definition["layer"] if layer["mark"].get("shape") == "diamond"]
    assert len(diamonds) == 1
    assert len(diamonds[0]["data"]["values"]) == 2


def test_effects_with_equal_names_stay_apart() -> None:
    row = effect_row(0.01, 0.0, 0.02, 0.02)
    chart = claims.forest([a_claim(row, row, row | {"corpus": "c"})])
    assert chart is not None
    names = [one["line"] for one in chart.datasets["means"]]
    assert names == ["p.1, open|open|a - b", "p.1, open|open|a - b (2)", "p.1, open|open|a - b, c"]


def test_effects_of_a_claim_at_several_places_name_them() -> None:
    row = effect_row(0.01, 0.0, 0.02, 0.02)
    chart = claims.forest([a_claim(row | {"corpus": "c"}, row | {"corpus": "d", "what": "b - a"})])
    assert chart is not None
    names = [one["line"] for one in chart.datasets["means"]]
    assert names == ["p.1, open|open|a - b, c", "p.1, open|open|b - a, d"]


def test_claims_without_published_numbers_have_no_chart() -> None:
    assert claims.forest([a_claim(effect_row(0.01, 0.0, 0.02)), a_claim()]) is None


def test_an_interval_that_continues_beyond_the_axis_ends_in_an_arrow() -> None:
    rows = [
        {"line": name, "low": low, "mean": mean, "high": high, "direction": "open"}
        for name, low, mean, high in (
            ("inside", 0.0, 1.0, 2.0),
            ("both", -9.0, 1.0, 9.0),
            ("dot", 5.0, 6.0, 7.0),
        )
    ]
    heads = claims._beyond(rows, [-2.0, 4.0])
    assert [(head["line"], head["at"], head["dx"]) for head in heads] == [
        ("both", -2.0, -3),
        ("both", 4.0, 3),
    ]
