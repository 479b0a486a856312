"""The verdicts of a study with their costs as LaTeX, Markdown or CSV, for papers, issues and spreadsheets."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headtohead.common.errors import unknown
from headtohead.common.numbers import number
from headtohead.report.facts import COSTS, ShownCost, shown_costs
from headtohead.report.gather import gather
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.headline import headline
from headtohead.study.judge.runs_csv import csv_cell
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import METRIC, Contest, metric_label

_HEAD = ("difference", "95 % interval", *COSTS.values(), "p (Holm)", "n")
_MARKS = {"better": "↑", "worse": "↓", "equivalent": "≈", "undecided": "○"}
_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
_SPECIAL |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"}
_SPECIAL |= {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "≈": r"$\approx$", "○": r"$\circ$"}
_SPECIAL |= {mark: f"\\{mark}" for mark in "&%$#_{}"}


_Cell = tuple[str, list[int]]
"""A cell's text and the numbers of its notes."""


@dataclass(frozen=True)
class _Table:
    """One contest: heading, rows of text, and notes below."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[_Cell]]
    notes: Sequence[str]
    """By number from 1."""
    legend: str


@dataclass(frozen=True)
class _Part:
    """One contest with its verdicts and the costs of its arms by label."""

    contest: Contest
    verdicts: Sequence[Verdict]
    costs: dict[str, list[ShownCost]]


def verdict_text(path: Path, analysis: Analysis, form: str) -> str:
    """Return the verdicts of a study, one table per contest; `form` is latex, markdown or csv."""
    if form not in FORMATS:
        raise unknown("table format", form, FORMATS)
    manifest = analysis.manifest
    parts = []
    for contest in manifest.contests():
        rows = [row for row in analysis.verdicts if row.of(contest)]
        arms = gather(path, manifest, contest, analysis.results, [], rows)
        parts.append(_Part(contest, rows, shown_costs(arms, manifest.baseline)))
    return FORMATS[form](parts, manifest.baseline)


def _table(part: _Part, baseline: str) -> _Table:
    first = part.verdicts[0] if part.verdicts else None
    metric = first.metric if first else METRIC
    form = ".4f" if metric == METRIC else ".5g"
    notes: list[str] = []
    rows: list[list[_Cell]] = []
    for row in part.verdicts:
        found = _remarks(row)
        notes += [note for note in found if note not in notes]
        cells = [row.label, f"{_MARKS[row.verdict]} {row.verdict}", number(row.mean, form)]
        cells += [number(row.difference, f"+{form}"), _interval(row, f"+{form}")]
        cells += [cost.words for cost in part.costs[row.label]]
        cells += [number(row.p_holm, ".3g"), str(row.n)]
        marks = [notes.index(note) + 1 for note in found]
        rows.append([(text, marks if place == 1 else []) for place, text in enumerate(cells)])
    base = [baseline, "baseline", number(first.baseline_mean if first else None, form), "", ""]
    base += [*(cost.words for cost in part.costs[baseline]), "", ""]
    margin = f" within ±{first.margin:g}" if first and first.margin else ""
    legend = (
        f"↑ better, ↓ worse, ≈ equivalent{margin}, ○ undecided; paired over n seeds, p after Holm's correction. "
        f"Costs of {baseline}: cache in bytes per token, forward FLOPs per token, training tokens per second as measured; "
        "of the others: multiples."
    )
    title = f"{part.contest.title}. {headline(part.verdicts)}"
    head = ("arm", "verdict", metric_label(metric), *_HEAD)
    return _Table(title, head, [*rows, [(text, []) for text in base]], notes, legend)


def _remarks(row: Verdict) -> list[str]:
    """Return what must be known with a verdict."""
    scope = ["on this test set only"] if row.scope == "this test set" else []
    failed = [
        f"{label} failed the causality check"
        for label, found in ((row.label, row.failed_check), (row.baseline_label, row.baseline_failed_check))
        if found
    ]
    return [*row.marks, *scope, *failed]


def _interval(row: Verdict, form: str) -> str:
    return "–" if row.ci_low is None else f"[{row.ci_low:{form}}, {row.ci_high:{form}}]"


def _markdown(parts: Sequence[_Part], baseline: str) -> str:
    blocks = []
    for table in (_table(part, baseline) for part in parts):
        lines = [
            [
                _markdown_text(text) + (f" <sup>{','.join(map(str, marks))}</sup>" if marks else "")
                for text, marks in row
            ]
            for row in table.rows
        ]
        sides = ["---", "---", *["---:"] * (len(table.head) - 2)]
        grid = "\n".join(f"| {' | '.join(line)} |" for line in (table.head, sides, *lines))
        notes = [f"<sup>{place}</sup> {_markdown_text(note)}" for place, note in enumerate(table.notes, 1)]
        blocks.append("\n\n".join([f"**{_markdown_text(table.title)}**", grid, *notes, table.legend]))
    return "\n\n".join(blocks) + "\n"


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", " ".join(text.split()))


def _latex(parts: Sequence[_Part], baseline: str) -> str:
    blocks = [r"% needs \usepackage{booktabs}"]
    for table in (_table(part, baseline) for part in parts):
        lines = [
            [
                _latex_text(text) + (f"$^{{{','.join(map(str, marks))}}}$" if marks else "")
                for text, marks in row
            ]
            for row in table.rows
        ]
        *arms, last = [f"{' & '.join(line)} \\\\" for line in lines]
        head = " & ".join(map(_latex_text, table.head)) + r" \\"
        notes = [f"$^{{{place}}}$ {_latex_text(note)}." for place, note in enumerate(table.notes, 1)]
        blocks.append(
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering",
                    rf"\caption{{{_latex_text(table.title)}}}",
                    rf"\begin{{tabular}}{{ll{'r' * (len(table.head) - 2)}}}",
                    *(r"\toprule", head, r"\midrule", *arms, r"\midrule", last, r"\bottomrule"),
                    r"\end{tabular}",
                    "",
                    rf"\footnotesize {' '.join([_latex_text(table.legend), *notes])}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(blocks) + "\n"


def _latex_text(text: str) -> str:
    """Return text as LaTeX; signs of numbers are minus signs, not hyphens."""
    escaped = "".join(_SPECIAL.get(letter, letter) for letter in " ".join(text.split()))
    if re.fullmatch(r"\[?[+-][\d.]+(e[+-]?\d+)?(, [+-][\d.]+(e[+-]?\d+)?\])?", escaped):
        return f"${escaped}$"
    # A bracket after \\ would be read as the optional argument of the line break.
    return f"{{{escaped}}}" if escaped.startswith("[") else escaped


def _csv(parts: Sequence[_Part], baseline: str) -> str:
    numbers = ("mean", "difference", "ci_low", "ci_high", "p_holm", "n")
    costs = ("cache_bytes_per_token", "flops_per_token", "tokens_per_second")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("contest", "arm", "verdict", "metric", *numbers, *costs, "primary", "remarks"))
    for part in parts:
        for row in part.verdicts:
            line: list[Any] = [part.contest.title, row.label, row.verdict, row.metric]
            line += [getattr(row, name) for name in numbers]
            line += [cost.value for cost in part.costs[row.label]]
            writer.writerow(map(csv_cell, [*line, row.primary, "; ".join(row.notes)]))
        mean = part.verdicts[0].baseline_mean if part.verdicts else None
        metric = part.verdicts[0].metric if part.verdicts else METRIC
        base: list[Any] = [
            part.contest.title,
            baseline,
            "baseline",
            metric,
            mean,
            *[None] * (len(numbers) - 1),
        ]
        base += [cost.value for cost in part.costs[baseline]]
        writer.writerow(map(csv_cell, [*base, False, ""]))
    return out.getvalue()


FORMATS: dict[str, Callable[[Sequence[_Part], str], str]] = {
    "latex": _latex,
    "markdown": _markdown,
    "csv": _csv,
}
