"""Attention on relevant tokens compared with uniform attention, and its faithfulness, for runs trained on a task."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from headtohead.interpret.faithfulness import THRESHOLDS
from headtohead.report.charts import Chart, Choice, Row, category, dots, legend, named
from headtohead.report.gather import ArmFacts
from headtohead.report.panels.base import Figure, Table, View, grouped, number
from headtohead.study.judge.intervals import over_seeds
from headtohead.study.probes import number_at
from headtohead.study.probes.explain import Explained

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


_COLUMNS = {
    "relevant mass": ("explanations.{}.mass", ".3f"),
    "uniform attention": ("uniform", ".3f"),
    **{f"above {at} %": (f"explanations.{{}}.confidence.{at}", ".1f") for at in THRESHOLDS},
    "correct and above 33 %": ("explanations.{}.confidence_correct.33", ".1f"),
    "comprehensiveness": ("explanations.{}.comprehensiveness", ".3f"),
    "sufficiency": ("explanations.{}.sufficiency", ".3f"),
    "AOPC": ("explanations.{}.aopc_comprehensiveness", ".3f"),
    "AOPC, random": ("chance.aopc_comprehensiveness", ".3f"),
}
"""Columns of the table: path and format of the number."""


def figure(view: View) -> Figure | None:
    """Return attention on relevant tokens by arm, if the probe was run."""
    if not (rows := explained_rows(view.arms)):
        return None
    by_arm = {arm.label: list(found_by_seed(arm).values()) for arm in view.arms}
    found = [row for several in by_arm.values() for row in several]
    words = (
        "Dots are seeds, ticks their mean, bars 95 % intervals; diamonds are the random reference: uniform attention, or "
        "deleting random tokens. Right of the diamond: attention is on relevant tokens (first row), and deleting the most "
        "attended tokens lowers the probability of the answer (last row: mean over the top 1, 5, 10, 20 and 50 % of tokens, "
        f"AOPC). Measured at the token the answer is read from, over {max(row.examples for row in found):,} test examples."
    )
    bare = [
        f"{label} in {len(row.without_map)} of {len(row.layers)} layers"
        for label, several in by_arm.items()
        for row in several[:1]
        if row.without_map
    ]
    if bare:
        words += f" No attention map, so no rollout: {', '.join(bare)}."
    if signed := [label for label, several in by_arm.items() if any(row.signed_layers for row in several)]:
        words += f" Signed maps, shown by absolute value: {', '.join(signed)}."
    if not all(row.marked for row in found):
        words += " No test example has relevant tokens marked: only the deletion measures are shown."
    table = Table(("arm", "explanation", "seeds", *_COLUMNS), _lines(view.arms), left=2, folded="Table")
    return Figure("Attention on relevant tokens.", words, explained(rows, view), table=table)


def found_by_seed(arm: ArmFacts) -> dict[int, Explained]:
    """Return the probe's result by seed; of several, the one over the most examples."""
    return {seed: max(rows, key=lambda row: row.examples) for seed, rows in arm.found(Explained).items()}


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
    lowest = {measure.words: measure.low for measure in MEASURES}
    found = []
    for group in grouped(rows, "explanation", "measure", "arm"):
        over = over_seeds([float(row["value"]) for row in group])
        known = [row["against"] for row in group if row["against"] is not None]
        if over["low"] is not None:
            over |= {"low": max(lowest[group[0]["measure"]], over["low"]), "high": min(100.0, over["high"])}
        found.append(group[0] | over | {"against": statistics.fmean(known) if known else None})
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


def _lines(arms: Sequence[ArmFacts]) -> list[tuple[str, ...]]:
    lines = []
    for arm in arms:
        found = list(found_by_seed(arm).values())
        for name, words in EXPLANATIONS.items():
            if any(name in row.explanations for row in found):
                cells = (_mean_at(found, path.format(name), form) for path, form in _COLUMNS.values())
                lines.append((arm.label, words, str(len(found)), *cells))
    return lines


def _mean_at(found: Sequence[Explained], path: str, form: str) -> str:
    """Return the mean over seeds of the number at a path, formatted; a dash if missing."""
    values = [value for row in found if (value := number_at(row, path)) is not None]
    return number(statistics.fmean(values) if values else None, form)
