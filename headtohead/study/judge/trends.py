"""How an arm's gap to the baseline changes with size, tokens per parameter or context.

The gap is arm - baseline for one seed in one contest. With three or more values on the axis, a line is fitted to each
seed by least squares, gap against log2 of the value. The mean of the seeds' slopes and its t interval over seeds state
the change of the gap per doubling. This is valid whether a seed's runs are independent, as at different sizes, or share
a trunk, as branches do, and whether or not the variance is the same at all sizes. The band is the t interval of the mean
line. The line is extended to four times the largest value, with a prediction interval for one further pair of runs; its
coverage is at least 95 % if the line continues, which the data cannot show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from headtohead.common.numbers import short_count
from headtohead.study.judge.statistics import ALPHA, Paired, compare_paired, holm
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import METRIC, Contest, Manifest
from headtohead.study.store.result import RunResult

MIN_POINTS = 3
"""Values needed for a line: two points always fit one."""
FACTOR = 4.0
"""The line is extended to this multiple of the largest value."""


@dataclass(frozen=True)
class Over:
    """An axis against which the gap is fitted."""

    field: str
    """The field of a contest."""
    words: str
    axis: str
    """The axis title."""


OVER = {
    "size": Over("size", "size", "parameters of the baseline"),
    "tokens_per_parameter": Over(
        "branch", "tokens per parameter", "training tokens per parameter of the baseline"
    ),
    "context": Over("context", "context", "context, in tokens"),
}


@dataclass(frozen=True)
class Reach:
    """A point on a line with its interval."""

    value: float
    gap: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Line:
    """A straight line fitted to the gaps against log2 of the value; intervals are None with one seed."""

    slope: Paired
    """Change per doubling."""
    within: list[Reach]
    """Points with the 95 % interval of the mean line."""
    beyond: list[Reach]
    """Points with the 95 % prediction interval of one further pair of runs."""


@dataclass(frozen=True)
class Point:
    """The gap at one value."""

    name: str
    """The value as the study names it: a size, a branch, a context."""
    value: float
    seeds: list[int]
    gaps: list[float]
    mean: float
    ci_low: float | None
    ci_high: float | None


@dataclass(frozen=True)
class Trend:
    """One arm's gap to the baseline in contests that differ only on one axis."""

    label: str
    baseline: str
    over: str
    place: dict[str, str]
    """The fields that the contests have in common."""
    where: str
    """The same as a title."""
    metric: str
    points: list[Point]
    n: int
    """Seeds that have a gap at every value; the line is fitted to these."""
    line: Line | None
    p_holm: float | None
    """p of the slope, Holm-adjusted over the arms of these contests."""
    decision: str
    """shrinks, grows or turns (changes sign); falls or rises if the sign is open at both ends; or undecided."""
    notes: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The trend in one sentence."""
        start = f"{self.label} against {self.baseline}"
        what = OVER[self.over].words
        if self.line is None or self.line.slope.difference is None:
            return f"{start}: {self.notes[0]}."
        slope = self.line.slope
        span = f"{slope.difference:+.4f} bits per byte per doubling"
        if slope.ci_low is not None:
            span += f" ({slope.ci_low:+.4f} to {slope.ci_high:+.4f}, {self.n} seeds)"
        first, last = (self.line.within[index].gap > 0 for index in (0, -1))
        if self.decision == "undecided":
            moves = f"no trend with {what} can be established"
        elif self.decision == "turns":
            moves = f"changes from {'worse to better' if first else 'better to worse'} with {what}"
        elif self.decision in ("falls", "rises"):
            moves = f"its gap {self.decision} with {what}; which arm is ahead cannot be established"
        else:
            worse = first if self.decision == "shrinks" else last
            moves = f"its {'disadvantage' if worse else 'advantage'} {self.decision} with {what}"
        return f"{start}: {moves}, slope {span}{self._outlook}."

    @property
    def _outlook(self) -> str:
        end = self.line.beyond[-1] if self.line else None
        if end is None or end.low is None:
            return ""
        where = f"{short_count(end.value)} {_units(self.over)}"
        return (
            f"; if the line continues, one further pair of runs at {where} is expected between {end.low:+.4f} "
            f"and {end.high:+.4f}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the trend, JSON-ready."""
        return asdict(self) | {"words": self.words}


