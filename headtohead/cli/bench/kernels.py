"""h2h bench kernels and decode."""

from __future__ import annotations

from typing import Annotated, Any

from headtohead import api
from headtohead.cli.bench.shown import milliseconds, ratio, show, whole
from headtohead.cli.flags import flag
from headtohead.cli.tables import number, print_table

Out = Annotated[str | None, flag("FILE")]


def kernels(*, device: str = "auto", out: Out = None) -> int:
    """Measure every fused kernel: its time, the bytes it must move, and its errors against float64.

    Args:
        device: auto, cpu or cuda; on cpu the sizes are small.
        out: a file that keeps every row; rows that stand there are not measured again.
    """
    document = api.bench_kernels(device=device, out=out)
    known = whole(document, "case", "shape", "dtype", "kind")
    timed = [row for row in known if {"seconds", "floor_seconds", "over_floor"} <= row.keys()]
    columns = (
        *("forward + backward", "shape", "plain twin, ms", "ours, ms", "faster, x"),
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
    print(
        "the roof is the byte floor or, where it is higher, the time of the products at a large product's speed"
    )
    compared = ("kernel", "shape", "precision", "kind", "worst", "error", "allowed", "within")
    errors = [
        (row["case"], " x ".join(map(str, row["shape"])), row["dtype"], row["kind"], *_error_words(row))
        for row in known
    ]
    return show(document, compared, errors, right=compared[5:])


def _error_words(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return which result is worst, its error and what is allowed, or why there is none."""
    if not {"worst", "error", "bound", "within"} <= row.keys():
        return row.get("failed", "–"), "–", "–", "failed" if "failed" in row else "–"
    return row["worst"], number(row["error"], ".1e"), f"{row['bound']:.1e}", "yes" if row["within"] else "NO"


def decode(*, device: str = "auto", out: Out = None) -> int:
    """Measure decoding from a K=V cache beside the library's attention with separate keys and values.

    Args:
        device: auto, cpu or cuda; on cpu the sizes are small.
        out: a file that keeps every row; rows that stand there are not measured again.
    """
    document = api.bench_decode(device=device, out=out)
    known = whole(document, "case", "turned")
    rows = [
        (
            "{batch} x ({heads}, {kv_heads}) x {keys} x {dim}".format(**row["case"]),
            row["turned"],
            milliseconds(row.get("peer_seconds")),
            milliseconds(row.get("peer_same_tensor_seconds")),
            milliseconds(row["seconds"]) if "seconds" in row else row.get("failed", "–"),
            number(row.get("faster"), ".2f"),
            number(row.get("share_of_copy"), ".0%"),
            number(row.get("error"), ".1e"),
        )
        for row in known
    ]
    peer = next((row["peer"] for row in known if "peer" in row), "the library's, K and V")
    columns = (
        *("batch x heads x cached tokens x dim", "turned", f"{peer}, ms"),
        *("same tensor twice, ms", "ours, ms", "faster, x", "of copy bandwidth", "error"),
    )
    return show(document, columns, rows, right=columns[1:])
