"""h2h forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import ClusterOptions, DeviceOptions, Json, StudyOptions, flag
from headtohead.cli.shared.tables import print_rows, print_table
from headtohead.common.numbers import number, short_bytes, short_count, short_time
from headtohead.common.terminal import say, say_json
from headtohead.common.text import counted
from headtohead.study.judge.forecast import ArmForecast, Forecast
from headtohead.study.judge.schedule import ClusterForecast, Step
from headtohead.study.store.manifest import metric_label


def command(
    study: Annotated[str | None, flag("STUDY")] = None,
    *,
    settings: StudyOptions = StudyOptions(),  # noqa: B008  frozen
    where: DeviceOptions = DeviceOptions(),  # noqa: B008  frozen
    cluster: ClusterOptions = ClusterOptions(),  # noqa: B008  frozen
    out: Annotated[str | None, flag("DIR")] = None,
    spread: Annotated[float | None, flag("NUMBER")] = None,
    json_: Json = False,
) -> None:
    """Estimate what a study costs (time, FLOPs, disk) and which differences it can detect, before it runs.
    Speed is measured on a few training steps of each arm, or taken from finished runs in --out.

    Example: h2h forecast mine.toml --on ray --nodes 8 --gpus-per-node 8 --spread 0.01

    Args:
        study: study file, or a shipped study: h2h list studies (default: none)
        out: study directory whose finished runs give speed and spread (default: none)
        spread: standard deviation over seeds of the paired difference (default: from --out)
        json_: print one JSON document
    """
    options = where.arguments() | cluster.arguments()
    found = api.forecast(settings.study(study), out, spread=spread, quiet=json_, **options)
    if json_:
        say_json(found.as_dict(), indent=1)
    else:
        _show(found)


def _show(found: Forecast) -> None:
    columns: dict[str, Callable[[ArmForecast], object]] = {
        "arm": lambda arm: arm.label,
        "contest": lambda arm: arm.contest,
        "runs": lambda arm: arm.runs,
        "rows": lambda arm: arm.rows,
        "tokens": lambda arm: short_count(arm.tokens),
        "FLOPs": lambda arm: f"{arm.flops:.2g}",
        "tokens/s": lambda arm: short_count(arm.tokens_per_second),
        "time": lambda arm: short_time(arm.seconds),
        "speed": lambda arm: arm.source,
    }
    title = f"{found.runs - found.done} of {found.runs} runs to do"
    if all(arm.rows == 1 for arm in found.arms):
        del columns["rows"]
    print_rows(title, found.arms, columns, text=("arm", "contest", "speed"))
    say(f"tokens:  {short_count(found.tokens)}")
    say(f"FLOPs:   {found.flops:.3g}")
    if found.cluster is None:
        at_once = f", {found.workers} at the same time" if found.workers > 1 else ""
        say(f"time:    about {short_time(found.seconds)} on {found.device}{at_once}")
    else:
        _show_cluster(found.cluster)
    say(f"disk:    {short_bytes(found.disk_bytes)}, and {short_bytes(found.working_bytes)} while running")
    if found.cluster is not None and found.cluster.critical_path:
        _show_critical_path(found.cluster)
    known = found.spread is not None
    unit = metric_label(found.metric) if known else "spreads"
    form = ".4f" if known else ".2f"
    say(f"\ndifference detected with probability {found.power:g}, two-sided 5 %, in {unit}:")
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
        say(f"spread of the paired difference over seeds: {found.spread:.4f} {unit} ({found.spread_source})")
        if found.margin > 0:
            words = f"{found.seeds_for_margin} seeds" if found.seeds_for_margin else "more than 1,000 seeds"
            say(f"a difference as large as the margin ({found.margin:g}) needs {words}")
    else:
        say(
            "the spread of the paired difference over seeds is unknown: give --spread NUMBER, "
            "or --out DIR of a study with finished runs"
        )


def _show_cluster(found: ClusterForecast) -> None:
    nodes = f"{counted(found.nodes, 'node')} with {counted(found.devices, found.kind)}"
    say(f"time:    about {short_time(found.seconds)} on {nodes}, {counted(found.slots, 'slot')}")
    say(
        f"{found.kind}-hours: {found.device_hours:.3g} used of {found.reserved_hours:.3g} reserved, "
        f"utilization {found.utilization:.0%}"
    )
    if found.enough_nodes < found.nodes:
        nearly = f"{counted(found.enough_nodes, 'node')} would take {short_time(found.enough_seconds)}"
        say(f"nodes:   {nearly}, within 5 %")
    say(f"assumed: every {found.kind} is as fast as the device measured here, {found.measured_on}")
    if found.kind == "GPU" and found.measured_on.startswith("cpu"):
        say("         that is no GPU: run the forecast on a machine with one of the cluster's GPUs")
    if found.shared:
        say(f"         runs that share a {found.kind} have their share of its speed")


def _show_critical_path(found: ClusterForecast) -> None:
    columns: dict[str, Callable[[Step], object]] = {
        "run": lambda step: step.name,
        "contest": lambda step: step.contest,
        "time": lambda step: short_time(step.seconds),
    }
    title = f"critical path, which no number of nodes shortens: {short_time(found.critical_seconds)}"
    print_rows(title, found.critical_path, columns, text=("run", "contest"))
