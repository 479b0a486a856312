"""h2h reproduce."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import tyro

import headtohead.api as api
from headtohead.cli.flags import OneWay, flag, yes_or_no
from headtohead.cli.race import show_left, show_result
from headtohead.cli.tables import print_table
from headtohead.common.numbers import parse_duration


def reproduce(
    paper: Annotated[str, tyro.conf.Positional, flag("PAPER")],
    /,
    *,
    scale: Annotated[Literal["smoke", "small", "paper"], flag()] = "smoke",
    out: Annotated[str | None, flag("DIR")] = None,
    only: Annotated[str, flag("NAME")] = "",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    workers: Annotated[int, flag("COUNT")] = 0,
    threads: Annotated[int, flag("COUNT")] = 1,
    data_dir: Annotated[str | None, flag("DIR")] = None,
    for_: Annotated[str | None, flag(name="for", metavar="TIME")] = None,
    retry: Annotated[Literal["none", "failed"], flag()] = "none",
    compile: OneWay = False,
    no_compile: OneWay = False,
    stack: OneWay = False,
    no_stack: OneWay = False,
    keep_weights: Annotated[bool, flag()] = True,
    allow_failed_check: OneWay = False,
    quiet: Annotated[bool, flag()] = False,
) -> int:
    """Run the studies of a paper and say of each of its claims: supported, contradicted or open, and at which scale.

    Direction and size of effect are judged apart. Run it again and it does only what is missing.

    Example: h2h reproduce coupled --scale smoke --out races/coupled

    Args:
        paper: coupled, sharing, deconstructed, faster_qk, kuramoto, or a TOML file with claims.
        scale: smoke proves that the machinery runs; small takes tens of minutes on one GPU; paper is what was published.
        out: where runs, verdicts, the page and claims.json go; races/PAPER-SCALE when not given.
        only: run one of the paper's studies alone: study, toy or a name; claims are judged by all that stands in DIR.
        device: where to train.
        workers: runs at once; 0: one per core on CPU, one on a GPU.
        threads: threads of each run on CPU; another number gives other last digits.
        data_dir: where the named sets stand; H2H_DATA when not given.
        for_: stop cleanly after that time: 90s, 8m, 1.5h.
        retry: failed: do runs again that failed before.
        compile: compile the model with torch.compile; when nothing is said, on a GPU at 5m and above.
        no_compile: do not.
        stack: train the seeds of an arm in one pass; when nothing is said, on a GPU below 5m where memory allows.
        no_stack: do not.
        keep_weights: keep the trained weights of each run.
        allow_failed_check: train arms that fail the causality check; their verdicts say so and are never better or equivalent.
        quiet: show no progress.
    """
    found = api.reproduce(
        paper,
        scale=scale,
        out=out,
        only=only,
        device=device,
        workers=workers,
        threads=threads,
        data_dir=data_dir,
        seconds=math.inf if for_ is None else parse_duration(for_),
        retry_failed=retry == "failed",
        compile=yes_or_no("compile", compile, no_compile),
        stack=yes_or_no("stack", stack, no_stack),
        keep_weights=keep_weights,
        allow_failed_check=allow_failed_check,
        quiet=quiet,
    )
    for name in found.ran:
        if found.studies[name].verdicts:
            print(f"\n{found.studies[name].manifest.name}")
            show_result(found.studies[name])
    print()
    columns = ("claim", "statement", "published", "direction", "size", "scale", "reason")
    rows = [
        (row.id, row.statement, row.published, row.direction, row.size, row.scale, row.reason)
        for row in found.claims
    ]
    print_table(f"claims at scale {scale}", columns, rows)
    if found.toy is not None and only in ("", "toy"):
        off = [finding for finding in found.toy.findings if not finding.holds]
        print(f"toy:      {len(found.toy.findings) - len(off)} of {len(found.toy.findings)} numbers hold")
        for finding in off:
            print(f"          {finding.words()}")
        print(f"          {found.toy.path}, and toy.html with the pictures beside it")
    print(f"claims:   {found.path}")
    for name, reason in found.trouble.items():
        print(f"study {name} was not run: {reason}")
    return max(show_left(found.summary), int(bool(found.trouble)))
