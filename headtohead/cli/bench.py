"""h2h bench: what is measured by the clock; the last line is one JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from headtohead import api
from headtohead.bench.peers import PEERS
from headtohead.bench.train import SHAPES
from headtohead.cli.flags import OneWay, flag, yes_or_no
from headtohead.cli.tables import number, print_table
from headtohead.common.files import write_atomic
from headtohead.common.numbers import parse_count, short_bytes, short_count
from headtohead.common.progress import piece_of_work

Out = Annotated[str | None, flag("FILE")]


def kernels(*, device: str = "auto", out: Out = None) -> int:
    """Measure the fused coupling, forward + backward, beside its plain twin and the bytes it must move.

    Args:
        device: auto, cpu or cuda; on cpu the sizes are small.
        out: write the document here too.
    """
    document = api.bench_kernels(device=device)
    rows = [
        (
            row["case"],
            milliseconds(row["peer_seconds"]),
            milliseconds(row["seconds"]),
            f"{row['faster']:.2f}x",
            milliseconds(row["floor_seconds"]),
            f"{row['over_floor']:.2f}x",
        )
        for row in document["rows"]
    ]
    columns = (
        "forward + backward",
        f"{document['rows'][0]['peer']}, ms",
        "ours, ms",
        "faster",
        "byte floor, ms",
        "over the floor",
    )
    return show(document, columns, rows, out)


def decode(*, device: str = "auto", out: Out = None) -> int:
    """Measure decoding from a K=V cache beside the library's attention with separate keys and values.

    Args:
        device: auto, cpu or cuda; on cpu the sizes are small.
        out: write the document here too.
    """
    document = api.bench_decode(device=device)
    rows = [
        (
            "{batch} x ({heads}, {kv_heads}) x {keys} x {dim}".format(**row["case"]),
            row["turned"],
            milliseconds(row["peer_seconds"]),
            milliseconds(row["peer_same_tensor_seconds"]),
            milliseconds(row["seconds"]),
            f"{row['faster']:.2f}x",
            f"{row['share_of_copy']:.0%}",
        )
        for row in document["rows"]
    ]
    columns = (
        *("batch x heads x cached tokens x dim", "turned", f"{document['rows'][0]['peer']}, ms"),
        *("same tensor twice, ms", "ours, ms", "faster", "of copy bandwidth"),
    )
    return show(document, columns, rows, out)


def show(
    document: dict[str, Any], columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], out: str | None
) -> int:
    """Print a benchmark's table, then the whole document as the last line; keep it in a file where one is named."""
    where = f"{document['device']}, {document['kernels']} kernels, torch {document['torch']}"
    print_table(where, columns, rows, right=columns[1:])
    print(f"copy {document['copy_bytes_per_second'] / 1e12:.2f} TB/s, read and written")
    text = json.dumps(document)
    if out is not None:
        write_atomic(Path(out), text + "\n")
    print(text)
    return 0


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds with four digits behind the point."""
    return f"{seconds * 1000:.4f}"


def train(
    sizes: Annotated[tuple[str, ...], tyro.conf.Positional, flag("SIZE")] = tuple(SHAPES),
    /,
    *,
    arms: Annotated[tuple[str, ...], flag("ARM")] = ("standard",),
    peers: Annotated[tuple[str, ...], flag("|".join(PEERS))] = PEERS,
    batch: Annotated[str, flag("COUNT")] = "32768",
    rounds: Annotated[int, flag("COUNT")] = 6,
    precision: Annotated[Literal["bf16", "float32"], flag()] = "bf16",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    compile: OneWay = False,
    no_compile: OneWay = False,
    profile: Annotated[bool, flag()] = False,
    out: Annotated[Path | None, flag("FILE")] = None,
    quiet: Annotated[bool, flag()] = False,
) -> int:
    """Time the training step beside transformers' Llama and litgpt's GPT of the same shape, in turns.

    Args:
        sizes: 51m, 124m, 360m (a vocabulary of 50,257), or sizes of h2h list.
        arms: ours; the first one is what ratios are of.
        peers: theirs; without a name after it, none.
        batch: tokens per step.
        rounds: turns of each contender, ten steps a turn; medians are shown.
        precision: arithmetic; bf16 keeps float32 weights.
        device: where.
        compile: torch.compile for all contenders; when nothing is said, on a GPU.
        no_compile: for none of them.
        profile: also show where our step's time goes.
        out: a file that keeps every row; rows that stand there are not measured again.
        quiet: show no progress.
    """
    with piece_of_work("bench train", quiet) as progress:
        document = api.bench_train(
            sizes,
            arms=arms,
            peers=peers,
            batch=parse_count(batch, "--batch"),
            rounds=rounds,
            precision=precision,
            device=device,
            compile=yes_or_no("compile", compile, no_compile),
            profile=profile,
            out=out,
            progress=progress,
        )
    for words in document["missing"].values():
        print(f"not measured: {words}")
    for row in document["rows"]:
        _show(row)
    print(json.dumps(document, ensure_ascii=False))
    return 0


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
    with piece_of_work("bench stack", quiet) as progress:
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
    columns = (
        *("arm", "seeds", "stacked tokens/s", "single run", "stacked over it", "separate processes"),
        "stacked over them",
    )
    rows = [
        (
            row["arm"],
            row["seeds"],
            _rate(row["stacked_tokens_per_second"]),
            _rate(row["single_tokens_per_second"]),
            _ratio(row["over_single"]),
            _rate(row["separate_tokens_per_second"]),
            _ratio(row["over_separate"]),
        )
        for row in document["rows"]
    ]
    if document["rows"]:
        last = document["rows"][-1]
        how = "steps recorded as CUDA graphs" if last["recorded"] else "steps one by one"
        title = f"{last['size']} ({last['dims']}), {last['tokens_per_step']:,} tokens per step and seed, {last['precision']}, {how}, {last['device']}; the best of each kind"
        print_table(title, columns, rows, right=columns[1:])
    for row in document["rows"]:
        _show_contest(row)
    print(json.dumps(document, ensure_ascii=False))
    return 0


def _rate(found: float | None) -> str:
    return "–" if found is None else short_count(found)


def _ratio(found: float | None) -> str:
    return "–" if found is None else f"{found:.2f}x"


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
    apart = row["disagreement"]
    for form, found in (apart if isinstance(apart, dict) else {"as it stands": apart}).items():
        words = found if isinstance(found, str) else f"{found:.1e}"
        print(f"off separate runs by, float32, twenty steps, {form}: {words}")
    for name, found in row.get("profile", {}).items():
        show_profile(name, found)


def show_profile(name: str, found: dict[str, Any]) -> None:
    """Print the kernels of one step by kind, then the longest."""
    kinds = ", ".join(f"{kind} {spent:.2f}" for kind, spent in found["kinds"].items())
    print(f"kernels of one step of {name}, {found['milliseconds']:.2f} ms: {kinds}")
    kernels = [
        (kernel["name"], f"{kernel['milliseconds']:.3f}", f"{kernel['calls']:g}")
        for kernel in found["kernels"][:20]
    ]
    print_table("", ("kernel", "ms", "calls"), kernels, right=("ms", "calls"))


def _show(row: dict[str, Any]) -> None:
    columns = ("contender", "tokens/s", "ms/step", "ours over it", "MFU", "peak memory", "start s")
    table = [
        (
            name,
            short_count(found["tokens_per_second"]),
            f"{found['milliseconds']:.2f}",
            f"{found['first_over_this']:.3f}",
            number(found["mfu"], ".1%"),
            "–" if found["peak_bytes"] is None else short_bytes(found["peak_bytes"]),
            f"{found['start_seconds']:.0f}",
        )
        for name, found in row["results"].items()
    ]
    title = (
        f"{row['size']} ({row['dims']}; {row['parameters']:,} parameters), {row['tokens_per_step']:,} tokens per step, "
        f"{row['precision']}{', compiled' if row['compiled'] else ''}, {row['device']}"
    )
    print_table(title, columns, table, right=columns[1:])
    print(
        f"gradients of {row['contenders'][0]} differ from the plain path's in float32 by {row['gradient_error']:.1e} (relative norm)"
    )
    if found := row.get("profile"):
        show_profile(row["contenders"][0], found)
