"""h2h bench train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from headtohead import api
from headtohead.bench.peers import PEERS
from headtohead.bench.train import SHAPES
from headtohead.cli.bench.output import show_profile, whole
from headtohead.cli.shared.options import (
    Switch,
    flag,
    switched,
)
from headtohead.cli.shared.tables import number, print_table
from headtohead.common.numbers import parse_count, short_bytes, short_count
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say, say_json


def command(
    sizes: Annotated[tuple[str, ...], tyro.conf.Positional, flag("SIZE")] = tuple(SHAPES),
    /,
    *,
    arms: Annotated[tuple[str, ...], flag("ARM")] = ("standard",),
    peers: Annotated[tuple[str, ...], flag("|".join(PEERS))] = PEERS,
    context: Annotated[tuple[str, ...], flag("COUNT")] = (),
    shape: Literal["as_is", "params"] = "as_is",
    batch: Annotated[str, flag("COUNT")] = "32768",
    rounds: int = 6,
    precision: Literal["bf16", "float32"] = "bf16",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    compile: Switch = "auto",
    warm: bool = False,
    profile: bool = False,
    out: Annotated[Path | None, flag("FILE")] = None,
    quiet: bool = False,
) -> int:
    """Time the training step next to transformers' Llama and litgpt's GPT of the same shape, interleaved.

    Args:
        sizes: 51m, 124m, 360m (vocabulary 50,257), or sizes of h2h list
        arms: arms to time; ratios refer to the first
        peers: peer libraries; none when no name follows
        context: context lengths in tokens, one row each (default: by size)
        shape: params: solve the feed-forward width of later arms for the parameters of the first
        batch: tokens per step
        rounds: rounds of ten steps per contender; medians are shown
        precision: arithmetic; bf16 keeps float32 weights
        device: where to run
        compile: torch.compile for all contenders (default: on for GPU)
        warm: first fill the compile cache with one process per core
        profile: also show the kernels of a step
        out: file that keeps every row; rows found there are not measured again (default: none)
        quiet: print no progress
    """
    with progress_bar("bench train", quiet) as progress:
        document = api.bench_train(
            sizes,
            arms=arms,
            peers=peers,
            contexts=[parse_count(count, "--context") for count in context],
            shape=shape,
            batch=parse_count(batch, "--batch"),
            rounds=rounds,
            precision=precision,
            device=device,
            compile=switched(compile),
            warm=warm,
            profile=profile,
            out=out,
            progress=progress,
        )
    for words in document["missing"].values():
        say(f"not measured: {words}")
    needed = (
        "size",
        "dims",
        "device",
        "precision",
        "compiled",
        "tokens_per_step",
        "contenders",
        "parameters",
    )
    for row in whole(document, *needed, "results", "gradient_error"):
        _show(row)
    say_json(document)
    return 0


def _show(row: dict[str, Any]) -> None:
    columns = (
        *("contender", "parameters", "tokens/s", "ms/step", "ours over it", "MFU", "peak memory"),
        "start s",
    )
    measured = {name: found for name, found in row["results"].items() if "error" not in found}
    table = [
        (
            name,
            number(found.get("parameters"), ","),
            short_count(found["tokens_per_second"]),
            f"{found['milliseconds']:.2f}",
            number(found["first_over_this"], ".3f"),
            number(found["mfu"], ".1%"),
            "–" if found["peak_bytes"] is None else short_bytes(found["peak_bytes"]),
            f"{found['start_seconds']:.0f}",
        )
        for name, found in measured.items()
    ]
    title = (
        f"{row['size']} ({row['dims']}; {row['parameters']:,} parameters), {row['tokens_per_step']:,} tokens per step, shape {row.get('shape', 'as_is')}, "
        f"{row['precision']}{', compiled' if row['compiled'] else ''}, {row['device']}"
    )
    print_table(title, columns, table, right=columns[1:])
    for name, found in row["results"].items():
        if "error" in found:
            say(f"{name} failed: {found['error']}")
    if row["gradient_error"] is not None:
        say(
            f"gradients of {row['contenders'][0]} differ from the plain path's in float32 by {row['gradient_error']:.1e} (relative norm)"
        )
    if found := row.get("profile"):
        show_profile(row["contenders"][0], found)
