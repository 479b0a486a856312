"""Measure training speed of every mechanism relative to `standard`, interleaved in one process, or memory growth (--memory).

    python benchmarks/mechanisms.py                                  # CPU: nano, eager, float32
    python benchmarks/mechanisms.py --device cuda --out speed.json --minutes 9
    python benchmarks/mechanisms.py --device cuda --memory --out memory.json

On a GPU the model is a two-layer slice of 60m, bf16, compiled, at contexts 512 and 2048. Compiling each arm takes long, so
every row is written to --out as soon as it is measured, and existing rows of the same commit and setting are reused (without
git, H2H_COMMIT names the commit). An arm that does not support rotary positions is measured with learned ones, against a
`standard` that also uses them. An arm that fails gives a row with the reason. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from memory_held import grown, held_bytes, maps_in, peak_over, verdict

from headtohead.bench.clock import mean_seconds, wait
from headtohead.bench.harness import Rows, attempt
from headtohead.common.errors import UserError
from headtohead.common.files import finite
from headtohead.common.numbers import short_bytes, short_time
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from headtohead.study.environment import choose_device, commit, device_name, provenance
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer

FORMS = (
    "sharing:tie=kv",
    "sharing:tie=kv,kv_heads=2",
    "differential:version=2",
    "coupled:dynamics=leapfrog",
    "kuramoto:gate=pair,successor=replace",
    "approximate:features=elementwise",
    "(gated_linear standard)",
)
"""Arms measured in addition to every mechanism at its default."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings shared by all arms; part of the key of a row."""

    kind: str
    device: str
    size: str
    contexts: tuple[int, ...]
    tokens: int
    """Tokens per step; 0: one sequence."""
    precision: str
    compiled: bool
    threads: int


class Fixture:
    """Builds trainers of arms, and caches those of `standard` that the arms are compared with."""

    def __init__(self, given: argparse.Namespace, setting: Setting, context: int) -> None:
        self.setting, self.device = setting, torch.device(given.device)
        self.size = dataclasses.replace(sliced(given), context=context)
        self.partners: dict[str, Trainer] = {}
        top = self.size.vocabulary
        # More windows than a step uses, so that batches are gathered as from a corpus.
        count = 4 * max(setting.tokens, context) + 1
        self.text = np.random.default_rng(0).integers(0, top, count, dtype=np.uint16)

    def trainer(self, arm: str, positions: str) -> Trainer:
        """Return a Trainer on a new model of this arm."""
        size = self.size.with_settings(positions=positions)
        layers = parse_layout(arm).layers(size.layers)
        model = Decoder(size, layers, seed=0, companion=self.text).to(self.device)
        windows = Windows(
            Split(self.text, np.zeros(1, dtype=np.uint64), len(self.text)), size.context, seed=0
        )
        settings = TrainSettings(
            tokens=10**9,
            batch=self.setting.tokens or size.context,
            precision=self.setting.precision,  # type: ignore[arg-type]
        )
        # The trainer resets Dynamo before it compiles, which would drop the graphs of the models measured alongside.
        with mock.patch.object(torch._dynamo, "reset"):
            return Trainer(model, windows, settings, compile=self.setting.compiled)

    def partner(self, positions: str) -> Trainer:
        """Return the cached trainer of `standard` with these positions."""
        if positions not in self.partners:
            self.partners[positions] = self.trainer("standard", positions)
        return self.partners[positions]

    def seconds(self, trainer: Trainer, steps: int = 1) -> float:
        """Return the mean seconds per step over `steps` steps, including the device's work."""
        wait(self.device)
        return mean_seconds(trainer._one_step, self.device, steps)


def sliced(given: argparse.Namespace) -> Size:
    """Return the two-layer slice; for memory with a vocabulary of 256, so that the output layer does not dominate."""
    size = dataclasses.replace(SIZES[given.size], layers=2)
    return dataclasses.replace(size, vocabulary=256) if given.memory else size


def positions_of(arm: str) -> str:
    """Return "rope", or "learned" for an arm that does not support it."""
    layers = parse_layout(arm).layers(2)
    kinds = [composed.base.kind for composed in layers]
    able = all("rope" in kind.supports.positions for kind in kinds if issubclass(kind, Mechanism))
    return "rope" if able else "learned"


