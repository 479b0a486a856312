"""h2h bench stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from headtohead import api
from headtohead.cli.bench.shown import ratio, show_profile, whole
from headtohead.cli.flags import OneWay, flag, yes_or_no
from headtohead.cli.tables import number, print_table
from headtohead.common.numbers import parse_count, short_count
from headtohead.common.progress import progress_bar


def stack(
    seeds: Annotated[tuple[int, ...], tyro.conf.Positional, flag("COUNT")] = (5, 16),
    /,
    *,
    size: Annotated[str, flag("SIZE")] = "1m",
    arms: Annotated[tuple[str, ...], flag("ARM")] = ("standard",),
    batch: Annotated[str, flag("COUNT")] = "8192",
    rounds: Annotated[int, flag("COUNT")] = 6,
    precision: Annotated[Literal["bf16", "float32"], flag()] = "bf16",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    compile: OneWay = False,
    no_compile: OneWay = False,
    no_processes: OneWay = False,
    profile: Annotated[bool, flag()] = False,
    out: Annotated[Path | None, flag("FILE")] = None,
    quiet: Annotated[bool, flag()] = False,
) -> int:
    """Measure seeds trained in one pass beside one run by itself and beside as many separate processes.

    Args:
        seeds: how many seeds; each count makes a row.
        size: a model shape (h2h list).
        arms: whose seeds; each makes a row.
        batch: tokens per step of each seed.
        rounds: turns of each contender; medians are shown.
        precision: arithmetic; bf16 keeps float32 weights.
        device: where.
        compile: compiled contenders alone; when nothing is said, on a GPU compiled ones and others.
        no_compile: none that are compiled.
        no_processes: leave the separate processes out.
        profile: also show where the time of a stacked step goes.
        out: a file that keeps every row; rows that stand there are not measured again.
        quiet: show no progress.
    """
    with progress_bar("bench stack", quiet) as progress:
        document = api.bench_stack(
            seeds,
            size=size,
            arms=arms,
            batch=parse_count(batch, "--batch"),
            rounds=rounds,
            precision=precision,
            device=device,
            compile=yes_or_no("compile", compile, no_compile),
            processes=not no_processes,
            profile=profile,
            out=out,
            progress=progress,
        )
    known = whole(
        document, "arm", "seeds", "size", "dims", "tokens_per_step", "precision", "recorded", "device"
    )
    columns = (
        *("arm", "seeds", "stacked tokens/s", "single run", "stacked over it", "separate processes"),
        "stacked over them",
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
        how = "steps recorded as CUDA graphs" if last["recorded"] else "steps one by one"
        title = f"{last['size']} ({last['dims']}), {last['tokens_per_step']:,} tokens per step and seed, {last['precision']}, {how}, {last['device']}; the best of each kind"
        print_table(title, columns, rows, right=columns[1:])
    for row in known:
        _show_contest(row)
    print(json.dumps(document, ensure_ascii=False))
    return 0


def _rate(found: float | None) -> str:
    return "–" if found is None else short_count(found)


def _show_contest(row: dict[str, Any]) -> None:
    """Print every contender of a row of stacked seeds, and where the time of its stacked steps goes."""
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
    for form, found in (apart if isinstance(apart, dict) else {"as it stands": apart}).items():
        words = found if isinstance(found, str) else f"{found:.1e}"
        print(f"off separate runs by, float32, twenty steps, {form}: {words}")
    for name, found in row.get("profile", {}).items():
        show_profile(name, found)
