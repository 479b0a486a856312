"""h2h bench population."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from headtohead import api
from headtohead.cli.bench.output import BenchOptions, Cell, Row, cell, end, show, show_profile, whole
from headtohead.cli.shared.options import Switch, flag
from headtohead.common.numbers import short_count
from headtohead.common.terminal import say

COLUMNS: dict[str, Cell] = {
    "arm": cell("arm"),
    "seeds": cell("seeds"),
    "population tokens/s": cell("stacked_tokens_per_second", short_count),
    "single run": cell("single_tokens_per_second", short_count),
    "ratio": cell("over_single", "{:.2f}x".format),
    "separate processes": cell("separate_tokens_per_second", short_count),
    "ratio to them": cell("over_separate", "{:.2f}x".format),
}
CONTENDERS: dict[str, Cell] = {
    "contender": cell("name"),
    "tokens/s": cell("tokens_per_second", short_count),
    "start s": cell("start_seconds", ".0f"),
    "remarks": lambda row: "; ".join([*([row["error"]] if "error" in row else []), *row.get("warnings", ())]),
}


@dataclass(frozen=True)
class Options(BenchOptions):
    """Options.

    Args:
        seeds: rows of the population; each number is one measurement
        size: model shape, see h2h list sizes
        arms: arms to time, one measurement each
        batch: tokens per step of each row
        rounds: rounds per contender; medians are shown
        precision: arithmetic; bf16 keeps float32 weights
        compile: only compiled contenders, or none (default: both on GPU)
        processes: do not time separate processes (default: time them)
        profile: also show the kernels of a population step
    """

    seeds: Annotated[tuple[int, ...], flag("COUNT", positional=True)] = (5, 16)
    size: Annotated[str, flag("SIZE")] = "1m"
    arms: Annotated[tuple[str, ...], flag("ARM")] = ("standard",)
    batch: Annotated[str, flag("COUNT")] = "8192"
    rounds: int = 6
    precision: Literal["bf16", "float32"] = "bf16"
    compile: Switch = "auto"
    processes: bool = True
    profile: bool = False


def command(given: Options = Options()) -> int:  # noqa: B008  frozen
    """Time a population of seeds next to a single run and to separate processes."""
    document = given.measure("population", api.bench_population)
    known = whole(
        document, "arm", "seeds", "size", "dims", "tokens_per_step", "precision", "recorded", "device"
    )
    if known:
        last = known[-1]
        how = "steps captured as CUDA graphs" if last["recorded"] else "steps launched one by one"
        title = (
            f"{last['size']} ({last['dims']}), {last['tokens_per_step']:,} tokens per step and seed, "
            f"{last['precision']}, {how}, {last['device']}; the best of each kind"
        )
        show(title, COLUMNS, known)
    for row in known:
        _show_contest(row)
    return end(document)


def _show_contest(row: Row) -> None:
    """Print every contender of one measurement, and the profile of a population step."""
    contenders = [{"name": name, **found} for name, found in row.get("results", {}).items()]
    show(f"{row['arm']}, {row['seeds']} seeds", CONTENDERS, contenders, left=("remarks",))
    apart = row.get("disagreement", "not compared")
    for form, found in (apart if isinstance(apart, dict) else {"eager": apart}).items():
        words = found if isinstance(found, str) else f"{found:.1e}"
        say(f"difference from separate runs after twenty float32 steps, {form}: {words}")
    for name, found in row.get("profile", {}).items():
        show_profile(name, found)