def measure_speed(bench: Fixture, arm: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return tokens/s of an arm and its ratio to `standard`, round by round."""
    positions = positions_of(arm)
    partner = bench.partner(positions)
    graphs = compiled_graphs()
    began = time.perf_counter()
    trainer = bench.trainer(arm, positions)
    bench.seconds(trainer)
    first = time.perf_counter() - began
    new_graphs = compiled_graphs() - graphs
    for warm in (partner, trainer):
        bench.seconds(warm, 3)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        # The order alternates, so that after-effects of a turn (heat, caches) affect both sides equally.
        for index in (0, 1) if turn % 2 else (1, 0):
            times[index].append(bench.seconds((partner, trainer)[index], steps))
    # The median of per-round ratios: other load on the machine affects both sides of a round.
    ratios = [theirs / ours for theirs, ours in zip(*times, strict=True)]
    tokens = trainer.settings.batch
    return {
        "positions": positions,
        "parameters": trainer.model.parameter_count(),
        "tokens_per_step": tokens,
        "tokens_per_second": round(tokens / statistics.median(times[1])),
        "standard_tokens_per_second": round(tokens / statistics.median(times[0])),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)],
        "rounds": rounds,
        "steps_per_turn": steps,
        "micro_batch": trainer.micro,
        "first_step_seconds": round(first, 2),
        "graphs": new_graphs if bench.setting.compiled else None,
    }


def compiled_graphs() -> int:
    """Return the number of graphs compiled so far; an arm without graph breaks adds one."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def measure_memory(benches: Iterable[Fixture], arm: str) -> dict[str, Any]:
    """Return the memory of training and prefill at each length, beyond model, gradients and optimizer state."""
    positions, rows = positions_of(arm), []
    for bench in benches:
        row: dict[str, Any] = {"context": bench.size.context}
        for name, work in (("error", training_memory), ("prefill_error", prefill_memory)):
            row |= attempt(work, bench, arm, positions, name=name)
        rows.append(row)
    growth = {key: grown(rows, key) for key in ("train_bytes", "prefill_bytes", "cache_bytes")}
    maps = {key: maps_in(rows, key, bench.size.heads) for key in ("train_bytes", "prefill_bytes")}
    return {
        "positions": positions,
        "lengths": rows,
        "growth": growth,
        "maps": maps,
        "verdict": verdict(rows, growth["train_bytes"], maps["train_bytes"]),
    }


def training_memory(bench: Fixture, arm: str, positions: str) -> dict[str, Any]:
    """Return the peak memory of forward and backward on one sequence."""
    trainer = bench.trainer(arm, positions)
    trainer._one_step()  # optimizer states, tables, compilation
    parts = [*trainer.batches.parts(trainer.step, trainer.micro)]
    trainer._backward(parts)  # gradients stay allocated and count as memory of the model
    own = held_bytes(bench.device)
    return {"own_bytes": own, "train_bytes": peak_over(bench.device, lambda: trainer._backward(parts))}


def prefill_memory(bench: Fixture, arm: str, positions: str) -> dict[str, Any]:
    """Return the declared and allocated cache bytes, the bytes kept on the device, and the peak beyond the caches."""
    size = bench.size.with_settings(positions=positions)
    layers = parse_layout(arm).layers(size.layers)
    model = Decoder(size, layers, seed=0, companion=bench.text).to(bench.device).eval()
    if not model.decodable:
        return {"cache_declared": None}
    tokens = torch.from_numpy(bench.text[: size.context].astype(np.int64)).to(bench.device).unsqueeze(0)
    declared = model.cache_bytes(1, size.context, torch.bfloat16)
    with torch.no_grad(), torch.autocast(bench.device.type, torch.bfloat16):
        model.hidden(tokens[:, :1])  # rotary tables
        before = held_bytes(bench.device)
        caches = model.new_caches(1, size.context, torch.bfloat16)
        peak = peak_over(bench.device, lambda: model.hidden(tokens, caches=caches))
    after = held_bytes(bench.device)
    kept = None if before is None or after is None else after - before
    return {
        "cache_declared": declared,
        "cache_bytes": caches.bytes,
        "cache_kept": kept,
        "prefill_bytes": peak,
    }


class Clock:
    """Progress, time left, and whether another row fits the time limit."""

    def __init__(self, rows: int, minutes: float) -> None:
        self.rows, self.done, self.longest = rows, 0, 0.0
        self.began = self.last = time.monotonic()
        self.limit = self.began + 60 * minutes if minutes else float("inf")

    def fits(self) -> bool:
        """Return whether a row as slow as the slowest so far would finish in time."""
        return time.monotonic() + self.longest < self.limit

    def emit(self, message: str) -> None:
        """Print the result of a row and the time left."""
        now = time.monotonic()
        self.done += 1
        self.longest, self.last = max(self.longest, now - self.last), now
        left = (now - self.began) / self.done * (self.rows - self.done)
        about = f"; about {short_time(left)} left" if self.done < self.rows else ""
        print(f"[{self.done}/{self.rows}] {message}{about}", flush=True)


def work_through(given: argparse.Namespace, setting: Setting, rows: Rows) -> list[dict[str, Any]]:
    """Measure every arm that has no row yet; return the rows of this call's arms in order."""
    groups = [given.contexts] if given.memory else [[context] for context in given.contexts]
    same = {"commit": commit()} | json.loads(json.dumps(dataclasses.asdict(setting)))
    keys = [[same | {"contexts": group, "arm": arm} for arm in given.arms] for group in groups]
    missing = [[key for key in part if given.again or rows.find(key) is None] for part in keys]
    clock = Clock(sum(map(len, missing)), given.minutes)
    print(f"{clock.rows} of {sum(map(len, keys))} rows to measure on {setting.device}", flush=True)
    for group, part in zip(groups, missing, strict=True):
        torch._dynamo.reset()
        benches = [Fixture(given, setting, context) for context in group]
        for key in part:
            if not clock.fits():
                print(
                    f"time limit reached: {clock.rows - clock.done} rows left for the next call",
                    flush=True,
                )
                return [row for part in keys for key in part if (row := rows.find(key))]
            arm = key["arm"]
            if given.memory:
                found = attempt(measure_memory, benches, arm, name="error")
            else:
                found = attempt(measure_speed, benches[0], arm, given.rounds, given.steps, name="error")
            rows.add(key, finite(found))
            clock.emit(f"{'/'.join(map(str, group))} {arm}: {summary(found)}")
    return [row for part in keys for key in part if (row := rows.find(key))]


def summary(row: dict[str, Any]) -> str:
    """Return a short summary of a row."""
    if "error" in row:
        return f"failed ({row['error']})"
    if "verdict" in row:
        sizes = " to ".join(shown(length.get("train_bytes"), short_bytes) for length in row["lengths"])
        return f"{sizes}, {row['verdict']}"
    low, _, high = row["ratio_quartiles"]
    return (
        f"{row['tokens_per_second']:,} tokens/s, {row['ratio']:.3f} of standard ({low:.3f} to {high:.3f}), "
        f"first step {row['first_step_seconds']:.1f} s"
    )


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[str]) -> None:
    """Print a table; columns not named in `left` are right-aligned. Without rich, print plain text."""
    try:
        from headtohead.cli.shared import tables
    except ModuleNotFoundError:
        print("\n".join("  ".join(map(str, row)) for row in (columns, *rows)))
    else:
        tables.print_table("", columns, rows, right=[name for name in columns if name not in left])