def _units(over: str) -> str:
    return {"size": "parameters", "context": "tokens of context"}.get(over, "tokens per parameter")


def fit_line(values: Sequence[float], gaps: Sequence[Sequence[float]], places: int = 24) -> Line:
    """Return the line through the gaps (seeds, values) at `places` points: the mean of each seed's least-squares line."""
    x, y = np.log2(np.asarray(values, dtype=np.float64)), np.asarray(gaps, dtype=np.float64)
    seeds = len(y)
    middle = float(x.mean())
    spread = float(((x - middle) ** 2).sum())
    slopes = (y * (x - middle)).sum(1) / spread
    means = y.mean(1)
    none = [0.0] * seeds

    def mean(at: float) -> Reach:
        found = compare_paired((means + slopes * (at - middle)).tolist(), none)
        return Reach(2**at, found.difference or 0.0, found.ci_low, found.ci_high)

    def further(at: float) -> Reach:
        """Return the prediction at `at`: the variance of a further pair is at most `share` times that of a seed's line.

        With noise s in each gap and v at `at` between seeds, a seed's line has variance v + h s², the pair v + s².
        """
        found = mean(at)
        if found.low is None:
            return found
        leverage = 1 / len(x) + (at - middle) ** 2 / spread
        share = max(1.0, 1 / leverage)
        # From the mean's interval, t s / sqrt(n), to the pair's, t s sqrt(share + 1 / n).
        reach = (found.gap - found.low) * math.sqrt(seeds * share + 1)
        return replace(found, low=found.gap - reach, high=found.gap + reach)

    def outwards(reaches: list[Reach]) -> list[Reach]:
        """Make intervals non-decreasing outwards: where the lines of few seeds cross they would be too narrow."""
        widest, found = 0.0, []
        for reach in reaches:
            if reach.low is not None:
                widest = max(widest, reach.gap - reach.low)
                reach = replace(reach, low=reach.gap - widest, high=reach.gap + widest)
            found.append(reach)
        return found

    low, high = float(x.min()), float(x.max())
    end = high + math.log2(FACTOR)
    return Line(
        compare_paired(slopes.tolist(), none),
        [mean(float(at)) for at in np.linspace(low, high, places)],
        outwards([further(float(at)) for at in np.linspace(high, end, places)]),
    )


def study_trends(
    manifest: Manifest, values: Mapping[tuple[str, Contest], float], verdicts: Sequence[Verdict]
) -> list[Trend]:
    """Return a trend per arm and axis with two or more values, in bits per byte; empty for studies of tasks.

    `values` are those of `axis_values`.
    """
    if manifest.measures:
        return []
    contests = manifest.contests()
    found = []
    for over in OVER:
        for group in groups(contests, over):
            known = [contest for contest in group if (over, contest) in values]
            if len(known) > 1:
                found += _arms(manifest, over, known, values, verdicts)
    return found


def groups(contests: Sequence[Contest], over: str) -> list[list[Contest]]:
    """Return the groups of two or more contests that differ only in `over`."""
    name = OVER[over].field
    found: dict[Contest, list[Contest]] = {}
    for contest in contests:
        found.setdefault(replace(contest, **{name: ""}), []).append(contest)
    return [group for group in found.values() if len(group) > 1 and all(getattr(one, name) for one in group)]


def axis_values(manifest: Manifest, results: Mapping[str, RunResult]) -> dict[tuple[str, Contest], float]:
    """Return the position of each contest on each axis: the baseline's parameters, its tokens per parameter, the context."""
    found: dict[tuple[str, Contest], float] = {}
    for contest in manifest.contests():
        if contest.context.isdecimal():
            found["context", contest] = float(contest.context)
        for run in manifest.runs(contest, manifest.baseline).values():
            result = results.get(run)
            if result is not None and result.status == "done" and result.parameters and result.tokens:
                found["size", contest] = float(result.parameters)
                found["tokens_per_parameter", contest] = result.tokens / result.parameters
                break
    return found


