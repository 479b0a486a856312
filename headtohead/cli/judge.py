"""h2h forecast, verdict."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import tyro

from headtohead import api
from headtohead.cli.flags import flag
from headtohead.cli.race import chosen_study, parse_seeds, show_result, show_verdicts
from headtohead.cli.tables import number, print_table
from headtohead.common.numbers import parse_count, short_bytes, short_count, short_time
from headtohead.study.judge.forecast import Forecast
from headtohead.study.store.manifest import metric_label


def forecast(
    study: Annotated[str | None, tyro.conf.Positional, flag("STUDY.toml")] = None,
    /,
    *,
    arms: Annotated[tuple[str, ...], flag("ARM [ARM ...]")] = (),
    corpus: Annotated[tuple[str, ...], flag("NAME")] = (),
    size: Annotated[tuple[str, ...], flag("NAME")] = (),
    tasks: Annotated[tuple[str, ...], flag("TASK")] = (),
    from_: Annotated[str | None, flag(name="from", metavar="RUN")] = None,
    tokens: Annotated[str | None, flag("COUNT")] = None,
    seeds: Annotated[str | None, flag("COUNT|A,B,...")] = None,
    shape: Annotated[tuple[str, ...], flag("RULE")] = (),
    length: Annotated[tuple[str, ...], flag("RULE")] = (),
    margin: Annotated[float | None, flag("BITS")] = None,
    batch: Annotated[str | None, flag("COUNT")] = None,
    context: Annotated[tuple[str, ...], flag("COUNT")] = (),
    branches: Annotated[tuple[str, ...], flag("COUNT")] = (),
    set: Annotated[tuple[str, ...], flag("KEY=VALUE")] = (),
    out: Annotated[str | None, flag("DIR")] = None,
    spread: Annotated[float | None, flag("BITS")] = None,
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    workers: Annotated[int, flag("COUNT")] = 0,
    threads: Annotated[int, flag("COUNT")] = 1,
    data_dir: Annotated[str | None, flag("DIR")] = None,
    keep_weights: Annotated[bool, flag()] = True,
    json_: Annotated[bool, flag(name="json")] = False,
) -> int:
    """Say what a study will take (runs, tokens, FLOPs, time, disk) and what it could find, before anything runs.

    Time comes from a few training steps of each arm on this device, or from finished runs in DIR.
    Example: h2h forecast mine.toml --out races/mine --spread 0.01

    Args:
        study: a TOML file; the flags below override what it says.
        arms: contenders: mechanisms with options, layouts, or FILE.py:Class.
        corpus: stdlib, file:PATH, or a named set (h2h data list).
        size: a model shape (h2h list).
        tasks: tasks in place of a corpus, a contest each.
        from_: the run whose weights a task's models start from.
        tokens: tokens each run is trained on: 120000, 120k, 65M.
        seeds: how many paired seeds, or which.
        shape: what is held equal in the model.
        length: what is held equal in training.
        margin: differences within it count as none, in bits per byte or a task's metric.
        batch: tokens per step.
        context: tokens in a window; several make a contest each.
        branches: token counts at which a decayed model is wanted, in place of --tokens.
        set: any other setting of the study, such as warmup=0.05.
        out: a study's directory; its finished runs give speed and spread, and are not counted again.
        spread: standard deviation over seeds of the paired difference, in bits per byte or a task's metric.
        device: where it will be trained.
        workers: runs at once; 0: one per core on CPU, one on a GPU.
        threads: threads of each run on CPU.
        data_dir: where the named sets stand; H2H_DATA when not given.
        keep_weights: count the trained weights among what stays on disk.
        json_: as one JSON document.
    """
    given: dict[str, Any] = {
        "arms": list(arms) or None,
        "corpus": list(corpus) or None,
        "tasks": list(tasks) or None,
        "from": from_,
        "size": list(size) or None,
        "tokens": None if tokens is None else parse_count(tokens, "--tokens"),
        "seeds": None if seeds is None else parse_seeds(seeds),
        "shape": list(shape) or None,
        "length": list(length) or None,
        "margin": margin,
        "batch": None if batch is None else parse_count(batch, "--batch"),
        "context": [parse_count(count, "--context") for count in context] or None,
        "branches": [parse_count(count, "--branches") for count in branches] or None,
    }
    found = api.forecast(
        chosen_study(study, given, set),
        out,
        spread=spread,
        device=device,
        workers=workers,
        threads=threads,
        data_dir=data_dir,
        keep_weights=keep_weights,
        quiet=json_,
    )
    if json_:
        print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False))
    else:
        _show(found)
    return 0


def _show(found: Forecast) -> None:
    columns = ("arm", "contest", "runs", "tokens", "FLOPs", "tokens/s", "time", "speed")
    rows = [
        (
            arm.label,
            arm.contest,
            arm.runs,
            short_count(arm.tokens),
            f"{arm.flops:.2g}",
            short_count(arm.tokens_per_second),
            short_time(arm.seconds),
            arm.source,
        )
        for arm in found.arms
    ]
    left = found.runs - found.done
    print_table(f"{left} of {found.runs} runs to do", columns, rows, right=columns[2:7])
    at_once = f", {found.workers} at once if they do not slow each other" if found.workers > 1 else ""
    print(f"tokens:  {short_count(found.tokens)}")
    print(f"FLOPs:   {found.flops:.3g}")
    print(f"time:    about {short_time(found.seconds)} on {found.device}{at_once}")
    disk = f"{short_bytes(found.disk_bytes)}, and {short_bytes(found.working_bytes)} while at work"
    print(f"disk:    {disk}")
    known = found.spread is not None
    unit = metric_label(found.metric) if known else "spreads"
    form = ".4f" if known else ".2f"
    print(f"\ndifference found with probability {found.power:g}, two-sided 5 %, in {unit}:")
    table = [
        (
            f"{row.seeds} (planned)" if row.seeds == found.seeds else str(row.seeds),
            number(row.alone, form),
            number(row.holm, form),
        )
        for row in found.detectable
    ]
    heads = ("seeds", "alone", f"among {found.compared} arms (Holm)")[: 3 if found.compared > 1 else 2]
    print_table("", heads, [row[: len(heads)] for row in table], right=heads)
    if known:
        print(
            f"spread of the paired difference over seeds: {found.spread:.4f} {unit} ({found.spread_source})"
        )
        if found.margin > 0:
            words = f"{found.seeds_for_margin} seeds" if found.seeds_for_margin else "more than 1,000 seeds"
            print(f"a difference as large as the margin ({found.margin:g}) takes {words}")
    else:
        print(
            "the spread of the paired difference over seeds is not known: give --spread BITS, "
            "or --out DIR of a study with finished runs"
        )


def verdict(
    table: Annotated[str, tyro.conf.Positional, flag("RUNS.csv")],
    /,
    *,
    arm: Annotated[str, flag("COLUMN")],
    seed: Annotated[str, flag("COLUMN")],
    metric: Annotated[str, flag("COLUMN")],
    by: Annotated[tuple[str, ...] | None, flag("COLUMN")] = None,
    baseline: Annotated[str, flag("NAME")] = "",
    primary: Annotated[str, flag("NAME")] = "",
    margin: Annotated[float | None, flag("X")] = None,
    better: Annotated[Literal["lower", "higher"], flag()] = "lower",
    out: Annotated[str | None, flag("DIR")] = None,
    json_: Annotated[bool, flag(name="json")] = False,
) -> int:
    """Judge runs trained elsewhere: a CSV file with one row per run, as any tracker exports it.

    Example: h2h verdict runs.csv --arm model --seed seed --metric val_loss --margin 0.01 --out judged

    Args:
        table: the file: comma, semicolon or tab between cells, the first row names the columns.
        arm: the column that says which contender a run is of.
        seed: the column with the seed; runs of one seed are paired.
        metric: the column that is compared.
        by: columns that set contests apart; corpus, size, shape and length where the table has them, when not given.
        baseline: the arm the others are measured against; the first one when not given.
        primary: the one comparison that was planned; none when not given.
        margin: differences within it count as none; without it nothing can be equivalent, bits per byte apart (0.005).
        better: which way the metric is better.
        out: where verdicts.json and the page go.
        json_: the verdicts as one JSON document.
    """
    result = api.judge(
        table,
        arm=arm,
        seed=seed,
        metric=metric,
        by=by,
        baseline=baseline,
        primary=primary,
        margin=margin,
        better=better,
        out=out,
    )
    if json_:
        print(json.dumps([row.as_dict() for row in result.verdicts], indent=1, ensure_ascii=False))
    elif out is not None:
        show_result(result)
    else:
        show_verdicts(result)
    return 0
