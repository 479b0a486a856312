"""h2h cost."""

from __future__ import annotations

from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import Json, flag
from headtohead.cli.shared.tables import print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_count, short_bytes, short_count
from headtohead.common.terminal import say_json


def command(
    arms: Annotated[tuple[str, ...], flag("ARM")],
    *,
    size: Annotated[str, flag("NAME")] = "nano",
    context: Annotated[str | None, flag("COUNT")] = None,
    batch: int = 1,
    json_: Json = False,
) -> None:
    """Show parameters, forward FLOPs per token and cache bytes per token of arms, by formula.

    Example: h2h cost standard sharing:tie=kv standard:kv_heads=1 --size 350m --context 8192

    Args:
        arms: mechanisms with options, or layouts
        size: model shape, see h2h list sizes
        context: context length in tokens (default: by size)
        batch: sequences that share per-batch work, such as the pass of a companion
        json_: print one JSON document
    """
    if not arms:
        raise UserError(
            "h2h cost needs at least one arm, such as: h2h cost standard sharing:tie=kv --size 350m"
        )
    rows = [api.cost(arm, size=size, context=parse_count(context or 0), batch=batch) for arm in arms]
    if json_:
        say_json(rows, indent=1)
        return
    first = rows[0]
    table = []
    for row in rows:
        flops, cached = row["flops_per_token"], row["cache_bytes_per_token"]
        counts = map(short_count, (flops["causal"], flops["full"], row["decode_flops_per_token"]))
        cache = ("none: recomputes", "–")
        if cached is not None:
            cache = (f"{cached:,}", short_bytes(row["cache_bytes"]))
        ratio = f"{row['parameters'] / first['parameters']:.3f}"
        table.append((row["label"], f"{row['parameters']:,}", ratio, *counts, *cache))
    columns = (
        *("arm", "parameters", "ratio", "FLOPs/token causal", "full", "decode"),
        *("cache bytes/token", "cache at context"),
    )
    title = f"{size}: {first['dims']}; context {first['context']}, cache in bf16"
    print_table(title, columns, table, right=columns[1:])
