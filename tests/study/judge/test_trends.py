"""Trends: lines through gaps, the coverage of their intervals, and their sentences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headtohead import Study, open_study
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.trends import FACTOR, Trend, fit_line
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.plan.planner import plan_study
from headtohead.study.store.manifest import Contest, Entry, Manifest
from tests.results import run_result

STUDIES = 4000

pytestmark = pytest.mark.page


def made(
    gaps: dict[str, Any],
    *,
    contests: list[tuple[Contest, int, int]],
    seeds: int = 5,
    noise: float = 1e-3,
    level: float = 0.0,
    diverged: str = "",
) -> list[Trend]:
    """Return the trends of a synthetic study: per arm, its gap as a function of (parameters, tokens, context).

    `level` separates the seeds' own lines, `diverged` names a run.
    """
    entries, results = [], {}
    draw = np.random.default_rng(3)
    for index, (contest, parameters, tokens) in enumerate(contests):
        for label in ("standard", *gaps):
            for seed in range(1, seeds + 1):
                run = f"{index}/{label}/{seed}"
                entries.append(Entry(run, label, seed, contest))
                value = 2.0 + 0.1 * seed
                if label != "standard":
                    value += (
                        gaps[label](parameters, tokens, int(contest.context or 1)) + noise * draw.normal()
                    )
                    value += level * (seed - (seeds + 1) / 2)
                test = {"bits_per_byte": value}
                results[run] = run_result(parameters=parameters, tokens=tokens, test=test)
    if diverged:
        results[diverged] = run_result("diverged")
    labels = ("standard", *gaps)
    arms = tuple((label, label) for label in labels)
    manifest = Manifest("x", arms, "standard", None, 0.005, tuple(range(1, seeds + 1)), tuple(entries))
    return Analysis(manifest, study_verdicts(manifest, results), results).trends


def sized(*counts: int) -> list[tuple[Contest, int, int]]:
    return [(Contest("c", "c", f"s{count}", "as_is", "tokens"), count, 10**6) for count in counts]


def test_a_line_is_the_mean_of_the_seeds_own_lines() -> None:
    values = [1.0, 2.0, 8.0, 64.0]
    gaps = np.random.default_rng(1).normal(size=(4, 4))
    line = fit_line(values, gaps.tolist())
    fits = [np.polyfit(np.log2(values), row, 1) for row in gaps]
    assert line.slope.difference == pytest.approx(np.mean([fit[0] for fit in fits]))
    assert line.within[0].gap == pytest.approx(np.mean([np.polyval(fit, 0.0) for fit in fits]))
    assert line.within[-1].value == pytest.approx(64)
    assert line.beyond[-1].value == pytest.approx(64 * FACTOR)
    assert line.beyond[-1].gap == pytest.approx(np.mean([np.polyval(fit, math.log2(256)) for fit in fits]))


def test_intervals_of_one_seed_are_none() -> None:
    line = fit_line([1.0, 2.0, 4.0], [[0.1, 0.2, 0.4]])
    assert line.slope.difference == pytest.approx(0.15)
    assert line.slope.ci_low is None
    assert {reach.low for reach in [*line.within, *line.beyond]} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["independent", "branches of one trunk"])
@pytest.mark.parametrize(
    ("seeds", "values"),
    [(3, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((8, 4), (5, 3), (5, 12)))],
)
def test_intervals_have_the_stated_coverage(seeds: int, values: int, shared: bool) -> None:
    draw = np.random.default_rng(100 * seeds + values + shared)
    x = np.arange(values, dtype=float)
    at = x[-1] + math.log2(FACTOR)
    slope = band = pair = 0
    for _ in range(STUDIES):
        # Smaller models have a larger spread; branches share a level and a slope of their seed.
        noise = draw.normal(size=(seeds, values)) * (1.0 if shared else np.linspace(1.5, 1.0, values))
        level, tilt = (draw.normal(size=(seeds + 1, 1)) * share * shared for share in (1.0, 0.3))
        line = fit_line((2**x).tolist(), (0.4 - 0.2 * x + level[:-1] + tilt[:-1] * x + noise).tolist(), 2)
        further = 0.4 - 0.2 * at + level[-1, 0] + tilt[-1, 0] * at + draw.normal()
        slope += _holds(line.slope.ci_low, line.slope.ci_high, -0.2)
        band += _holds(line.within[-1].low, line.within[-1].high, 0.4 - 0.2 * x[-1])
        pair += _holds(line.beyond[-1].low, line.beyond[-1].high, further)
    error = 4 * math.sqrt(0.95 * 0.05 / STUDIES)
    assert slope / STUDIES == pytest.approx(0.95, abs=error)
    assert band / STUDIES == pytest.approx(0.95, abs=error)
    assert pair / STUDIES > 0.95 - error


def _holds(low: float | None, high: float | None, value: float) -> bool:
    assert low is not None
    assert high is not None
    return low <= value <= high


def test_a_trend_is_stated_with_its_direction() -> None:
    gaps = {
        "shrinking": lambda n, t, c: 0.10 - 0.01 * math.log2(n / 1e5),
        "growing": lambda n, t, c: -0.02 - 0.01 * math.log2(n / 1e5),
        "turning": lambda n, t, c: 0.02 - 0.01 * math.log2(n / 1e5),
        "steady": lambda n, t, c: 0.05,
    }
    found = {trend.label: trend for trend in made(gaps, contests=sized(10**5, 8 * 10**5, 64 * 10**5))}
    assert {label: trend.decision for label, trend in found.items()} == {
        "shrinking": "shrinks",
        "growing": "grows",
        "turning": "turns",
        "steady": "undecided",
    }
    assert "its disadvantage shrinks with size, slope -0.0" in found["shrinking"].words
    assert "its advantage grows with size" in found["growing"].words
    assert "changes from worse to better with size" in found["turning"].words
    assert "no trend with size can be established" in found["steady"].words
    assert "one further pair of runs at 25.6M parameters" in found["steady"].words
    line = found["shrinking"].line
    assert line is not None
    assert line.slope.difference == pytest.approx(-0.01, abs=5e-4)


def test_no_arm_is_ahead_if_the_sign_is_open_at_both_ends() -> None:
    gaps = {
        "turning": lambda n, t, c: 0.03 - 0.01 * math.log2(n / 1e5),
        "rising": lambda n, t, c: 0.01 * math.log2(n / 1e5),
    }
    sizes = sized(10**5, 8 * 10**5, 64 * 10**5)
    found = {trend.label: trend for trend in made(gaps, contests=sizes, level=0.2)}
    assert {label: trend.decision for label, trend in found.items()} == {
        "turning": "falls",
        "rising": "rises",
    }
    assert (
        "its gap falls with size; which arm is ahead cannot be established, slope -0.0"
        in found["turning"].words
    )


def test_runs_that_diverged_leave_a_trend_undecided() -> None:
    gaps = {"growing": lambda n, t, c: -0.02 - 0.01 * math.log2(n / 1e5)}
    sizes = sized(10**5, 8 * 10**5, 64 * 10**5)
    (whole,), (partial,) = (made(gaps, contests=sizes, diverged=run) for run in ("", "0/growing/1"))
    assert (whole.decision, partial.decision) == ("grows", "undecided")
    assert "no trend with size can be established" in partial.words


def test_fewer_than_three_values_give_points_and_no_line() -> None:
    (trend,) = made({"a": lambda n, t, c: 0.1}, contests=sized(10**5, 10**6))
    assert trend.line is None
    assert [point.value for point in trend.points] == [10**5, 10**6]
    assert trend.words == "a against standard: 2 values of size; a trend needs 3 or more."
    assert made({"a": lambda n, t, c: 0.1}, contests=sized(10**5)) == []


def test_each_axis_has_its_own_trends_with_the_rest_fixed() -> None:
    contests = [
        (Contest("c", "c", size, "as_is", "tokens", context, branch), count, tokens)
        for size, count in (("s", 10**5), ("m", 10**6))
        for context in ("128", "256", "512")
        for branch, tokens in (("4M", 4 * 10**6), ("1M", 10**6))
    ]
    found = made({"a": lambda n, t, c: 0.01 * math.log2(c)}, contests=contests)
    assert [trend.over for trend in found] == ["size"] * 6 + ["tokens_per_parameter"] * 6 + ["context"] * 4
    context = [trend for trend in found if trend.over == "context"]
    assert all(trend.decision == "grows" for trend in context)
    assert [trend.place["branch"] for trend in context] == ["4M", "1M", "4M", "1M"]
    assert all("context" not in trend.place for trend in context)
    tokens = next(trend for trend in found if trend.over == "tokens_per_parameter")
    assert [point.value for point in tokens.points] == [10.0, 40.0]
    assert [point.name for point in tokens.points] == ["1M", "4M"]


def test_seeds_without_a_gap_at_every_value_are_left_out_with_a_note() -> None:
    contests = sized(10**5, 10**6, 10**7)
    entries, results = [], {}
    for index, (contest, count, tokens) in enumerate(contests):
        for label in ("standard", "a"):
            for seed in (1, 2, 3):
                run = f"{index}/{label}/{seed}"
                entries.append(Entry(run, label, seed, contest))
                test = {"bits_per_byte": 2.0 + 0.01 * seed * (label == "a")}
                results[run] = run_result(parameters=count, tokens=tokens, test=test)
    results["1/a/2"] = run_result("diverged")
    manifest = Manifest(
        "x", (("standard",) * 2, ("a",) * 2), "standard", None, 0.0, (1, 2, 3), tuple(entries)
    )
    (trend,) = Analysis(manifest, study_verdicts(manifest, results), results).trends
    assert trend.n == 2
    assert [len(point.seeds) for point in trend.points] == [3, 2, 3]
    assert "the line is fitted to the seeds that have a gap at every value" in trend.notes
    assert "1 of its runs diverged; the others are not representative" in trend.notes


@pytest.fixture(scope="module")
def raced(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a study over three contexts and two branches."""
    folder = tmp_path_factory.mktemp("trends") / "raced"
    arms = ["standard", {"arm": "sharing:tie=kv", "name": "<script>x</script>"}]
    Study(
        arms, corpus=f"file:{story}", context=[32, 64, 128], branches=["1280", "2560"], batch=256, seeds=2
    ).run(folder, workers=1, quiet=True)
    return folder


