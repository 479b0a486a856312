"""h2h bench kernels."""

from __future__ import annotations

from typing import Annotated, Any

from headtohead import api
from headtohead.cli.bench.output import milliseconds, ratio, show, whole
from headtohead.cli.shared.options import (
    flag,
)
from headtohead.cli.shared.tables import number, print_table
from headtohead.common.terminal import say


def command(
    *,
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    out: Annotated[str | None, flag("FILE")] = None,
) -> int:
    """Measure every fused kernel: time, bytes moved, and error against float64.

    Args:
        device: where to run; sizes are small on CPU
        out: file that keeps every row; rows found there are not measured again (default: none)
    """
    document = api.bench_kernels(device=device, out=out)
    known = whole(document, "case", "shape", "dtype", "kind")
    timed = [row for row in known if {"seconds", "floor_seconds", "over_floor"} <= row.keys()]
    columns = (
        *("forward + backward", "shape", "plain, ms", "ours, ms", "faster, x"),
        *("byte floor, ms", "over the floor", "over the roof"),
    )
    rows = [
        (
            row["case"],
            " x ".join(map(str, row["shape"])),
            milliseconds(row.get("peer_seconds")),
            milliseconds(row["seconds"]),
            number(row.get("faster"), ".2f"),
            milliseconds(row["floor_seconds"]),
            f"{row['over_floor']:.2f}x",
            ratio(row.get("over_roof")),
        )
        for row in timed
    ]
    print_table("", columns, rows, right=columns[2:])
    say("roof: the byte floor, or the time of the matrix products at peak speed where that is longer")
    compared = ("kernel", "shape", "precision", "kind", "worst", "error", "allowed", "within")
    errors = [
        (row["case"], " x ".join(map(str, row["shape"])), row["dtype"], row["kind"], *_error_words(row))
        for row in known
    ]
    return show(document, compared, errors, right=compared[5:])


def _error_words(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the worst tensor, its error, the bound and whether it is within; or why there is none."""
    if not {"worst", "error", "bound", "within"} <= row.keys():
        return row.get("failed", "–"), "–", "–", "failed" if "failed" in row else "–"
    return row["worst"], number(row["error"], ".1e"), f"{row['bound']:.1e}", "yes" if row["within"] else "NO"
