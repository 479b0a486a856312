"""h2h report."""

from __future__ import annotations

from typing import Annotated

from headtohead.api import StudyResult, open_study
from headtohead.cli.shared.options import flag
from headtohead.cli.shared.results import show_result
from headtohead.cli.shared.tables import print_table
from headtohead.common.numbers import interval, number
from headtohead.common.terminal import say


def command(folder: Annotated[str, flag("DIR")], *, stability: bool = False, charts: bool = False) -> None:
    """Judge the finished runs of a study again and rebuild its report.

    Args:
        folder: study directory
        stability: also print divergence, loss spikes and tokens to target of each arm
        charts: also write every chart as SVG and PNG into DIR/charts
    """
    result = open_study(folder)
    result.write()
    files = result.write_charts() if charts else []
    show_result(result)
    if stability:
        _show_stability(result)
    if charts:
        say(f"charts:   {len(files)} files in {result.path / 'charts'}")


def _show_stability(result: StudyResult) -> None:
    columns = (
        *("arm", "contest", "diverged", "95 % interval", "spikes per run", "gradient tail"),
        *("reached", "tokens to target", "interval of it", "one rate off"),
    )
    rows = []
    for row in result.stability():
        ratio = row.tokens_ratio
        rows.append(
            (
                *(row.label, row.contest, f"{row.diverged}/{row.runs}"),
                interval(row.diverged_low, row.diverged_high, ".0%"),
                *(number(row.spikes, ".2f"), number(row.gradient_tail, ".2f"), f"{row.reached}/{row.pairs}"),
                "–" if ratio is None else f"{ratio:.3f} x",
                interval(row.tokens_ratio_low, row.tokens_ratio_high, ".3f"),
                number(row.rate_rise, "+.4f"),
            )
        )
    print_table("stability and sample efficiency", columns, rows, right=columns[2:])
