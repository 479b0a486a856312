"""h2h verdict."""

from __future__ import annotations

from typing import Annotated, Literal

from headtohead import api
from headtohead.cli.shared.options import Json, flag
from headtohead.cli.shared.results import show_result, show_verdicts
from headtohead.common.terminal import say_json


def command(
    table: Annotated[str, flag("RUNS.csv")],
    *,
    arm: Annotated[str, flag("COLUMN")],
    seed: Annotated[str, flag("COLUMN")],
    metric: Annotated[str, flag("COLUMN")],
    by: Annotated[tuple[str, ...] | None, flag("COLUMN", may_be_empty=True)] = None,
    baseline: Annotated[str, flag("NAME")] = "",
    primary: Annotated[str, flag("NAME")] = "",
    margin: Annotated[float | None, flag("NUMBER")] = None,
    better: Literal["lower", "higher"] = "lower",
    out: Annotated[str | None, flag("DIR")] = None,
    json_: Json = False,
) -> None:
    """Judge runs that were trained elsewhere, from a CSV file with one row per run.

    Example: h2h verdict runs.csv --arm model --seed seed --metric val_loss --margin 0.01 --out judged

    Args:
        table: CSV file with comma, semicolon or tab separators and a header row
        arm: column that names the arm (required)
        seed: column with the seed; runs with the same seed are paired (required)
        metric: column to compare (required)
        by: columns that separate contests (default: corpus, size, shape, length where present)
        baseline: arm that the others are compared with (default: the first)
        primary: arm of the planned comparison (default: none)
        margin: largest difference that counts as none (default: 0.005 for bits per byte, else none)
        better: which direction of the metric is better
        out: directory of verdicts.json and report.html (default: none)
        json_: print one JSON document
    """
    result = api.judge(
        table,
        arm=arm,
        seed=seed,
        metric=metric,
        by=by,
        baseline=baseline,
        primary=primary,
        margin=margin,
        better=better,
        out=out,
    )
    if json_:
        say_json([row.as_dict() for row in result.verdicts], indent=1)
    elif out is not None:
        show_result(result)
    else:
        show_verdicts(result)
