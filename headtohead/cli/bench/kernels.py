"""h2h bench kernels."""

from __future__ import annotations

from headtohead import api
from headtohead.cli.bench.output import Cell, KernelOptions, Row, cell, end, milliseconds, show, where, whole
from headtohead.common.terminal import say


def _shape(row: Row) -> str:
    return " x ".join(map(str, row["shape"]))


def _within(row: Row) -> str:
    if "within" not in row:
        return "failed" if "failed" in row else "–"
    return "yes" if row["within"] else "NO"


TIMES: dict[str, Cell] = {
    "forward + backward": cell("case"),
    "shape": _shape,
    "plain, ms": milliseconds("peer_seconds"),
    "ours, ms": milliseconds("seconds"),
    "faster, x": cell("faster", ".2f"),
    "byte floor, ms": milliseconds("floor_seconds"),
    "over the floor": cell("over_floor", "{:.2f}x".format),
    "over the roof": cell("over_roof", "{:.2f}x".format),
}
ERRORS: dict[str, Cell] = {
    "kernel": cell("case"),
    "shape": _shape,
    "precision": cell("dtype"),
    "kind": cell("kind"),
    "worst": lambda row: row.get("worst") or row.get("failed", "–"),
    "error": cell("error", ".1e"),
    "allowed": cell("bound", ".1e"),
    "within": _within,
}


def command(given: KernelOptions = KernelOptions()) -> int:  # noqa: B008  frozen
    """Measure every fused kernel: time, bytes moved, and error against float64."""
    document = api.bench_kernels(device=given.device, out=given.out, quiet=given.quiet)
    known = whole(document, "case", "shape", "dtype", "kind")
    timed = [row for row in known if {"seconds", "floor_seconds", "over_floor"} <= row.keys()]
    show("", TIMES, timed, left=("shape",))
    say("roof: the byte floor, or the time of the matrix products at peak speed where that is longer")
    show(where(document), ERRORS, known, left=("shape", "precision", "kind", "worst"))
    return end(document)
