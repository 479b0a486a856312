"""h2h bench generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from headtohead import api
from headtohead.bench.generate import ARMS
from headtohead.bench.peers import WRITERS
from headtohead.cli.bench.output import BenchOptions, Cell, cell, end, show, whole
from headtohead.cli.shared.options import flag
from headtohead.common.numbers import short_bytes, short_count
from headtohead.common.terminal import say


@dataclass(frozen=True)
class Options(BenchOptions):
    """Options.

    Args:
        arms: arms to time; ratios refer to the first
        peers: peers of the same shape; none when no name follows
        size: model shape, see h2h list sizes; its context is extended to the text
        batch: sequences
        cached: prompt tokens
        new: tokens to generate; the first comes from the prefill
        rounds: repetitions per contender; medians are shown
        precision: of weights, cache and arithmetic
    """

    arms: Annotated[tuple[str, ...], flag("ARM")] = ARMS
    peers: Annotated[tuple[str, ...], flag("|".join(WRITERS), may_be_empty=True)] = tuple(WRITERS)
    size: Annotated[str, flag("SIZE")] = "350m"
    batch: Annotated[str, flag("COUNT")] = "64"
    cached: Annotated[str, flag("COUNT")] = "8064"
    new: Annotated[str, flag("COUNT")] = "129"
    rounds: int = 2
    precision: Literal["bf16", "float32"] = "bf16"


def command(given: Options = Options()) -> int:  # noqa: B008  frozen
    """Time greedy generation from a long prompt next to transformers with its two caches."""
    document = given.measure("generate", api.bench_generate)
    for name, words in document["missing"].items():
        say(f"not measured: {name}: {words}")
    ratios = document["ratios"]
    rows = {row["contender"]: row for row in whole(document, "contender") if row["contender"] in ratios}
    columns: dict[str, Cell] = {
        "contender": cell("contender"),
        "tokens/s": cell("tokens_per_second", short_count),
        "ms/step": cell("milliseconds", ".2f"),
        f"{given.arms[0]} over it": lambda row: cell("tokens_per_second", ".2f")(ratios[row["contender"]]),
        "with first steps": lambda row: cell("whole_tokens_per_second", ".2f")(ratios[row["contender"]]),
        "cache": cell("cache_bytes", short_bytes),
        "peak memory": cell("peak_bytes", short_bytes),
        "of copy bandwidth": cell("share_of_copy", ".0%"),
        "prompt s": cell("prompt_seconds", lambda times: f"{times[-1]:.2f}"),
        "off the whole forward by": cell("disagreement", ".1e"),
    }
    one = next(iter(rows.values()))
    title = (
        f"{one['size']} ({one['dims']}), {one['batch']} x {one['cached']:,} cached + {one['new']} tokens, "
        f"{one['precision']}, {one['device']}"
    )
    show(title, columns, [row for row in rows.values() if row["error"] is None])
    for name, row in rows.items():
        if row["error"] is not None:
            say(f"{name} failed: {row['error']}")
        elif row.get("told"):
            say(f"{name}: {row['told'][0]}")
    return end(document)
