"""h2h reproduce."""

from __future__ import annotations

from typing import Annotated, Literal

from headtohead import api
from headtohead.cli.shared.exit_codes import ExitCode
from headtohead.cli.shared.options import RunOptions, flag
from headtohead.cli.shared.results import show_left, show_result
from headtohead.cli.shared.tables import print_table
from headtohead.common.terminal import say


def command(
    paper: Annotated[str, flag("PAPER")],
    *,
    run: RunOptions = RunOptions(),  # noqa: B008  frozen
    scale: Literal["smoke", "tiny", "small", "paper"] = "smoke",
    out: Annotated[str | None, flag("DIR")] = None,
    only: Annotated[str, flag("NAME")] = "",
) -> int:
    """Run the studies of a paper and decide each of its claims: supported, contradicted or open.

    Direction and size of an effect are judged separately. Started again, it continues. Exit code 3 when --time-limit or
    Ctrl-C stopped it with work left, 1 when a study could not be run or runs have no result.

    Example: h2h reproduce coupled --scale smoke --out races/coupled

    Args:
        paper: coupled, sharing, deconstructed, faster_qk, kuramoto, or a TOML file with claims
        scale: smoke: everything runs, nothing is decided; tiny: 20 to 100 minutes on two CPU cores (not faster_qk); small: on a GPU; paper: as published
        out: directory of runs, verdicts, report and claims.json (default: races/PAPER-SCALE)
        only: run one study of the paper: study, toy, or its name (default: all)
    """
    found = api.reproduce(paper, scale=scale, out=out, only=only, **run.arguments())
    for name in found.ran:
        if name in found.studies and found.studies[name].verdicts:
            say(f"\n{found.studies[name].manifest.name}")
            show_result(found.studies[name])
    say()
    columns = ("claim", "statement", "published", "direction", "size", "scale", "reason")
    rows = [[getattr(row, name) for name in ("id", *columns[1:])] for row in found.claims]
    print_table(f"claims at scale {scale}", columns, rows)
    if found.toy is not None and only in ("", "toy"):
        off = [finding for finding in found.toy.findings if not finding.holds]
        total = len(found.toy.findings)
        say(f"toy:      {total - len(off)} of {total} numbers within tolerance")
        for finding in off:
            say(f"          {finding.words()}")
        say(f"          {found.toy.path}; pictures: toy.html in the same directory")
    say(f"claims:   {found.path}")
    for name, reason in found.trouble.items():
        say(f"study {name} was not run: {reason}")
    for name in found.unstarted:
        say(f"study {name} was not started; repeat the same command to continue")
    code = show_left(found.summary)
    if found.unstarted:
        return ExitCode.UNFINISHED
    return max(code, ExitCode.PROBLEM) if found.trouble else code
