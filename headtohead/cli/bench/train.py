"""h2h bench train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from headtohead import api
from headtohead.bench.peers import PEERS
from headtohead.bench.train import SHAPES
from headtohead.cli.bench.output import BenchOptions, Cell, Row, cell, end, show, show_profile, whole
from headtohead.cli.shared.options import Switch, flag
from headtohead.common.numbers import short_bytes, short_count
from headtohead.common.terminal import say

COLUMNS: dict[str, Cell] = {
    "contender": cell("name"),
    "parameters": cell("parameters", ","),
    "tokens/s": cell("tokens_per_second", short_count),
    "ms/step": cell("milliseconds", ".2f"),
    "ours over it": cell("first_over_this", ".3f"),
    "MFU": cell("mfu", ".1%"),
    "peak memory": cell("peak_bytes", short_bytes),
    "start s": cell("start_seconds", ".0f"),
}
NEEDED = (
    *("size", "dims", "device", "precision", "compiled", "tokens_per_step", "contenders"),
    *("parameters", "results", "gradient_error"),
)


@dataclass(frozen=True)
class Options(BenchOptions):
    """Options.

    Args:
        sizes: 51m, 124m, 360m (vocabulary 50,257), or those of h2h list sizes
        arms: arms to time; ratios refer to the first
        peers: peer libraries; none when no name follows
        context: context lengths in tokens, one row each (default: by size)
        shape: params: solve the feed-forward width of later arms for the parameters of the first
        batch: tokens per step
        rounds: rounds of ten steps per contender; medians are shown
        precision: arithmetic; bf16 keeps float32 weights
        compile: torch.compile for all contenders (default: on for GPU)
        warm: first fill the compile cache with one process per core
        profile: also show the kernels of a step
    """

    sizes: Annotated[tuple[str, ...], flag("SIZE", positional=True)] = tuple(SHAPES)
    arms: Annotated[tuple[str, ...], flag("ARM")] = ("standard",)
    peers: Annotated[tuple[str, ...], flag("|".join(PEERS), may_be_empty=True)] = PEERS
    context: Annotated[tuple[str, ...], flag("COUNT")] = ()
    shape: Literal["as_is", "params"] = "as_is"
    batch: Annotated[str, flag("COUNT")] = "32768"
    rounds: int = 6
    precision: Literal["bf16", "float32"] = "bf16"
    compile: Switch = "auto"
    warm: bool = False
    profile: bool = False


def command(given: Options = Options()) -> int:  # noqa: B008  frozen
    """Time the training step next to transformers' Llama and litgpt's GPT of the same shape, interleaved."""
    document = given.measure("train", api.bench_train)
    for words in document["missing"].values():
        say(f"not measured: {words}")
    for row in whole(document, *NEEDED):
        _show(row)
    return end(document)


def _show(row: Row) -> None:
    measured = [{"name": name, **found} for name, found in row["results"].items()]
    title = (
        f"{row['size']} ({row['dims']}; {row['parameters']:,} parameters), {row['tokens_per_step']:,} tokens per step, "
        f"shape {row.get('shape', 'as_is')}, {row['precision']}{', compiled' if row['compiled'] else ''}, {row['device']}"
    )
    show(title, COLUMNS, [one for one in measured if "error" not in one])
    for one in measured:
        if "error" in one:
            say(f"{one['name']} failed: {one['error']}")
    first, error = row["contenders"][0], row["gradient_error"]
    if error is not None:
        say(f"gradients of {first} differ from the plain path's in float32 by {error:.1e} (relative norm)")
    if found := row.get("profile"):
        show_profile(first, found)
