from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

pytest.importorskip("altair")

from headtohead.evaluation.logged_row import LoggedRow
from headtohead.model.sizes import SIZES
from headtohead.report import gather
from headtohead.report.facts import shown_costs, study_facts
from headtohead.report.gather import ArmFacts, arm_rows, configuration, drawn_labels
from headtohead.report.panels.base import View
from headtohead.report.panels.training import cost, curves, rates
from headtohead.report.panels.training.cost import cost_rows
from headtohead.report.panels.training.curves import curve_rows
from headtohead.report.panels.verdicts import forest, ratios, seeds
from headtohead.report.panels.verdicts.ratios import ratio_rows
from headtohead.report.panels.verdicts.seeds import seed_rows
from headtohead.study.store.manifest import Contest, Entry, Manifest, Rate
from headtohead.study.store.result import Cost
from headtohead.study.store.run_spec import RunSpec
from headtohead.training.circuit_rates import recorded_rules
from headtohead.training.settings import TrainSettings
from tests.report.test_advice import verdict
from tests.results import run_result, run_spec


def facts(label: str, seeds: dict[int, float], ffn: int = 8) -> ArmFacts:
    spec = run_spec(label, size=replace(SIZES["nano"], ffn=ffn))
    results = {
        seed: run_result(
            epochs=0.5,
            test={"bits_per_byte": value, "nats": value, "perplexity": 2.0, "tokens": 50, "bytes": 100},
        )
        for seed, value in seeds.items()
    }
    curves = {
        seed: [LoggedRow(step, tokens=step * 10, nats=value, seconds=step * value) for step in range(1, 201)]
        for seed, value in seeds.items()
    }
    return ArmFacts(
        label,
        label,
        spec,
        len(seeds),
        results,
        [Cost(tokens_per_second=1e5, train_seconds=2.0)],
        curves,
    )


def with_rules(training: dict[str, Any]) -> RunSpec:
    rules, decay = recorded_rules(training)
    return run_spec(
        training=TrainSettings(tokens=1000, batch=10, circuit_lr=rules, circuit_decay=decay)  # type: ignore[arg-type]
    )


def test_curves_are_thinned_and_span_the_seeds() -> None:
    rows = curve_rows([facts("a", {1: 1.0, 2: 3.0})])
    assert 60 <= len(rows) <= 80
    assert rows[-1]["tokens"] == 2000
    # Half a token per byte: bits per byte are half the bits per token.
    for row in rows:
        assert row["low"] < row["mean"] < row["high"]
    assert rows[0]["mean"] == (1.0 + 3.0) / 2 / 0.6931471805599453 * 0.5


def test_each_point_of_a_curve_has_every_axis() -> None:
    last = curve_rows([facts("a", {1: 1.0, 2: 3.0})])[-1]
    assert last["flops"] == 3 * 2000.0 * 2000
    assert last["seconds"] == 200 * (1.0 + 3.0) / 2
    without = facts("a", {1: 1.0})
    without.curves[1] = [structs.replace(row, seconds=None) for row in without.curves[1]]
    assert curve_rows([without])[-1]["seconds"] is None


def test_the_pareto_front() -> None:
    arms = [facts("cheap", {1: 3.0}), facts("good", {1: 1.0}), facts("beaten", {1: 3.5, 2: 3.5})]
    for arm, parameters, rate in zip(arms, (50, 100, 60), (10.0, 20.0, 30.0), strict=True):
        arm.spec, arm.costs[0] = run_spec(parameters=parameters), Cost(tokens_per_second=rate)
    means, seeds = cost_rows(arms)
    assert [row["arm"] for row in means if row["front parameters"]] == ["cheap", "good"]
    # Higher speed is better: the slow arm is dominated by a faster and better one, the fastest by none.
    assert [row["arm"] for row in means if row["front rate"]] == ["good", "beaten"]
    assert not any(row["front cache"] for row in means)
    assert len(seeds) == 4
    assert cost_rows([ArmFacts("a", "a", None, 0, {}, [], {})]) == ([], [])


def test_names_in_the_chart_of_costs_do_not_overlap() -> None:
    means = [{"arm": f"arm {index}", "value": 2.0 + 0.001 * index, "cache": 5} for index in range(5)]
    means.append({"arm": "far", "value": 3.0, "cache": 10})
    seeds = [{"value": row["value"]} for row in means]
    cost.label_rows(means, seeds, {"cache": (0.0, 10.0)})
    placed = [(row.get("side cache"), row.get("dy cache")) for row in means]
    # Two lines on each side of the dot; there is no place for the fifth name.
    assert placed[:5] == [("left", -14), ("left", 14), ("right", -14), ("right", 14), (None, None)]
    assert placed[5] == ("right", -14)


def test_facts_of_several_contests_are_listed_once() -> None:
    contests = [
        Contest(name, name, "nano", shape, "flops") for name in "abcde" for shape in ("as_is", "params")
    ]
    entries = tuple(Entry(f"{index}", "x", 1, contest) for index, contest in enumerate(contests))
    manifest = Manifest("s", (("x", "x"),), "x", None, 0.01, (1, 2), entries)
    specs = [run_spec(training=TrainSettings(tokens=tokens, batch=10)) for tokens in (2000, 1000, 1500)]
    days = [{"dates": "2026-01-02, 2026-01-04"}, {"dates": "2026-01-03"}]
    assert study_facts(manifest, specs, days) == [
        ("dataset", "a; b; c; d and 1 more"),
        ("size", "nano"),
        ("tokens per run", "1k to 2k"),
        ("seeds", "2 paired"),
        ("rules", "equal flops; equal flops and parameters"),
        ("date", "2026-01-02 to 2026-01-04"),
    ]
    assert ("date", "") not in study_facts(manifest, [], [])


