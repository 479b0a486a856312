"""h2h bench generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from headtohead import api
from headtohead.bench.generate import ARMS
from headtohead.bench.peers import WRITERS
from headtohead.cli.bench.output import whole
from headtohead.cli.shared.options import (
    flag,
)
from headtohead.cli.shared.tables import number, print_table
from headtohead.common.numbers import parse_count, short_bytes, short_count
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say, say_json


def command(
    *,
    arms: Annotated[tuple[str, ...], flag("ARM")] = ARMS,
    peers: Annotated[tuple[str, ...], flag("|".join(WRITERS))] = tuple(WRITERS),
    size: Annotated[str, flag("SIZE")] = "350m",
    batch: Annotated[str, flag("COUNT")] = "64",
    cached: Annotated[str, flag("COUNT")] = "8064",
    new: Annotated[str, flag("COUNT")] = "129",
    rounds: int = 2,
    precision: Literal["bf16", "float32"] = "bf16",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    out: Annotated[Path | None, flag("FILE")] = None,
    quiet: bool = False,
) -> int:
    """Time greedy generation from a long prompt next to transformers with its two caches.

    Args:
        arms: arms to time; ratios refer to the first
        peers: peers of the same shape; none when no name follows
        size: model shape, see h2h list; its context is extended to the text
        batch: sequences
        cached: prompt tokens
        new: tokens to generate; the first comes from the prefill
        rounds: repetitions per contender; medians are shown
        precision: of weights, cache and arithmetic
        device: where to run
        out: file that keeps every row; rows found there are not measured again (default: none)
        quiet: print no progress
    """
    counts = {"batch": batch, "cached": cached, "new": new}
    with progress_bar("bench generate", quiet) as progress:
        document = api.bench_generate(
            arms,
            peers=peers,
            size=size,
            **{name: parse_count(text, f"--{name}") for name, text in counts.items()},
            rounds=rounds,
            precision=precision,
            device=device,
            out=out,
            progress=progress,
        )
    for name, words in document["missing"].items():
        say(f"not measured: {name}: {words}")
    rows = {
        row["contender"]: row
        for row in whole(document, "contender")
        if row["contender"] in document["ratios"]
    }
    columns = (
        *(
            "contender",
            "tokens/s",
            "ms/step",
            f"{arms[0]} over it",
            "with first steps",
            "cache",
            "peak memory",
        ),
        *("of copy bandwidth", "prompt s", "off the whole forward by"),
    )
    table = [
        (
            name,
            short_count(row["tokens_per_second"]),
            f"{row['milliseconds']:.2f}",
            number(document["ratios"][name]["tokens_per_second"], ".2f"),
            number(document["ratios"][name]["whole_tokens_per_second"], ".2f"),
            short_bytes(row["cache_bytes"]),
            "–" if row["peak_bytes"] is None else short_bytes(row["peak_bytes"]),
            f"{row['share_of_copy']:.0%}",
            f"{row['prompt_seconds'][-1]:.2f}",
            number(row.get("disagreement"), ".1e"),
        )
        for name, row in rows.items()
        if row["error"] is None
    ]
    one = next(iter(rows.values()))
    title = f"{one['size']} ({one['dims']}), {one['batch']} x {one['cached']:,} cached + {one['new']} tokens, {one['precision']}, {one['device']}"
    print_table(title, columns, table, right=columns[1:])
    for name, row in rows.items():
        if row["error"] is not None:
            say(f"{name} failed: {row['error']}")
        elif row.get("told"):
            say(f"{name}: {row['told'][0]}")
    say_json(document)
    return 0