def shown(value: float | None, form: str | Callable[[float], str] = ".2f") -> str:
    """Return the formatted number, or a dash for None."""
    if value is None:
        return "–"
    return format(value, form) if isinstance(form, str) else form(value)


def show_speed(rows: list[dict[str, Any]]) -> None:
    """Print the table of tokens/s."""
    bare = {row["contexts"][0]: row for row in rows if row["arm"] == "no_attention" and "ratio" in row}
    table: list[Sequence[object]] = []
    for row in rows:
        context, arm = row["contexts"][0], row["arm"]
        if "error" in row:
            table.append((context, arm, row["error"], *[""] * 5))
            continue
        low, _, high = row["ratio_quartiles"]
        alone = None
        if context in bare and row["positions"] == bare[context]["positions"]:
            rest = 1 / bare[context]["ratio"]
            alone = (1 / row["ratio"] - rest) / (1 - rest)
        rates = (f"{row['parameters']:,}", f"{row['tokens_per_second']:,}", f"{row['ratio']:.3f}")
        table.append((context, arm, row["positions"], *rates, f"{low:.3f} to {high:.3f}", shown(alone)))
    columns = [
        "context",
        "arm",
        "positions",
        "parameters",
        "tokens/s",
        "of standard",
        "quartiles",
        "layer's time",
    ]
    print_table(columns, table, left=("arm", "positions"))
    print("layer's time: step time minus that of no_attention, relative to the same difference of standard")


def show_memory(rows: list[dict[str, Any]]) -> None:
    """Print the table of bytes and growth."""
    measured = [row for row in rows if "lengths" in row]
    contexts = [f"{length['context']:,}" for length in measured[0]["lengths"]] if measured else []
    columns = ["arm", *(f"training, {context}" for context in contexts), "growth", "maps", "verdict"]
    columns += [*(f"prefill, {context}" for context in contexts), "its growth"]
    columns += [*(f"cache, {context}" for context in contexts), "declared"]
    table: list[Sequence[object]] = []
    for row in rows:
        if "error" in row:
            table.append((row["arm"], row["error"], *[""] * (len(columns) - 2)))
            continue
        train, prefill, cache = (
            [shown(length.get(key), short_bytes) for length in row["lengths"]]
            for key in ("train_bytes", "prefill_bytes", "cache_bytes")
        )
        growth, maps = row["growth"], row["maps"]
        train += [shown(growth["train_bytes"]), shown(maps["train_bytes"]), row["verdict"]]
        prefill += [shown(growth["prefill_bytes"])]
        table.append((row["arm"], *train, *prefill, *cache, declared_summary(row["lengths"])))
    print_table(columns, table, left=("arm", "verdict", "declared"))
    print("maps: memory that grows with the square of the length, in units of one layer's map in bf16")


