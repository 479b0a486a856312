"""A race says first that it compares nothing, has no interval, or is long by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headtohead.api.study import Study
from headtohead.study.config.spec import build_study
from headtohead.study.judge import forecast, notices
from headtohead.study.judge.forecast import quick_seconds
from headtohead.study.judge.notices import budget_notices, design_notices, repetition_notices
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan
from headtohead.study.plan.planner import plan_study

ONE_ARM = "one arm: nothing is compared; a second one in --arms gives verdicts"
ONE_SEED = "one seed: no interval, so every verdict stays undecided; --seeds 3 or more gives intervals"


def plan_of(story: Path, **settings: Any) -> tuple[dict[str, Any], Plan]:
    given = {"arms": ["standard", "diagonal"], "corpus": f"file:{story}"} | settings
    return given, plan_study(build_study(given))


def noticed(story: Path, **settings: Any) -> list[str]:
    given, plan = plan_of(story, **settings)
    return budget_notices(given, plan, list(plan.runs.values()), ExecutionSettings(), workers=2)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"arms": ["standard"], "seeds": 1}, [ONE_ARM, ONE_SEED]),
        ({"arms": ["standard"]}, [ONE_ARM]),
        ({"arms": ["standard", "diagonal"], "seeds": 1}, [ONE_SEED]),
        ({"arms": ["standard", "diagonal"]}, []),
    ],
)
def test_one_arm_and_one_seed_have_a_line_each(settings: dict[str, Any], lines: list[str]) -> None:
    assert design_notices(build_study(settings)) == lines


def test_a_large_default_budget_is_announced_with_the_time(
    story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "_measure", lambda *given, **named: 1e4)
    budget, time = noticed(story, size="1m", seeds=2)
    assert budget == "default budget of size 1m: 4 runs of 4M tokens; --tokens sets another"
    assert time.startswith("forecast: about 12 m ")
    assert time.endswith(" on cpu, 2 runs at the same time")


def test_a_text_that_is_repeated_often_is_announced(story: Path) -> None:
    _, plan = plan_of(story, tokens="50M")
    (line,) = repetition_notices(plan)
    unique = len(next(iter(plan.datasets.values())).corpus.splits["train"].tokens)  # type: ignore[attr-defined]
    assert line.endswith(f"50M tokens repeat it {50_000_000 // 1024 * 1024 / unique:,.0f} times")
    assert repetition_notices(plan_of(story, tokens=2048)[1]) == []
    tasks = build_study({"arms": ["standard"], "tasks": ["recall:train=40"], "tokens": "1M"})
    assert repetition_notices(plan_study(tasks)) == []


def test_a_chosen_or_small_budget_is_not_announced(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "quick_seconds", None)  # nothing is measured
    assert noticed(story, size="1m", tokens="4M") == []
    assert noticed(story, size="nano") == []


def test_a_model_too_large_to_time_is_not_timed(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_measure", None)
    lines = noticed(story, size="60m", tokenizer="bytes", seeds=2)
    assert lines[1] == "forecast: long on cpu; h2h forecast with the same options estimates the time"


def test_the_time_follows_from_the_flops_of_all_runs(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_measure", lambda *given, **named: 1e4)
    _, plan = plan_of(story, tokens=100_352, batch=1024, seeds=2, arms=["standard"])
    runs = list(plan.runs.values())
    one, both = (quick_seconds(plan, runs[:count], ExecutionSettings(), 1) for count in (1, 2))
    assert one is not None
    assert 100_352 / 1e4 < one < 2 * 100_352 / 1e4, "training, and a third of a step per scored token"
    assert both == pytest.approx(2 * one)
    assert quick_seconds(plan, runs, ExecutionSettings(), 2) == pytest.approx(one)


def test_a_race_says_it_first_and_only_with_work_left(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Study(["standard"], corpus=f"file:{story}", tokens=512, batch=256, seeds=1)
    study.run(tmp_path, workers=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [ONE_ARM, ONE_SEED]
    assert lines[2].startswith("forecast: about ")
    assert any("1 of 1 runs to do" in line for line in lines[3:])
    study.run(tmp_path, workers=1)
    assert "forecast" not in capsys.readouterr().out
    study.run(tmp_path, workers=1, quiet=True)
    assert capsys.readouterr().out == ""
