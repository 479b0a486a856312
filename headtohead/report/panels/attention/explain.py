"""Attention on relevant tokens compared with uniform attention, and its faithfulness, for runs trained on a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from headtohead.interpret.faithfulness import THRESHOLDS
from headtohead.report.charts import Chart, Choice, Row, category, dots, legend, named
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, Table, View
from headtohead.study.judge.intervals import over_seeds
from headtohead.study.probes import number_at

EXPLANATIONS = {
    "rollout": "attention rollout",
    "layer_mean": "attention, mean over layers",
    "gradient": "gradient x input",
}


@dataclass(frozen=True)
class Measure:
    """One row of the chart: its label, the path of its number and of its reference."""

    words: str  # | separates lines
    path: str  # below explanations.NAME
    factor: float = 100.0  # converts to percent
    against: str = ""
    low: float = 0.0


MEASURES = (
    Measure("attention on|relevant tokens", "mass", against="uniform"),
    *(Measure(f"examples with more|than {at} % there", f"confidence.{at}", factor=1.0) for at in THRESHOLDS),
    Measure(
        "probability lost|without top tokens",
        "aopc_comprehensiveness",
        against="chance.aopc_comprehensiveness",
        low=-100.0,
    ),
)


def figure(view: View) -> Figure | None:
    """Return attention on relevant tokens by arm, if the probe was run."""
    rows = explained_rows(view.arms)
    if not rows:
        return None
    found = [row for arm in view.arms for row in found_by_seed(arm).values()]
    words = (
        "Dots are seeds, ticks their mean, bars 95 % intervals; diamonds are the random reference: uniform attention, or "
        "deleting random tokens. Right of the diamond: attention is on relevant tokens (first row), and deleting the most "
        "attended tokens lowers the probability of the answer (last row: mean over the top 1, 5, 10, 20 and 50 % of tokens, "
        f"AOPC). Measured at the token the answer is read from, over {max(row['examples'] for row in found):,} test examples."
    )
    if bare := [f"{arm.label} in {missing}" for arm in view.arms if (missing := _without_map(arm))]:
        words += f" No attention map, so no rollout: {', '.join(bare)}."
    if signed := [arm.label for arm in view.arms if _signed(arm)]:
        words += f" Signed maps, shown by absolute value: {', '.join(signed)}."
    if not all(row["marked"] for row in found):
        words += " No test example has relevant tokens marked: only the deletion measures are shown."
    table = Table(_HEAD, _lines(view.arms), left=2, folded="Table")
    return Figure("Attention on relevant tokens.", words, explained(rows, view), table=table)


def found_by_seed(arm: ArmFacts) -> dict[int, Row]:
    """Return the probe's result by seed; of several, the one over the most examples."""
    return {
        seed: max(rows, key=lambda row: int(row["examples"])) for seed, rows in arm.found("explain").items()
    }


def _without_map(arm: ArmFacts) -> str:
    """Return how many of an arm's layers have no map, as text; empty if all have one."""
    row = next(iter(found_by_seed(arm).values()), None)
    if row is None or not row["without_map"]:
        return ""
    return f"{len(row['without_map'])} of {len(row['layers'])} layers"


def _signed(arm: ArmFacts) -> bool:
    return any(row["signed_layers"] for row in found_by_seed(arm).values())


def explained_rows(arms: Sequence[ArmFacts]) -> list[Row]:
    """Return one row per explanation, measure, arm and seed, in percent."""
    rows: list[Row] = []
    for name in EXPLANATIONS:
        for arm in arms:
            for seed, found in found_by_seed(arm).items():
                for measure in MEASURES:
                    value = number_at(found, f"explanations.{name}.{measure.path}")
                    reference = number_at(found, measure.against) if measure.against else None
                    if value is not None:
                        rows.append(
                            {"explanation": name, "measure": measure.words, "arm": arm.label, "seed": seed}
                            | {"value": measure.factor * value}
                            | {"against": None if reference is None else measure.factor * reference}
                        )
    return rows


