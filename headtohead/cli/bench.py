"""h2h bench: what is measured by the clock; the last line is one JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from headtohead import api
from headtohead.bench.generate import ARMS
from headtohead.bench.growth import AXES, axis_rows, on_axis, value_of
from headtohead.bench.peers import PEERS, WRITERS
from headtohead.bench.train import SHAPES
from headtohead.cli.flags import OneWay, flag, yes_or_no
from headtohead.cli.tables import number, print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_count, parse_duration, short_bytes, short_count
from headtohead.common.progress import piece_of_work

Out = Annotated[str | None, flag("FILE")]


def kernels(*, device: str = "auto", out: Out = None) -> int:
    """Measure every fused kernel: its time, the bytes it must move, and its errors against float64.

    Args:
        device: auto, cpu or cuda; on cpu the sizes are small.
        out: a file that keeps every row; rows that stand there are not measured again.
    """
    document = api.bench_kernels(device=device, out=out)
    known = whole(document, "case", "shape", "dtype", "kind")
    timed = [row for row in known if {"seconds", "floor_seconds", "over_floor"} <= row.keys()]
    columns = (
        *("forward + backward", "shape", "plain twin, ms", "ours, ms", "faster, x"),
        *("byte floor, ms", "over the floor", "over the roof"),
    )
    rows = [
        (
            row["case"],
            " x ".join(map(str, row["shape"])),
            milliseconds(row.get("peer_seconds")),
            milliseconds(row["seconds"]),
            number(row.get("faster"), ".2f"),
            milliseconds(row["floor_seconds"]),
            f"{row['over_floor']:.2f}x",
            _ratio(row.get("over_roof")),
        )
        for row in timed
    ]
    print_table("", columns, rows, right=columns[2:])
    print(
        "the roof is the byte floor or, where it is higher, the time of the products at a large product's speed"
    )
    compared = ("kernel", "shape", "precision", "kind", "worst", "error", "allowed", "within")
    errors = [
        (row["case"], " x ".join(map(str, row["shape"])), row["dtype"], row["kind"], *_error_words(row))
        for row in known
    ]
    return show(document, compared, errors, right=compared[5:])


def _error_words(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return which result is worst, its error and what is allowed, or why there is none."""
    if not {"worst", "error", "bound", "within"} <= row.keys():
        return row.get("failed", "–"), "–", "–", "failed" if "failed" in row else "–"
    return row["worst"], number(row["error"], ".1e"), f"{row['bound']:.1e}", "yes" if row["within"] else "NO"


def decode(*, device: str = "auto", out: Out = None) -> int:
    """Measure decoding from a K=V cache beside the library's attention with separate keys and values.

    Args:
        device: auto, cpu or cuda; on cpu the sizes are small.
        out: a file that keeps every row; rows that stand there are not measured again.
    """
    document = api.bench_decode(device=device, out=out)
    known = whole(document, "case", "turned")
    rows = [
        (
            "{batch} x ({heads}, {kv_heads}) x {keys} x {dim}".format(**row["case"]),
            row["turned"],
            milliseconds(row.get("peer_seconds")),
            milliseconds(row.get("peer_same_tensor_seconds")),
            milliseconds(row["seconds"]) if "seconds" in row else row.get("failed", "–"),
            number(row.get("faster"), ".2f"),
            number(row.get("share_of_copy"), ".0%"),
            number(row.get("error"), ".1e"),
        )
        for row in known
    ]
    peer = next((row["peer"] for row in known if "peer" in row), "the library's, K and V")
    columns = (
        *("batch x heads x cached tokens x dim", "turned", f"{peer}, ms"),
        *("same tensor twice, ms", "ours, ms", "faster, x", "of copy bandwidth", "error"),
    )
    return show(document, columns, rows, right=columns[1:])


