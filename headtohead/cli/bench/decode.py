"""h2h bench decode."""

from __future__ import annotations

from headtohead import api
from headtohead.cli.bench.output import KernelOptions, cell, end, milliseconds, show, where, whole


def command(given: KernelOptions = KernelOptions()) -> int:  # noqa: B008  frozen
    """Measure decoding from a K=V cache next to SDPA with separate keys and values."""
    document = api.bench_decode(device=given.device, out=given.out, quiet=given.quiet)
    known = whole(document, "case", "turned")
    peer = next((row["peer"] for row in known if "peer" in row), "the library's, K and V")
    columns = {
        "batch x heads x cached tokens x dim": cell(
            "case", "{0[batch]} x ({0[heads]}, {0[kv_heads]}) x {0[keys]} x {0[dim]}".format
        ),
        "turned": cell("turned"),
        f"{peer}, ms": milliseconds("peer_seconds"),
        "same tensor twice, ms": milliseconds("peer_same_tensor_seconds"),
        "ours, ms": lambda row: row.get("failed") or milliseconds("seconds")(row),
        "faster, x": cell("faster", ".2f"),
        "of copy bandwidth": cell("share_of_copy", ".0%"),
        "error": cell("error", ".1e"),
    }
    show(where(document), columns, known)
    return end(document)