def _means(rows: Sequence[Row]) -> list[Row]:
    """Return one row per explanation, measure and arm: mean and interval over seeds, and the reference."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["explanation"], row["measure"], row["arm"]), []).append(row)
    lowest = {measure.words: measure.low for measure in MEASURES}
    found = []
    for (explanation, measure, arm), group in groups.items():
        over = over_seeds([float(row["value"]) for row in group])
        known = [row["against"] for row in group if row["against"] is not None]
        low, high = over["low"], over["high"]
        found.append(
            {"explanation": explanation, "measure": measure, "arm": arm, "mean": over["mean"]}
            | {"low": None if low is None else max(lowest[measure], low)}
            | {"high": None if high is None else min(100.0, high)}
            | {"against": sum(known) / len(known) if known else None}
        )
    return found


def explained(rows: list[Row], view: View) -> Chart:
    """Return every measure by arm; buttons select the explanation."""
    names = {row["explanation"] for row in rows}
    choice = Choice(
        {name: (words, "") for name, words in EXPLANATIONS.items() if name in names}, group="explanation"
    )
    labels, means = view.ordered(rows), _means(rows)
    words = [measure.words for measure in MEASURES if any(row["measure"] == measure.words for row in rows)]
    shown = [value for row in means for value in (row["mean"], row["against"]) if value is not None]
    shown += [row["value"] for row in rows]
    # An interval over two seeds can be very wide; it is clipped at the frame.
    scale = alt.Scale(domain=[min(0.0, *shown), max(*shown, 1.0)], nice=True)
    offset = alt.YOffset("arm:N", sort=labels, scale=alt.Scale(domain=labels, paddingOuter=0.25))
    known = named("means", choice).transform_filter("isValid(datum.against)")
    diamond = known.mark_point(shape="diamond", size=70, strokeWidth=1.6, color="#888", opacity=1)
    x = alt.X("against:Q", title="percent", scale=scale)
    return dots(
        means,
        rows,
        words,
        view.color(legend()),
        "percent",
        field="measure",
        offset=offset,
        form=".2f",
        scale=scale,
        under=[diamond.encode(x=x, y=category("measure", words), yOffset=offset)],
        height=max(44, 18 * len(labels) + 14),
        choice=choice,
    )


_HEAD = (
    "arm",
    "explanation",
    "seeds",
    "relevant mass",
    "uniform attention",
    *(f"above {at} %" for at in THRESHOLDS),
    "correct and above 33 %",
    "comprehensiveness",
    "sufficiency",
    "AOPC",
    "AOPC, random",
)
_PATHS = (
    ("explanations.{}.mass", ".3f"),
    ("uniform", ".3f"),
    *((f"explanations.{{}}.confidence.{at}", ".1f") for at in THRESHOLDS),
    ("explanations.{}.confidence_correct.33", ".1f"),
    ("explanations.{}.comprehensiveness", ".3f"),
    ("explanations.{}.sufficiency", ".3f"),
    ("explanations.{}.aopc_comprehensiveness", ".3f"),
    ("chance.aopc_comprehensiveness", ".3f"),
)


def _lines(arms: Sequence[ArmFacts]) -> list[tuple[str, ...]]:
    lines = []
    for arm in arms:
        found = list(found_by_seed(arm).values())
        for name, words in EXPLANATIONS.items():
            if any(name in row["explanations"] for row in found):
                cells = (mean_at(found, path.format(name), form) for path, form in _PATHS)
                lines.append((arm.label, words, str(len(found)), *cells))
    return lines


def mean_at(found: Sequence[Row], path: str, form: str) -> str:
    """Return the mean over seeds of the number at a path, formatted; a dash if missing."""
    values = [value for row in found if (value := number_at(row, path)) is not None]
    return format(sum(values) / len(values), form) if values else "–"
