"""h2h bench growth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from headtohead import api
from headtohead.bench.growth import AXES, axis_rows, on_axis, value_of
from headtohead.cli.bench.output import BenchOptions, Row, end
from headtohead.cli.shared.options import Switch, flag
from headtohead.cli.shared.tables import number, print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import short_count
from headtohead.common.terminal import say


@dataclass(frozen=True)
class Options(BenchOptions):
    """Options.

    Args:
        arms: arms to measure (default: all mechanisms)
        axes: what grows
        context: context lengths (default: 512 2048 8192 32768; on CPU 128 512 2048)
        size: size, cut to two layers and a vocabulary of 256 (default: 60m; on CPU nano)
        batch: tokens per step, equal for all contexts; 0: the longest context
        rounds: repetitions per row; medians are shown
        precision: arithmetic (default: bf16; on CPU float32)
        compile: compile one block, shared by all layers (default: on for GPU)
        workers: processes that compile in parallel; 0: one per core
        longest: skip rows whose step is expected to take longer
        time_limit: stop after this time; the same command continues (default: none)
        picture: write time per token against context to this PNG or SVG file (default: none)
    """

    arms: Annotated[tuple[str, ...], flag("ARM")] = ()
    axes: Annotated[tuple[str, ...], flag("|".join(AXES))] = AXES
    context: Annotated[tuple[str, ...], flag("COUNT")] = ()
    size: Annotated[str, flag("SIZE")] = ""
    batch: Annotated[str, flag("COUNT")] = "0"
    rounds: int = 3
    precision: Annotated[Literal["", "bf16", "float32"], flag("bf16|float32")] = ""
    compile: Switch = "auto"
    workers: int = 0
    longest: Annotated[str, flag("TIME")] = "2s"
    time_limit: Annotated[str | None, flag("TIME")] = None
    picture: Annotated[Path | None, flag("FILE")] = None


def command(given: Options = Options()) -> int:  # noqa: B008  frozen
    """Measure how time and memory of a training step grow, next to the declared FLOPs."""
    if given.picture is not None:
        api.check_growth_picture(given.picture)
    document = given.measure("growth", api.bench_growth, "picture")
    for axis in given.axes:
        _show_growth(document, axis)
    for words in document["left_out"]:
        say(f"not measured: {words}")
    if document["left"]:
        say(f"{document['left']} rows are left after the time limit; repeat the same command to continue")
    drawn = given.picture is None or _drawn(document["rows"], given.picture)
    end(document)
    return 0 if drawn else 2


def _drawn(rows: list[Row], picture: Path) -> bool:
    """Draw the picture, or print why it cannot be drawn."""
    try:
        say(f"picture: {api.draw_growth(rows, picture)}")
    except UserError as error:
        say(f"no picture: {error}")
        return False
    return True


def _show_growth(document: Row, axis: str) -> None:
    rows = [row for row in document["rows"] if on_axis(row, axis)]
    found = [one for one in document["growth"] if one["axis"] == axis]
    if not found:
        return
    values = sorted({value_of(row, axis) for row in rows}) if axis != "parameters" else []
    table = []
    for one in found:
        own = axis_rows(rows, axis, one["arm"])
        times = [f"{1e3 * row['seconds']:.3g}" if "seconds" in row else "–" for row in own]
        cells = dict(zip((value_of(row, axis) for row in own), times, strict=True))
        shown = [cells.get(value, "–") for value in values] if values else [" / ".join(times)]
        last = one["slopes"][-1] if one["slopes"] else {}
        slopes = [number(last.get(key), ".2f") for key in ("time", "flops", "memory")]
        table.append((one["arm"], *shown, *slopes, one["words"]))
    heads = [f"{short_count(value)}, ms" for value in values] or ["smallest / middle / largest, ms"]
    columns = ("arm", *heads, "slope of time", "declared", "of memory", "growth at the largest value")
    first = rows[0]
    middle = first["base"]
    fixed = f"context {middle['context']}"
    if axis == "context":
        fixed = f"{middle['context'] * middle['batch']:,} tokens per step at every context"
    elif axis != "batch":
        fixed += f", {middle['batch']} sequences"
    title = (
        f"{axis}: forward and backward of {first['size']} cut to {middle['layers']} layers of {middle['width']}, {fixed}, "
        f"{first['precision']}{', one block compiled' if first['compiled'] else ''}, {first['device']}"
    )
    print_table(title, columns, table, right=columns[1:-1])
