from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import headtohead as h2h
from headtohead import Study, UserError, open_study
from headtohead.study.judge import forecast as forecast_module
from headtohead.study.judge.forecast import Forecast, _seeds_for, seen_spread
from headtohead.study.judge.statistics import detectable_difference

SMALL: dict[str, Any] = {"tokens": 2560, "batch": 256, "seeds": 3, "lr": 5e-3}


def study(story: Path, **values: Any) -> Study:
    return Study(**({"arms": ["standard", "sharing:tie=kv"], "corpus": f"file:{story}"} | SMALL | values))


def forecast(given: Study, out: Path | None = None, **values: Any) -> Forecast:
    return h2h.forecast(given, out, **({"device": "cpu", "workers": 1, "quiet": True} | values))


@pytest.fixture(scope="module")
def raced(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast") / "out"
    study(story).run(folder, workers=1, quiet=True)
    return folder


def test_a_forecast_counts_the_cost_of_a_study_and_runs_nothing(story: Path, tmp_path: Path) -> None:
    found = forecast(study(story, shape=["as_is", "params"]), tmp_path / "none", spread=0.01)
    # The baseline is the same under both rules and runs once.
    assert (found.runs, found.done) == (9, 0)
    assert found.tokens == 9 * 2560
    assert found.flops == pytest.approx(sum(arm.flops for arm in found.arms))
    cost = h2h.cost("standard", batch=1)
    assert found.arms[0].flops == pytest.approx(3 * cost["flops_per_token"]["causal"] * 3 * 2560)
    assert all(arm.source == "measured" and arm.tokens_per_second > 0 for arm in found.arms)
    assert found.seconds == pytest.approx(sum(arm.seconds for arm in found.arms))
    assert found.disk_bytes > 9 * 4 * cost["parameters"] * 0.9
    assert not (tmp_path / "none").exists()


def test_the_detectable_difference_follows_from_spread_seeds_and_arms(story: Path) -> None:
    three = ["standard", "sharing:tie=kv", "sharing:tie=qk"]
    found = forecast(study(story, arms=three, seeds=4), spread=0.02)
    rows = {row.seeds: row for row in found.detectable}
    assert sorted(rows) == [3, 4, 5, 8, 12, 20]
    assert rows[5].alone == detectable_difference(0.02, 5)
    assert rows[5].holm == detectable_difference(0.02, 5, arms=2)
    assert rows[5].holm > rows[5].alone > rows[8].alone  # type: ignore[operator]
    assert found.spread_source == "given"
    unknown = forecast(study(story, arms=three, seeds=4))
    assert unknown.spread is None
    assert unknown.seeds_for_margin is None
    assert unknown.detectable[0].alone == detectable_difference(1.0, 3), "in units of the spread"


def test_finished_runs_give_speed_and_spread_and_are_not_counted_again(raced: Path, story: Path) -> None:
    found = forecast(study(story, seeds=5), raced)
    assert (found.runs, found.done) == (10, 6)
    assert {arm.source for arm in found.arms} == {"seen"}
    row = open_study(raced).verdicts[0]
    differences = [a - b for a, b in zip(row.values, row.baseline_values, strict=True)]
    mean = sum(differences) / 3
    assert found.spread == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in differences) / 2))
    assert "seen in" in found.spread_source
    longer = forecast(study(story, tokens=25600), raced)
    assert longer.done == 0
    assert {arm.source for arm in longer.arms} == {"seen"}, "the speed of a pilot applies to a longer study"
    assert longer.seconds > found.seconds
    done = forecast(study(story), raced)
    assert (done.done, done.seconds, done.arms) == (6, 0.0, [])


def test_the_number_of_seeds_for_a_margin_is_minimal() -> None:
    count = _seeds_for(0.005, 0.01)
    assert count is not None
    assert detectable_difference(0.01, count) <= 0.005 < detectable_difference(0.01, count - 1)  # type: ignore[operator]
    assert _seeds_for(0.005, 1e-9) == 2
    assert _seeds_for(0.005, 10.0) is None
    assert _seeds_for(0.0, 0.01) is None


def test_an_invalid_spread_is_rejected_and_no_pairs_give_none(story: Path) -> None:
    for spread in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="above 0"):
            forecast(study(story), spread=spread)
    assert seen_spread([]) is None


def test_branches_share_their_trunk_and_contexts_do_not(story: Path) -> None:
    one = {key: value for key, value in SMALL.items() if key != "tokens"} | {"seeds": 2}
    arms = ["standard", "sharing:tie=kv"]
    given = Study(arms=arms, corpus=f"file:{story}", branches=[2560, 5120], context=[64, 128], **one)
    found = forecast(given, spread=0.01)
    # For each arm, seed and context: a trunk of 4096 tokens, and decays of 512 and 1024.
    assert found.runs == 8 * 3
    assert found.tokens == 8 * (4096 + 512 + 1024)
    trunks = [arm for arm in found.arms if arm.label.endswith(", trunk")]
    assert sum(arm.tokens for arm in trunks) == 8 * 4096
    assert {arm.contest for arm in trunks} == {
        f"{story.name}, nano, context {context}, shape as_is, length tokens" for context in (64, 128)
    }