def test_costs_are_multiples_of_the_baselines() -> None:
    arms = [facts("base", {1: 1.0}), facts("arm", {1: 1.0}), facts("bare", {1: 1.0})]
    for arm, cache in zip(arms, (512, 128, None), strict=True):
        arm.spec = run_spec(cache_bytes_per_token=cache, flops_per_token=1500.0)
    arms[2].costs.clear()
    words = {label: [cost.words for cost in row] for label, row in shown_costs(arms, "base").items()}
    assert words == {
        "base": ["512", "1.5k", "100k"],
        "arm": ["0.25x", "1.00x", "1.00x"],
        "bare": ["no cache", "1.00x", "–"],
    }


def test_equal_and_differing_settings() -> None:
    equal, different = configuration([facts("a", {1: 1.0}), facts("b", {1: 1.0}, ffn=9)])
    assert ("model: positions", "rope") in equal
    assert {row["name"] for row in different} == {"mechanism", "feed-forward width"}
    assert different[-1]["values"] == {"a": "8", "b": "9"}


def test_rules_are_shown_with_the_decay_and_drawn_over_the_run() -> None:
    ramp = {"tag": "qk", "kind": "ramp", "start": 1.0, "end": 3.0, "until": 1.0}
    arms = [facts("a", {1: 1.0}), facts("b", {1: 1.0}), facts("old", {1: 1.0})]
    arms[1].spec = with_rules({"circuit_lr": [ramp], "circuit_decay": "equal"})
    arms[2].spec = with_rules({"rates": "ffn=0.5"})
    rows = ratio_rows(arms)
    assert {row["arm"] for row in rows} == {"b", "old"}
    assert {row["ratio"] for row in rows if row["arm"] == "old"} == {0.5}
    mine = [(row["tokens"], row["ratio"]) for row in rows if row["arm"] == "b"]
    assert len(mine) == 100, "one point per step"
    assert mine[50] == (500, 2.0)
    _, different = configuration(arms)
    values = next(row["values"] for row in different if row["name"] == "training: circuit_lr")
    assert values["a"] == "–"
    assert values["b"].startswith("qk x1 to x3 over the run (weight decay divided by the ratio")
    assert values["old"].startswith("ffn x0.5 (weight decay not divided")


def test_every_seed_is_shown_and_averages_are_means() -> None:
    arms = [facts("a", {1: 1.0, 2: 2.0})]
    assert [(row["seed"], row["value"]) for row in seed_rows(arms)] == [(1, 1.0), (2, 2.0)]
    row = arm_rows(arms)[0]
    assert row["score"] == 1.5
    assert row["runs"] == "2/2"
    assert row["rate"] == 1e5


def test_an_arm_without_runs_is_a_row_of_dashes() -> None:
    row = arm_rows([ArmFacts("a", "a", None, 0, {}, [], {})])[0]
    assert row["score"] is None
    assert row["parameters"] is None


def test_charts_are_valid_vega_lite() -> None:
    arms = [facts("a", {1: 1.0, 2: 3.0}), facts("b", {1: 1.0, 2: 2.0})]
    arms[0].spec = with_rules({"rates": "ffn=0.5,qk=0"})
    contest = Contest("c", "c@1", "nano", "as_is", "tokens")
    tuning = tuple(Rate("c", "nano", "as_is", "a", lr, 2.0 + lr, lr == 1e-3, False) for lr in (1e-3, 2e-3))
    manifest = Manifest(
        "s",
        (("a", "a"), ("b", "b")),
        "a",
        None,
        0.01,
        (1, 2),
        (),
        tuning=tuning,
        references={"c@1": {"xz": 4.0}},
    )
    view = View(Path(), manifest, contest, arms, [verdict("worse", label="b")])
    for panel in (curves, cost, seeds, rates, ratios, forest):
        figure = panel.figure(view)
        assert figure is not None
        assert figure.chart is not None
        assert figure.chart.to_dict(validate=True) == figure.definition


def test_figures_show_the_baseline_the_primary_arm_and_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ["a", "b", "c", "d", "e"]
    manifest = Manifest("s", tuple((label, label) for label in labels), "c", "e", 0.01, (1,), ())
    means = {"a": 2.0, "b": None, "d": 1.0, "e": 9.0}
    lower = [verdict("undecided", label=label, mean=mean) for label, mean in means.items()]
    higher = [verdict("undecided", label=label, mean=mean, better="higher") for label, mean in means.items()]
    assert drawn_labels(manifest, lower) == labels
    monkeypatch.setattr(gather, "MAX_DRAWN", 3)
    assert drawn_labels(manifest, lower) == ["c", "d", "e"]
    assert drawn_labels(manifest, higher) == ["a", "c", "e"]
    assert drawn_labels(manifest, []) == ["a", "c", "e"], "without verdicts, the first arms of the study"
