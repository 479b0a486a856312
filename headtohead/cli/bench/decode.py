"""h2h bench decode."""

from __future__ import annotations

from typing import Annotated

from headtohead import api
from headtohead.cli.bench.output import milliseconds, show, whole
from headtohead.cli.shared.options import (
    flag,
)
from headtohead.cli.shared.tables import number


def command(
    *,
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    out: Annotated[str | None, flag("FILE")] = None,
) -> int:
    """Measure decoding from a K=V cache next to SDPA with separate keys and values.

    Args:
        device: where to run; sizes are small on CPU
        out: file that keeps every row; rows found there are not measured again (default: none)
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