def test_equal_time_is_forecast_from_steps_timed_now_and_not_stored(story: Path, raced: Path) -> None:
    before = (raced / "study.lock.json").read_bytes()
    found = forecast(study(story, length=["tokens", "time"]), raced, spread=0.01)
    # An arm with the baseline's step time has the baseline's number of steps, and its runs are already done.
    assert found.done == 6
    assert found.runs in (6, 9)
    assert (raced / "study.lock.json").read_bytes() == before


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm trains 1,000 tokens per second, and nothing is scored."""
    monkeypatch.setattr(forecast_module, "_measure", lambda *given: 1000.0)
    monkeypatch.setattr("headtohead.study.plan.dataset.CorpusDataset.scored_tokens", lambda dataset: 0)


@pytest.mark.usefixtures("measured")
def test_workers_take_one_run_after_another(story: Path) -> None:
    given = study(story, seeds=2)  # four runs of 2.56 s
    times = [forecast(given, spread=0.01, workers=count).seconds for count in (1, 2, 3, 4, 9)]
    assert times == pytest.approx([4 * 2.56, 2 * 2.56, 2 * 2.56, 2.56, 2.56])


@pytest.mark.usefixtures("measured")
def test_a_cluster_is_forecast_by_its_slots(story: Path) -> None:
    where = {"on": "ray", "nodes": 4, "gpus_per_node": 2, "workers": 0, "spread": 0.01}
    found = forecast(study(story, seeds=5), **where)  # ten runs of 2.56 s on eight GPUs
    assert found.cluster is not None
    assert (found.workers, found.cluster.slots, found.cluster.kind) == (8, 8, "GPU")
    assert found.seconds == found.cluster.seconds == pytest.approx(2 * 2.56)
    assert found.cluster.device_hours == pytest.approx(10 * 2.56 / 3600)
    assert found.cluster.utilization == pytest.approx(10 / 16)
    assert found.cluster.enough_nodes == 3, "five slots would do, which three nodes have"
    assert [step.name for step in found.cluster.critical_path] == ["standard, seed 1"]
    assert found.cluster.measured_on.startswith("cpu")
    wide = forecast(study(story, seeds=5), **where | {"nodes": 100})
    assert wide.seconds == pytest.approx(2.56), "the longest run bounds"


@pytest.mark.usefixtures("measured")
def test_a_cluster_waits_for_trunks_and_for_the_tuning(story: Path) -> None:
    where = {"on": "ray", "nodes": 50, "cpus_per_node": 1, "workers": 0, "spread": 0.01}
    grown = forecast(study(story, tokens=5120, branches=[2560, 5120], seeds=2), **where)
    assert grown.seconds == pytest.approx(4.096 + 1.024), "the trunk, then the decay of the longer branch"
    assert grown.cluster is not None
    assert [step.name for step in grown.cluster.critical_path] == [
        "standard, trunk, seed 1",
        "standard, seed 1",
    ]
    tune = {"lr": [1e-3, 2e-3, 4e-3], "tokens": 1280}
    values = {key: value for key, value in SMALL.items() if key != "lr"}
    tuned = forecast(
        Study(arms=["standard", "diagonal"], corpus=f"file:{story}", tune=tune, **values), **where
    )
    assert tuned.seconds == pytest.approx(1.28 + 2.56)
    assert tuned.cluster is not None
    assert [step.seconds for step in tuned.cluster.critical_path] == pytest.approx([1.28, 2.56])


@pytest.mark.usefixtures("measured")
def test_populations_are_units_and_leave_no_slot_without_one(
    story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headtohead.study.plan.population.PopulationPolicy.__call__", lambda *given: True)
    given = study(story, seeds=4)
    one, two, four = (
        forecast(given, on="ray", nodes=nodes, cpus_per_node=1, workers=0, spread=0.01) for nodes in (1, 2, 4)
    )
    assert [found.arms[0].rows for found in (one, two, four)] == [4, 4, 2]
    assert [found.seconds for found in (one, two, four)] == pytest.approx([8 * 2.56, 4 * 2.56, 2 * 2.56])
    assert two.cluster is not None
    assert [step.name for step in two.cluster.critical_path] == ["standard, seed 1 and 3 rows more"]


def test_nodes_are_like_this_machine_unless_given(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_module, "_measure", lambda *given: 1000.0)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    found = forecast(study(story), on="ray", nodes=2, threads=3, workers=0, spread=0.01)
    assert found.cluster is not None
    assert (found.cluster.devices, found.cluster.slots, found.cluster.kind) == (12, 4, "CPU")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 8}, "nodes: of a cluster only; add --on ray"),
        ({"gpus_per_node": 8, "cpus_per_run": 1}, "gpus_per_node, cpus_per_run: of a cluster only"),
        ({"on": "rey"}, "did you mean 'ray'"),
        ({"on": "ray", "workers": 3}, "workers=3 counts processes of this machine"),
        ({"on": "ray", "gpus_per_run": 1}, "gpus_per_run needs gpus_per_node"),
        ({"on": "ray", "gpus_per_node": 1, "gpus_per_run": 2}, "is more than a node has"),
    ],
)
def test_a_wrong_cluster_is_one_error_before_anything_is_measured(
    story: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(forecast_module, "_measure", None)
    with pytest.raises(UserError, match=message):
        forecast(study(story), **({"workers": 0} | values))
