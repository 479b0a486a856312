"""h2h bench population."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from headtohead import api
from headtohead.cli.bench.output import ratio, show_profile, whole
from headtohead.cli.shared.options import (
    Switch,
    flag,
    switched,
)
from headtohead.cli.shared.tables import number, print_table
from headtohead.common.numbers import parse_count, short_count
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say, say_json


def command(
    seeds: Annotated[tuple[int, ...], tyro.conf.Positional, flag("COUNT")] = (5, 16),
    /,
    *,
    size: Annotated[str, flag("SIZE")] = "1m",
    arms: Annotated[tuple[str, ...], flag("ARM")] = ("standard",),
    batch: Annotated[str, flag("COUNT")] = "8192",
    rounds: int = 6,
    precision: Literal["bf16", "float32"] = "bf16",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    compile: Switch = "auto",
    processes: bool = True,
    profile: bool = False,
    out: Annotated[Path | None, flag("FILE")] = None,
    quiet: bool = False,
) -> int:
    """Time a population of seeds next to a single run and to separate processes.

    Args:
        seeds: rows of the population; each number is one measurement
        size: model shape, see h2h list
        arms: arms to time, one measurement each
        batch: tokens per step of each row
        rounds: rounds per contender; medians are shown
        precision: arithmetic; bf16 keeps float32 weights
        device: where to run
        compile: only compiled contenders, or none (default: both on GPU)
        processes: do not time separate processes (default: time them)
        profile: also show the kernels of a population step
        out: file that keeps every row; rows found there are not measured again (default: none)
        quiet: print no progress
    """
    with progress_bar("bench population", quiet) as progress:
        document = api.bench_population(
            seeds,
            size=size,
            arms=arms,
            batch=parse_count(batch, "--batch"),
            rounds=rounds,
            precision=precision,
            device=device,
            compile=switched(compile),
            processes=processes,
            profile=profile,
            out=out,
            progress=progress,
        )
    known = whole(
        document, "arm", "seeds", "size", "dims", "tokens_per_step", "precision", "recorded", "device"
    )
    columns = (
        *("arm", "seeds", "population tokens/s", "single run", "ratio", "separate processes"),
        "ratio to them",
    )
    rows = [
        (
            row["arm"],
            row["seeds"],
            _rate(row.get("stacked_tokens_per_second")),
            _rate(row.get("single_tokens_per_second")),
            ratio(row.get("over_single")),
            _rate(row.get("separate_tokens_per_second")),
            ratio(row.get("over_separate")),
        )
        for row in known
    ]
    if known:
        last = known[-1]
        how = "steps captured as CUDA graphs" if last["recorded"] else "steps launched one by one"
        title = f"{last['size']} ({last['dims']}), {last['tokens_per_step']:,} tokens per step and seed, {last['precision']}, {how}, {last['device']}; the best of each kind"
        print_table(title, columns, rows, right=columns[1:])
    for row in known:
        _show_contest(row)
    say_json(document)
    return 0


def _rate(found: float | None) -> str:
    return "–" if found is None else short_count(found)


def _show_contest(row: dict[str, Any]) -> None:
    """Print every contender of one measurement, and the profile of a population step."""
    columns = ("contender", "tokens/s", "start s", "remarks")
    contenders = [
        (
            name,
            _rate(found.get("tokens_per_second")),
            number(found.get("start_seconds"), ".0f"),
            "; ".join([*([found["error"]] if "error" in found else []), *found.get("warnings", ())]),
        )
        for name, found in row.get("results", {}).items()
    ]
    print_table(f"{row['arm']}, {row['seeds']} seeds", columns, contenders, right=columns[1:3])
    apart = row.get("disagreement", "not compared")
    for form, found in (apart if isinstance(apart, dict) else {"eager": apart}).items():
        words = found if isinstance(found, str) else f"{found:.1e}"
        say(f"difference from separate runs after twenty float32 steps, {form}: {words}")
    for name, found in row.get("profile", {}).items():
        show_profile(name, found)
