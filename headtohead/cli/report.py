"""h2h report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from headtohead.api import StudyResult, open_study
from headtohead.cli.shared.options import flag
from headtohead.cli.shared.results import show_result
from headtohead.cli.shared.tables import print_rows
from headtohead.common.errors import UserError
from headtohead.common.numbers import interval, number
from headtohead.common.terminal import say
from headtohead.study.judge.stability import Stability


def command(
    folder: Annotated[str, flag("DIR")],
    *,
    stability: bool = False,
    charts: bool = False,
    table: Annotated[Literal["", "latex", "markdown", "csv"], flag("latex|markdown|csv")] = "",
) -> None:
    """Judge the finished runs of a study again and rebuild its report.

    Example: h2h report races/quick --table latex > verdicts.tex

    Args:
        folder: study directory
        stability: also print divergence, loss spikes and tokens to target of each arm
        charts: also write every chart as SVG, PDF and PNG into DIR/charts
        table: print only the verdicts, as a table in this format (default: none)
    """
    if table and stability:
        raise UserError("--table prints nothing but the verdicts; print --stability on its own")
    result = open_study(folder)
    result.write(quiet=bool(table), only_if_changed=bool(table))
    files = result.write_charts(quiet=bool(table)) if charts else []
    if table:
        say(result.table(table), end="")
        return
    show_result(result)
    if stability:
        _show_stability(result)
    if charts:
        say(f"charts:   {len(files)} files in {result.path / 'charts'}")


def _show_stability(result: StudyResult) -> None:
    columns: dict[str, Callable[[Stability], object]] = {
        "arm": lambda row: row.label,
        "contest": lambda row: row.contest,
        "diverged": lambda row: f"{row.diverged}/{row.runs}",
        "95 % interval": lambda row: interval(row.diverged_low, row.diverged_high, ".0%"),
        "spikes per run": lambda row: number(row.spikes, ".2f"),
        "gradient tail": lambda row: number(row.gradient_tail, ".2f"),
        "reached": lambda row: f"{row.reached}/{row.pairs}",
        "tokens to target": lambda row: "–" if row.tokens_ratio is None else f"{row.tokens_ratio:.3f} x",
        "interval of it": lambda row: interval(row.tokens_ratio_low, row.tokens_ratio_high, ".3f"),
        "one rate off": lambda row: number(row.rate_rise, "+.4f"),
    }
    print_rows("stability and sample efficiency", result.stability(), columns, text=("arm", "contest"))