def test_a_study_writes_and_shows_its_trends(raced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads((raced / "trends.json").read_text())
    assert [row["over"] for row in rows] == ["tokens_per_parameter"] * 3 + ["context"] * 2
    assert [point["value"] for point in rows[-1]["points"]] == [32, 64, 128]
    assert rows[-1]["line"]["slope"]["n"] == 2
    assert rows[0]["line"] is None
    assert all(row["words"] for row in rows)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(raced)])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "with context" in shown
    assert "2 values of tokens per parameter; a trend needs 3 or more" in shown


def test_the_page_and_the_pictures_show_the_gaps(raced: Path) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    from headtohead.report.figures import PAPER, as_svg, draw_study, variants
    from headtohead.report.gather import gather
    from headtohead.report.panels import View

    page = (raced / "report.html").read_text()
    assert "Gap to the baseline against context." in page
    assert "Gap to the baseline against tokens per parameter." in page
    assert "Gap to the baseline against size." not in page
    assert "<script>x</script>" not in page
    result = open_study(raced)
    views = [
        View(
            raced,
            result.manifest,
            contest,
            gather(raced, result.manifest, contest, result.results, []),
            [row for row in result.verdicts if row.of(contest)],
            result.analysis,
        )
        for contest in result.manifest.contests()
    ]
    drawn = draw_study(views)
    assert list(drawn) == ["gap-tokens-per-parameter", "gap-context"]
    charts = {name: variants(name, figure.definition) for name, figure in drawn.items() if figure.definition}
    # Two branches and three contexts: one picture per group of contests.
    assert [len(found) for found in charts.values()] == [3, 2]
    svg = as_svg(charts["gap-context"]["gap-context-2"], PAPER)
    assert "context, in tokens" in svg
    assert svg.count("stroke-dasharray") >= 1