def whole(document: dict[str, Any], *needed: str) -> list[dict[str, Any]]:
    """Return the rows that can be shown; those of a file that older code wrote are kept there, and counted in a line."""
    rows: list[dict[str, Any]] = document["rows"]
    known = [row for row in rows if all(name in row for name in needed)]
    if old := len(rows) - len(known):
        print(f"{old} of {len(rows)} rows have another form: they stay in the file and are not shown")
    return known


def show(
    document: dict[str, Any], columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: Sequence[str]
) -> int:
    """Print a benchmark's table, then the whole document as the last line."""
    where = f"{document['device']}, {document['kernels']} kernels, torch {document['torch']}"
    print_table(where, columns, rows, right=right)
    print(f"copy {document['copy_bytes_per_second'] / 1e12:.2f} TB/s, read and written")
    print(json.dumps(document))
    return 0


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds with four digits behind the point, or a dash."""
    return number(None if seconds is None else 1e3 * seconds, ".4f")


def train(
    sizes: Annotated[tuple[str, ...], tyro.conf.Positional, flag("SIZE")] = tuple(SHAPES),
    /,
    *,
    arms: Annotated[tuple[str, ...], flag("ARM")] = ("standard",),
    peers: Annotated[tuple[str, ...], flag("|".join(PEERS))] = PEERS,
    context: Annotated[tuple[str, ...], flag("COUNT")] = (),
    shape: Annotated[Literal["as_is", "params"], flag()] = "as_is",
    batch: Annotated[str, flag("COUNT")] = "32768",
    rounds: Annotated[int, flag("COUNT")] = 6,
    precision: Annotated[Literal["bf16", "float32"], flag()] = "bf16",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    compile: OneWay = False,
    no_compile: OneWay = False,
    warm: OneWay = False,
    profile: Annotated[bool, flag()] = False,
    out: Annotated[Path | None, flag("FILE")] = None,
    quiet: Annotated[bool, flag()] = False,
) -> int:
    """Time the training step beside transformers' Llama and litgpt's GPT of the same shape, in turns.

    Args:
        sizes: 51m, 124m, 360m (a vocabulary of 50,257), or sizes of h2h list.
        arms: ours; the first one is what ratios are of.
        peers: theirs; without a name after it, none.
        context: tokens in a window; several make a row each; the size's own when not given.
        shape: as_is, or params: the other arms' feed-forward width is solved for the parameters of the first.
        batch: tokens per step.
        rounds: turns of each contender, ten steps a turn; medians are shown.
        precision: arithmetic; bf16 keeps float32 weights.
        device: where.
        compile: torch.compile for all contenders; when nothing is said, on a GPU.
        no_compile: for none of them.
        warm: compile in processes side by side first, as many as there are cores.
        profile: also show where our step's time goes.
        out: a file that keeps every row; rows that stand there are not measured again.
        quiet: show no progress.
    """
    with piece_of_work("bench train", quiet) as progress:
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
            compile=yes_or_no("compile", compile, no_compile),
            warm=warm,
            profile=profile,
            out=out,
            progress=progress,
        )
    for words in document["missing"].values():
        print(f"not measured: {words}")
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
            _ratio(row.get("over_single")),
            _rate(row.get("separate_tokens_per_second")),
            _ratio(row.get("over_separate")),
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
    apart = row.get("disagreement", "not compared")
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


def generate(
    *,
    arms: Annotated[tuple[str, ...], flag("ARM")] = ARMS,
    peers: Annotated[tuple[str, ...], flag("|".join(WRITERS))] = tuple(WRITERS),
    size: Annotated[str, flag("SIZE")] = "350m",
    batch: Annotated[str, flag("COUNT")] = "64",
    cached: Annotated[str, flag("COUNT")] = "8064",
    new: Annotated[str, flag("COUNT")] = "129",
    rounds: Annotated[int, flag("COUNT")] = 2,
    precision: Annotated[Literal["bf16", "float32"], flag()] = "bf16",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    out: Annotated[Path | None, flag("FILE")] = None,
    quiet: Annotated[bool, flag()] = False,
) -> int:
    """Time a model that continues a long prompt greedily, beside transformers' generate with its two caches.

    Args:
        arms: ours; the first one is what ratios are of.
        peers: theirs, of the same shape; without a name after it, none.
        size: a model shape (h2h list); its context is stretched to the text.
        batch: sequences.
        cached: tokens of the prompt.
        new: tokens to write; the first comes of reading the prompt, each other of one step.
        rounds: times each contender writes; medians are shown.
        precision: of weights, cache and arithmetic.
        device: where.
        out: a file that keeps every row; rows that stand there are not measured again.
        quiet: show no progress.
    """
    counts = {"batch": batch, "cached": cached, "new": new}
    with piece_of_work("bench generate", quiet) as progress:
        document = api.bench_generate(
            arms,
            peers=peers,
            size=size,
            **{name: parse_count(text, f"--{name}") for name, text in counts.items()},
            rounds=rounds,
            precision=precision,
            device=device,
            out=out,
            progress=progress,
        )
    for name, words in document["missing"].items():
        print(f"not measured: {name}: {words}")
    rows = {
        row["contender"]: row
        for row in whole(document, "contender")
        if row["contender"] in document["ratios"]
    }
    columns = (
        *(
            "contender",
            "tokens/s",
            "ms/step",
            f"{arms[0]} over it",
            "with first steps",
            "cache",
            "peak memory",
        ),
        *("of copy bandwidth", "prompt s", "off the whole forward by"),
    )
    table = [
        (
            name,
            short_count(row["tokens_per_second"]),
            f"{row['milliseconds']:.2f}",
            number(document["ratios"][name]["tokens_per_second"], ".2f"),
            number(document["ratios"][name]["whole_tokens_per_second"], ".2f"),
            short_bytes(row["cache_bytes"]),
            "–" if row["peak_bytes"] is None else short_bytes(row["peak_bytes"]),
            f"{row['share_of_copy']:.0%}",
            f"{row['prompt_seconds'][-1]:.2f}",
            number(row.get("disagreement"), ".1e"),
        )
        for name, row in rows.items()
        if row["error"] is None
    ]
    one = next(iter(rows.values()))
    title = f"{one['size']} ({one['dims']}), {one['batch']} x {one['cached']:,} cached + {one['new']} tokens, {one['precision']}, {one['device']}"
    print_table(title, columns, table, right=columns[1:])
    for name, row in rows.items():
        if row["error"] is not None:
            print(f"{name} failed: {row['error']}")
        elif row.get("told"):
            print(f"{name}: {row['told'][0]}")
    print(json.dumps(document, ensure_ascii=False))
    return 0


def growth(
    *,
    arms: Annotated[tuple[str, ...], flag("ARM")] = (),
    axes: Annotated[tuple[str, ...], flag("|".join(AXES))] = AXES,
    context: Annotated[tuple[str, ...], flag("COUNT")] = (),
    size: Annotated[str, flag("SIZE")] = "",
    batch: Annotated[str, flag("COUNT")] = "0",
    rounds: Annotated[int, flag("COUNT")] = 3,
    precision: Annotated[Literal["", "bf16", "float32"], flag("bf16|float32")] = "",
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    compile: OneWay = False,
    no_compile: OneWay = False,
    workers: Annotated[int, flag("COUNT")] = 0,
    longest: Annotated[str, flag("TIME")] = "2s",
    for_: Annotated[str | None, flag(name="for", metavar="TIME")] = None,
    out: Annotated[Path | None, flag("FILE")] = None,
    picture: Annotated[Path | None, flag("FILE")] = None,
    quiet: Annotated[bool, flag()] = False,
) -> int:
    """Measure how a training step grows with context, batch, layers and parameters, beside what mechanisms declare.

    Args:
        arms: whose; all mechanisms when not given.
        axes: along which axes; all four when not given.
        context: 512 2048 8192 32768 when not given; on a CPU 128 512 2048.
        size: cut to two layers and a vocabulary of 256; 60m, on a CPU nano.
        batch: tokens per step, equal for all contexts; 0: the longest context.
        rounds: bursts of each row; medians are shown.
        precision: bf16, on a CPU float32, when not given.
        device: where.
        compile: compile one block, which serves all layers; when nothing is said, on a GPU.
        no_compile: compile nothing.
        workers: processes that compile side by side; 0: as many as there are cores.
        longest: skip a row whose step would take longer by what was measured before.
        for_: end after this time; the same command goes on where it ended.
        out: a file that keeps every row; rows that stand there are not measured again.
        picture: draw time per token against context into this PNG or SVG file.
        quiet: show no progress.
    """
    if picture is not None:
        api.check_growth_picture(picture)
    with piece_of_work("bench growth", quiet) as progress:
        document = api.bench_growth(
            arms,
            axes=axes,
            contexts=[parse_count(count, "--context") for count in context],
            size=size,
            batch=parse_count(batch, "--batch"),
            rounds=rounds,
            precision=precision,
            device=device,
            compile=yes_or_no("compile", compile, no_compile),
            workers=workers,
            longest=parse_duration(longest),
            seconds=math.inf if for_ is None else parse_duration(for_),
            out=out,
            progress=progress,
        )
    for axis in axes:
        _show_growth(document, axis)
    for words in document["left_out"]:
        print(f"not measured: {words}")
    if document["left"]:
        print(f"{document['left']} rows are left: the time given is over, and the same command goes on")
    drawn = picture is None or _drawn(document["rows"], picture)
    print(json.dumps(document, ensure_ascii=False))
    return 0 if drawn else 2


def _drawn(rows: list[dict[str, Any]], picture: Path) -> bool:
    """Draw the picture, or say why there is none: what was measured is shown either way."""
    try:
        print(f"picture: {api.draw_growth(rows, picture)}")
    except UserError as error:
        print(f"no picture: {error}")
        return False
    return True


def _show_growth(document: dict[str, Any], axis: str) -> None:
    rows = [row for row in document["rows"] if on_axis(row, axis)]
    found = [one for one in document["growth"] if one["axis"] == axis]
    if not found:
        return
    values = sorted({value_of(row, axis) for row in rows}) if axis != "parameters" else []
    table = []
    for one in found:
        own = axis_rows(rows, axis, one["arm"])
        times = [f"{1e3 * row['seconds']:.3g}" if "seconds" in row else "–" for row in own]
        cells = dict(zip((value_of(row, axis) for row in own), times, strict=True))
        shown = [cells.get(value, "–") for value in values] if values else [" / ".join(times)]
        last = one["slopes"][-1] if one["slopes"] else {}
        slopes = [number(last.get(key), ".2f") for key in ("time", "flops", "memory")]
        table.append((one["arm"], *shown, *slopes, one["words"]))
    heads = [f"{short_count(value)}, ms" for value in values] or ["smallest / middle / largest, ms"]
    columns = ("arm", *heads, "slope of time", "declared", "of memory", "at the long end")
    first = rows[0]
    middle = first["base"]
    fixed = {
        "context": f"{middle['context'] * middle['batch']:,} tokens per step at every context",
        "batch": f"context {middle['context']}",
        "layers": f"context {middle['context']}, {middle['batch']} sequences",
        "parameters": f"context {middle['context']}, {middle['batch']} sequences",
    }[axis]
    title = (
        f"{axis}: forward and backward of {first['size']} cut to {middle['layers']} layers of {middle['width']}, {fixed}, "
        f"{first['precision']}{', one block compiled' if first['compiled'] else ''}, {first['device']}"
    )
    print_table(title, columns, table, right=columns[1:-1])


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
            print(f"{name} failed: {found['error']}")
    if row["gradient_error"] is not None:
        print(
            f"gradients of {row['contenders'][0]} differ from the plain path's in float32 by {row['gradient_error']:.1e} (relative norm)"
        )
    if found := row.get("profile"):
        show_profile(row["contenders"][0], found)
