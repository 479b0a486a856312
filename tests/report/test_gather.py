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
from headtohead.report.gather import ArmFacts, arm_rows, configuration, drawn_labels
from headtohead.report.panels.base import View
from headtohead.report.panels.training import cost, curves, rates
from headtohead.report.panels.training.cost import cost_rows
from headtohead.report.panels.training.curves import curve_rows
from headtohead.report.panels.verdicts import forest, ratios, seeds
from headtohead.report.panels.verdicts.ratios import ratio_rows
from headtohead.report.panels.verdicts.seeds import seed_rows
from headtohead.study.store.manifest import Contest, Manifest, Rate
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