def _arms(
    manifest: Manifest,
    over: str,
    group: list[Contest],
    values: Mapping[tuple[str, Contest], float],
    verdicts: Sequence[Verdict],
) -> list[Trend]:
    trends = []
    partial = set()
    for _, label in manifest.arms:
        rows = {
            contest: row for contest in group for row in verdicts if row.label == label and row.of(contest)
        }
        gaps = {
            contest: {
                seed: a - b for seed, a, b in zip(row.seeds, row.values, row.baseline_values, strict=True)
            }
            for contest, row in rows.items()
        }
        if label == manifest.baseline or not any(gaps.values()):
            continue
        metric = next(iter(rows.values())).metric
        trend = trend_of(label, manifest.baseline, over, gaps, values, metric)
        if diverged := sum(row.diverged for row in rows.values()):
            trend.notes.append(f"{diverged} of its runs diverged; the others are not representative")
            partial.add(label)
        trends.append(trend)
    adjusted = holm([trend.line.slope.p if trend.line else None for trend in trends])
    decided = [_decided(trend, p) for trend, p in zip(trends, adjusted, strict=True)]
    return [replace(trend, decision="undecided") if trend.label in partial else trend for trend in decided]


def trend_of(
    label: str,
    baseline: str,
    over: str,
    gaps: Mapping[Contest, Mapping[int, float]],
    values: Mapping[tuple[str, Contest], float],
    metric: str = METRIC,
) -> Trend:
    """Return the trend of gaps by contest and seed, with decision `undecided`."""
    name = OVER[over].field
    ordered = sorted(
        (contest for contest in gaps if gaps[contest]), key=lambda contest: values[over, contest]
    )
    points = []
    for contest in ordered:
        here = dict(sorted(gaps[contest].items()))
        paired = compare_paired(list(here.values()), [0.0] * len(here))
        interval = (paired.difference or 0.0, paired.ci_low, paired.ci_high)
        value = values[over, contest]
        points.append(Point(getattr(contest, name), value, list(here), list(here.values()), *interval))
    seeds = sorted(set.intersection(*(set(gaps[contest]) for contest in ordered))) if ordered else []
    distinct = len({point.value for point in points})
    notes = []
    line = None
    if distinct < MIN_POINTS:
        notes.append(f"{distinct} values of {OVER[over].words}; a trend needs {MIN_POINTS} or more")
    elif not seeds:
        notes.append("no seed has a gap at every value, so no line is fitted")
    else:
        line = fit_line(
            [point.value for point in points],
            [[gaps[contest][seed] for contest in ordered] for seed in seeds],
        )
        if len(seeds) == 1:
            notes.append("one seed gives no interval")
        if any(len(point.seeds) > len(seeds) for point in points):
            notes.append("the line is fitted to the seeds that have a gap at every value")
    place = {key: value for key, value in ordered[0].place.items() if key != name} if ordered else {}
    where = replace(ordered[0], **{name: ""}).title if ordered else ""
    return Trend(
        label, baseline, over, place, where, metric, points, len(seeds), line, None, "undecided", notes
    )


def _decided(trend: Trend, p: float | None) -> Trend:
    """Decide after Holm's correction; which arm is ahead is stated only if the line's interval excludes 0."""
    if p is None or p >= ALPHA or trend.line is None:
        return replace(trend, p_holm=p)
    first, last = trend.line.within[0], trend.line.within[-1]
    if _side(first) * _side(last) < 0:
        decision = "turns"
    elif abs(last.gap) < abs(first.gap) and _side(first):
        decision = "shrinks"
    elif abs(last.gap) >= abs(first.gap) and _side(last):
        decision = "grows"
    else:
        decision = "falls" if last.gap < first.gap else "rises"
    return replace(trend, p_holm=p, decision=decision)


def _side(reach: Reach) -> int:
    """Return 1 if the interval is above 0, -1 if it is below 0, otherwise 0."""
    if reach.low is None or reach.high is None:
        return 0
    return int(reach.low > 0) - int(reach.high < 0)