def declared_summary(lengths: list[dict[str, Any]]) -> str:
    """Return whether the caches allocate what they declare."""
    for length in lengths:
        if "prefill_error" in length:
            return str(length["prefill_error"])
        if length.get("cache_declared") is None:
            return "no cache"
        if length["cache_declared"] != length["cache_bytes"]:
            return f"{length['cache_declared']:,} declared, {length['cache_bytes']:,} allocated"
        # Folded weights are kept with a cache, and the allocator rounds up.
        if length["cache_kept"] is not None and length["cache_kept"] > 1.01 * length["cache_bytes"] + 2**20:
            return f"as declared; {short_bytes(length['cache_kept'])} kept in all"
    return "as declared"


def arguments() -> argparse.Namespace:
    """Return the parsed arguments, with the device's defaults filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--memory", action="store_true", help="measure memory at two lengths instead of speed"
    )
    parser.add_argument(
        "--arms", nargs="+", help="arms to measure (default: every mechanism, and some variants)"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="turns of each arm and of standard (at least 2)"
    )
    parser.add_argument("--steps", type=int, help="steps per turn (default: 1; 10 on a GPU)")
    parser.add_argument(
        "--size", choices=sorted(SIZES), help="size, cut to two layers (default: nano; 60m on a GPU)"
    )
    parser.add_argument(
        "--contexts",
        "--lengths",
        nargs="+",
        type=int,
        help="context lengths (default: the size's; 512 2048 on a GPU; 8192 32768 for memory)",
    )
    parser.add_argument("--tokens", type=int, help="tokens per step (default: 8,192; 32,768 on a GPU)")
    parser.add_argument(
        "--precision", choices=("float32", "bf16"), help="default: float32; bf16 on a GPU and for memory"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="use torch.compile, as the trainer does (default: on for speed on a GPU)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, help="JSON file for the rows; existing rows are reused")
    parser.add_argument("--again", action="store_true", help="measure existing rows again")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="start no row that would end later (0: no limit)"
    )
    given = parser.parse_args()
    given.arms = given.arms or [*builtin_mechanisms(), *FORMS]
    try:
        gpu = choose_device(given.device).type == "cuda"
        for arm in given.arms:
            parse_layout(arm).layers(2)
    except UserError as error:
        parser.error(str(error))
    given.size = given.size or ("60m" if gpu or given.memory else "nano")
    given.steps = given.steps or (10 if gpu else 1)
    given.precision = given.precision or ("bf16" if gpu or given.memory else "float32")
    given.compile = gpu and not given.memory if given.compile is None else given.compile
    usual = [8192, 32_768] if given.memory else [512, 2048] if gpu else [SIZES[given.size].context]
    given.contexts = given.contexts or usual
    given.tokens = 0 if given.memory else given.tokens or (32_768 if gpu else 8192)
    if given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: quartiles need at least 2 rounds")
    if given.memory and given.compile and not gpu:
        parser.error(
            "--memory on a CPU counts bytes per operator, which a compiled model hides; drop --compile"
        )
    return given


def main() -> None:
    """Measure and print."""
    given = arguments()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    # Every arm adds a graph to the same function; the default limit of 8 would leave the rest uncompiled.
    torch._dynamo.config.recompile_limit = 4096
    torch._dynamo.config.accumulated_recompile_limit = 4096
    setting = Setting(
        kind="memory" if given.memory else "speed",
        device=device_name(torch.device(given.device)),
        size=f"{given.size}, two layers, vocabulary {sliced(given).vocabulary:,}",
        contexts=tuple(given.contexts),
        tokens=given.tokens,
        precision=given.precision,
        compiled=given.compile,
        threads=given.threads,
    )
    rows = work_through(given, setting, Rows("mechanisms", given.out, {}))
    (show_memory if given.memory else show_speed)(rows)
    facts = {"benchmark": "mechanisms", **provenance()} | dataclasses.asdict(setting)
    own = [{name: value for name, value in row.items() if facts.get(name) != value} for row in rows]
    print(json.dumps(finite(facts | {"rows": own})))


if __name__ == "__main__":
    main()
