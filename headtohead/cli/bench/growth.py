"""h2h bench growth."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from headtohead import api
from headtohead.bench.growth import AXES, axis_rows, on_axis, value_of
from headtohead.cli.flags import OneWay, flag, yes_or_no
from headtohead.cli.tables import number, print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_count, parse_duration, short_count
from headtohead.common.progress import progress_bar


def growth(
    *,
    arms: Annotated[tuple[str, ...], flag("ARM")] = (),
    axes: Annotated[tuple[str, ...], flag("|".join(AXES))] = AXES,
    context: Annotated[tuple[str, ...], flag("COUNT")] = (),
    size: Annotated[str, flag("SIZE")] = "",
    batch: Annotated[str, flag("COUNT")] = "0",
    rounds: Annotated[int, flag("COUNT")] = 3,
    precision: Annotated[Literal["", "bf16", "float32"], flag("bf16|float32")] = "",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    compile: OneWay = False,
    no_compile: OneWay = False,
    workers: Annotated[int, flag("COUNT")] = 0,
    longest: Annotated[str, flag("TIME")] = "2s",
    for_: Annotated[str | None, flag(name="for", metavar="TIME")] = None,
    out: Annotated[Path | None, flag("FILE")] = None,
    picture: Annotated[Path | None, flag("FILE")] = None,
    quiet: Annotated[bool, flag()] = False,
) -> int:
    """Measure how a training step grows with context, batch, layers and parameters, beside what mechanisms declare.

    Args:
        arms: whose; all mechanisms when not given.
        axes: along which axes; all four when not given.
        context: 512 2048 8192 32768 when not given; on a CPU 128 512 2048.
        size: cut to two layers and a vocabulary of 256; 60m, on a CPU nano.
        batch: tokens per step, equal for all contexts; 0: the longest context.
        rounds: bursts of each row; medians are shown.
        precision: bf16, on a CPU float32, when not given.
        device: where.
        compile: compile one block, which serves all layers; when nothing is said, on a GPU.
        no_compile: compile nothing.
        workers: processes that compile side by side; 0: as many as there are cores.
        longest: skip a row whose step would take longer by what was measured before.
        for_: end after this time; the same command goes on where it ended.
        out: a file that keeps every row; rows that stand there are not measured again.
        picture: draw time per token against context into this PNG or SVG file.
        quiet: show no progress.
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
            compile=yes_or_no("compile", compile, no_compile),
            workers=workers,
            longest=parse_duration(longest),
            seconds=math.inf if for_ is None else parse_duration(for_),
            out=out,
            progress=progress,
        )
    for axis in axes:
        _show_growth(document, axis)
    for words in document["left_out"]:
        print(f"not measured: {words}")
    if document["left"]:
        print(f"{document['left']} rows are left: the time given is over, and the same command goes on")
    drawn = picture is None or _drawn(document["rows"], picture)
    print(json.dumps(document, ensure_ascii=False))
    return 0 if drawn else 2


def _drawn(rows: list[dict[str, Any]], picture: Path) -> bool:
    """Draw the picture, or say why there is none: what was measured is shown either way."""
    try:
        print(f"picture: {api.draw_growth(rows, picture)}")
    except UserError as error:
        print(f"no picture: {error}")
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
    columns = ("arm", *heads, "slope of time", "declared", "of memory", "at the long end")
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