def test_contexts_are_contests_of_equal_tokens_per_step(story: Path) -> None:
    values: dict[str, Any] = {"arms": ["standard", "diagonal"], "corpus": f"file:{story}", "tokens": 2560}
    plan = plan_study(Study(**values, context=[64, 128], batch=256, seeds=1).spec)
    assert [contest.context for contest in plan.manifest.contests()] == ["64", "128"]
    assert {run.size.context for run in plan.compared()} == {64, 128}
    assert {run.training.steps(run.size.context) for run in plan.compared()} == {10}
    assert "context 64" in plan.entries[0].contest.title
    one = plan_study(Study(**values, context=[64], batch=256, seeds=1).spec)
    alone = plan_study(Study(**values, context=64, batch=256, seeds=1).spec)
    assert (
        [run.id for run in one.compared()]
        == [run.id for run in alone.compared()]
        == [run.id for run in plan.compared()[:2]]
    )
    assert one.entries[0].contest.context == ""
    with pytest.raises(UserError, match="not a multiple of the context 96"):
        Study(**values, context=[64, 96], batch=256)
    with pytest.raises(UserError, match="each above 0"):
        Study(**values, context=[64, 0], batch=256)


@pytest.mark.slow
def test_each_context_is_tuned_separately(story: Path, tmp_path: Path) -> None:
    result = Study(
        arms=["standard", "diagonal"],
        corpus=f"file:{story}",
        context=[32, 64],
        tokens=1024,
        batch=256,
        seeds=1,
        tune={"lr": [1e-4, 1e-2, 1.0], "tokens": 512},
    ).run(tmp_path / "tuned", workers=1, quiet=True)
    chosen = {(row.context, row.label) for row in result.manifest.tuning if row.chosen}
    assert chosen == {(context, label) for context in ("32", "64") for label in ("standard", "diagonal")}
    assert open_study(tmp_path / "tuned").manifest.tuning == result.manifest.tuning


def test_prediction_intervals_do_not_narrow_outwards() -> None:
    # The lines of the two seeds cross beyond the last value.
    line = fit_line([1.0, 2.0, 4.0], [[0.0, 0.1, 0.2], [0.36, 0.36, 0.36]])
    widths = [
        reach.high - reach.low for reach in line.beyond if reach.low is not None and reach.high is not None
    ]
    assert len(widths) == len(line.beyond)
    assert min(np.diff(widths)) > -1e-12
    assert widths[0] > 0.1
