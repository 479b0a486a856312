"""h2h bench growth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from headtohead import api
from headtohead.bench.growth import AXES, axis_rows, on_axis, value_of
from headtohead.cli.shared.options import (
    Switch,
    flag,
    seconds_of,
    switched,
)
from headtohead.cli.shared.tables import number, print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_count, parse_duration, short_count
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say, say_json


def command(
    *,
    arms: Annotated[tuple[str, ...], flag("ARM")] = (),
    axes: Annotated[tuple[str, ...], flag("|".join(AXES))] = AXES,
    context: Annotated[tuple[str, ...], flag("COUNT")] = (),
    size: Annotated[str, flag("SIZE")] = "",
    batch: Annotated[str, flag("COUNT")] = "0",
    rounds: int = 3,
    precision: Annotated[Literal["", "bf16", "float32"], flag("bf16|float32")] = "",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    compile: Switch = "auto",
    workers: int = 0,
    longest: Annotated[str, flag("TIME")] = "2s",
    time_limit: Annotated[str | None, flag("TIME")] = None,
    out: Annotated[Path | None, flag("FILE")] = None,
    picture: Annotated[Path | None, flag("FILE")] = None,
    quiet: bool = False,
) -> int:
    """Measure how time and memory of a training step grow, next to the declared FLOPs.

    Args:
        arms: arms to measure (default: all mechanisms)
        axes: what grows
        context: context lengths (default: 512 2048 8192 32768; on CPU 128 512 2048)
        size: size, cut to two layers and a vocabulary of 256 (default: 60m; on CPU nano)
        batch: tokens per step, equal for all contexts; 0: the longest context
        rounds: repetitions per row; medians are shown
        precision: arithmetic (default: bf16; on CPU float32)
        device: where to run
        compile: compile one block, shared by all layers (default: on for GPU)
        workers: processes that compile in parallel; 0: one per core
        longest: skip rows whose step is expected to take longer
        time_limit: stop after this time; the same command continues (default: none)
        out: file that keeps every row; rows found there are not measured again (default: none)
        picture: write time per token against context to this PNG or SVG file (default: none)
        quiet: print no progress
    """
    if picture is not None:
        api.check_growth_picture(picture)
    with progress_bar("bench growth", quiet) as progress:
        document = api.bench_growth(
            arms,
            axes=axes,
            contexts=[parse_count(count, "--context") for count in context],
            size=size,
            batch=parse_count(batch, "--batch"),
            rounds=rounds,
            precision=precision,
            device=device,
            compile=switched(compile),
            workers=workers,
            longest=parse_duration(longest),
            seconds=seconds_of(time_limit),
            out=out,
            progress=progress,
        )
    for axis in axes:
        _show_growth(document, axis)
    for words in document["left_out"]:
        say(f"not measured: {words}")
    if document["left"]:
        say(f"{document['left']} rows are left after the time limit; repeat the same command to continue")
    drawn = picture is None or _drawn(document["rows"], picture)
    say_json(document)
    return 0 if drawn else 2


def _drawn(rows: list[dict[str, Any]], picture: Path) -> bool:
    """Draw the picture, or print why it cannot be drawn."""
    try:
        say(f"picture: {api.draw_growth(rows, picture)}")
    except UserError as error:
        say(f"no picture: {error}")
        return False
    return True


def _show_growth(document: dict[str, Any], axis: str) -> None:
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
    fixed = {
        "context": f"{middle['context'] * middle['batch']:,} tokens per step at every context",
        "batch": f"context {middle['context']}",
        "layers": f"context {middle['context']}, {middle['batch']} sequences",
        "parameters": f"context {middle['context']}, {middle['batch']} sequences",
    }[axis]
    title = (
        f"{axis}: forward and backward of {first['size']} cut to {middle['layers']} layers of {middle['width']}, {fixed}, "
        f"{first['precision']}{', one block compiled' if first['compiled'] else ''}, {first['device']}"
    )
    print_table(title, columns, table, right=columns[1:-1])
