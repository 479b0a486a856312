"""h2h bench: peers and ours side by side, the last line one JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from headtohead import api
from headtohead.cli.flags import flag
from headtohead.cli.tables import print_table
from headtohead.common.files import write_atomic

Out = Annotated[str | None, flag("FILE")]


def kernels(*, device: str = "auto", out: Out = None) -> int:
    """Measure the fused coupling, forward + backward, beside its plain twin and the bytes it must move.

    Args:
        device: auto, cpu or cuda; on cpu the sizes are small.
        out: write the document here too.
    """
    document = api.bench("kernels", device=device)
    rows = [
        (
            row["case"],
            milliseconds(row["peer_seconds"]),
            milliseconds(row["seconds"]),
            f"{row['faster']:.2f}x",
            milliseconds(row["floor_seconds"]),
            f"{row['over_floor']:.2f}x",
        )
        for row in document["rows"]
    ]
    columns = (
        "forward + backward",
        f"{document['rows'][0]['peer']}, ms",
        "ours, ms",
        "faster",
        "byte floor, ms",
        "over the floor",
    )
    return show(document, columns, rows, out)


def decode(*, device: str = "auto", out: Out = None) -> int:
    """Measure decoding from a K=V cache beside the library's attention with separate keys and values.

    Args:
        device: auto, cpu or cuda; on cpu the sizes are small.
        out: write the document here too.
    """
    document = api.bench("decode", device=device)
    rows = [
        (
            "{batch} x ({heads}, {kv_heads}) x {keys} x {dim}".format(**row["case"]),
            row["turned"],
            milliseconds(row["peer_seconds"]),
            milliseconds(row["peer_same_tensor_seconds"]),
            milliseconds(row["seconds"]),
            f"{row['faster']:.2f}x",
            f"{row['share_of_copy']:.0%}",
        )
        for row in document["rows"]
    ]
    columns = (
        *("batch x heads x cached tokens x dim", "turned", f"{document['rows'][0]['peer']}, ms"),
        *("same tensor twice, ms", "ours, ms", "faster", "of copy bandwidth"),
    )
    return show(document, columns, rows, out)


def show(
    document: dict[str, Any], columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], out: str | None
) -> int:
    """Print a benchmark's table, then the whole document as the last line; keep it in a file where one is named."""
    where = f"{document['device']}, {document['kernels']} kernels, torch {document['torch']}"
    print_table(where, columns, rows, right=columns[1:])
    print(f"copy {document['copy_bytes_per_second'] / 1e12:.2f} TB/s, read and written")
    text = json.dumps(document)
    if out is not None:
        write_atomic(Path(out), text + "\n")
    print(text)
    return 0


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds with four digits behind the point."""
    return f"{seconds * 1000:.4f}"
