"""Generated text of docs/speed.md: targets and results, tables, and a caption for every figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from speed_rows import Measured, Row, context_of

from headtohead.bench.growth import AXES, axis_rows, growth, on_axis, value_of
from headtohead.bench.train import find_shape
from headtohead.common.numbers import short_bytes, short_count

_MISSING = "not measured yet"
COMMANDS = {
    "train-gpu": "h2h bench train --profile --out results/speed/train-gpu.json",
    "mechanisms-gpu": "",
    "contenders-step": "",
    "coupled-step": "",
    "kernels": "h2h bench kernels --out results/speed/kernels.json",
    "decode": "h2h bench decode --out results/speed/decode.json",
    "generate": "h2h bench generate --out results/speed/generate.json",
    "stack": "h2h bench population 5 16 --out results/speed/stack.json",
    "growth": "h2h bench growth --out results/speed/growth.json --picture docs/images/growth.png",
    "cpu": "python benchmarks/training_cpu.py --out results/speed/cpu.json",
}
"""The command that writes each file; if empty, it is derived from the rows."""


@dataclass(frozen=True)
class Aim:
    """One line of the table of targets."""

    what: str
    against: str
    aim: str
    reached: str = _MISSING
    met: bool | None = None


def blocks(measured: Measured, drawn: dict[str, str]) -> dict[str, str]:
    """Return the content of every marked block of the page by name; `drawn` holds the files of the figures."""
    found = {
        "aims": _table(
            ("benchmark", "compared with", "target", "result", "met"),
            (
                (one.what, one.against, one.aim, one.reached, {True: "yes", False: "no", None: "–"}[one.met])
                for one in aims(measured)
            ),
        ),
        "errors": _errors(measured),
        "slopes": _slopes(measured),
        "repeat": _repeat(measured),
    }
    for name, (file, caption) in _CAPTIONS.items():
        if name not in drawn:
            found[name] = f"*Not drawn: `results/speed/{file}.json` has no rows for it yet.*"
        else:
            found[name] = f"![{caption}](images/{drawn[name]})\n\n{caption}. {_source(measured, file)}"
    return found


_CAPTIONS = {
    "kernels": (
        "kernels",
        "Roofline share of forward + backward, for each fused kernel and its compiled plain reference; the dashed line is 100 %",
    ),
    "roofline": ("kernels", "The same kernels in a roofline plot; a dot on the line is at the bound"),
    "train": (
        "train-gpu",
        "Training `standard` compared with litgpt's GPT and transformers' Llama of the same shape, all compiled, 32,768 tokens per step; the dashed line is the target",
    ),
    "mechanisms": (
        "mechanisms-gpu",
        "Training step time of each mechanism relative to `standard`; left is faster",
    ),
    "decode": (
        "decode",
        "Decoding step of 64 sequences, 8 heads of width 64, against the number of cached tokens",
    ),
    "stack": (
        "stack",
        "Several seeds of a small model on one GPU, total tokens per second; the vertical marks are the targets",
    ),
    "generate": ("generate", "Generation from a long prompt with a whole model"),
    "growth": ("growth", "Training time per token against context, by mechanism"),
}


def _source(measured: Measured, file: str) -> str:
    """Return the source of a figure's rows."""
    names = [
        file,
        *{"mechanisms-gpu": ["contenders-step", "coupled-step"], "stack": ["stack-processes"]}.get(file, []),
    ]
    found = [row for name in names for row in measured.rows(name)]
    commits = sorted({row["commit"] for row in found})
    dates = sorted({row["date"][:10] for row in found})
    files = ", ".join(f"`{name}.json`" for name in names if name in measured.documents)
    return f"Rows: {files}; {', '.join(sorted({row['device'] for row in found}))}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, commit {', '.join(commits)}."


def _repeat(measured: Measured) -> str:
    rows = []
    for name, command in COMMANDS.items():
        if found := measured.rows(name):
            last = max(found, key=lambda row: row["date"])
            peers = measured.documents[name].get("peers") or {}
            versions = [f"torch {last['torch']}", *(f"{peer} {version}" for peer, version in peers.items())]
            commands = [command] if command else list(dict.fromkeys(_command(row, name) for row in found))
            text = "; ".join(f"`{one}`" for one in commands)
            rows.append((f"`{name}.json`", text, last["commit"], last["date"][:10], ", ".join(versions)))
    return _table(("file", "command", "commit", "date", "versions"), rows)


def _command(row: Row, name: str) -> str:
    """Return the command that measures a row of mechanisms."""
    if "results" not in row:
        arms, context = row["arm"], row["contexts"][0]
        return f"python benchmarks/mechanisms.py --device cuda --arms {arms} --contexts {context}"
    context = context_of(row)
    own = find_shape(row["size"]).context == context
    parts = ["h2h bench train", row["size"], *([] if own else ["--context", str(context)])]
    parts += ["--shape params"] if row.get("shape") == "params" else []
    return " ".join([*parts, "--arms", *row["contenders"], "--peers", "--out", f"results/speed/{name}.json"])


def _errors(measured: Measured) -> str:
    """Return the table of kernel errors against float64, one line per kernel and precision."""
    rows = measured.documents.get("kernels", {}).get("rows", [])
    if not any("kind" in row for row in rows):
        return f"*Errors by kernel and precision: {_MISSING}.*"
    lines = []
    for case, dtype in dict.fromkeys((row["case"], row["dtype"]) for row in rows if "kind" in row):
        same = [row for row in rows if (row.get("case"), row.get("dtype")) == (case, dtype)]
        errors = [_error_of(same, kind) for kind in ("training", "odd", "stacked")]
        lines.append((case, dtype, *errors))
    head = ("kernel", "precision", "training shape", "odd shape", "vmap against separate calls")
    return _table(head, lines)


def _slopes(measured: Measured) -> str:
    """Return a table of times and slopes per axis, one line per mechanism."""
    rows, parts = measured.rows("growth"), []
    for axis in AXES:
        found = [one for one in growth(rows) if one["axis"] == axis and one["slopes"]]
        if not found:
            continue
        values = sorted({value_of(row, axis) for row in rows if on_axis(row, axis)})
        lines = []
        for one in found:
            own = axis_rows(rows, axis, one["arm"])
            times = [f"{1e3 * row['seconds']:.3g}" for row in own if "seconds" in row]
            last = one["slopes"][-1]
            slopes = ["–" if last[key] is None else f"{last[key]:.2f}" for key in ("time", "flops", "memory")]
            lines.append((f"`{one['arm']}`", " / ".join(times), *slopes, one["words"]))
        at = (
            " / ".join(f"{value:,.0f}" for value in values) if axis != "parameters" else "smallest to largest"
        )
        head = (
            f"against {axis}",
            f"ms at {at}",
            "time slope",
            "declared slope",
            "memory slope",
            "last slope",
        )
        parts.append(_table(head, lines))
    return "\n\n".join(parts) or f"*Slopes: {_MISSING}.*"


def _error_of(rows: Sequence[Row], kind: str) -> str:
    found = [row for row in rows if row["kind"] == kind]
    if not found:
        return "–"
    failed = [row for row in found if row.get("error") is None]
    if failed:
        return f"failed: {failed[0].get('failed', 'not a number')}"
    row = max(found, key=lambda row: row["error"] / row["bound"])
    beyond = "" if row["within"] else f", more than {row['bound']:.1e}"
    return f"{row['error']:.1e} ({row['worst']}){beyond}"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def aims(measured: Measured) -> list[Aim]:
    """Return every target with its result."""
    return [line for group in _GROUPS for line in group(measured)]


def _training(measured: Measured) -> list[Aim]:
    found = []
    for size, mfu in (("51m", None), ("124m", 0.40), ("360m", 0.46)):
        aim = "at least 1.3x" + (f", MFU at least {_percent(mfu)}" if mfu else "")
        what, against = (
            f"training step, `standard`, {size}",
            "the faster of transformers' Llama and litgpt's GPT",
        )
        row = measured.training(size, 32_768)
        if row is None or row["over_better_peer"] is None:
            found.append(Aim(what, against, aim))
            continue
        ours = row["results"]["standard"]
        ratios = [
            f"{result['first_over_this']:.2f}x {name}"
            for name, result in row["results"].items()
            if name != "standard" and result.get("first_over_this")
        ]
        reached = f"{', '.join(ratios)}; {short_count(ours['tokens_per_second'])} tokens/s, MFU {_percent(ours['mfu'], 1)}"
        met = row["over_better_peer"] >= 1.3 and (mfu is None or ours["mfu"] >= mfu)
        found.append(Aim(what, against, aim, reached, met))
    return found


def _memory(measured: Measured) -> list[Aim]:
    what, against, aim = "memory, 51m, 65,536 tokens per step", "transformers' Llama", "at most 60 %"
    row = measured.training("51m", 65_536)
    share = row and row["memory_over_transformers"]
    if row is None or share is None:
        return [Aim(what, against, aim)]
    held = short_bytes(row["results"]["standard"]["peak_bytes"])
    return [Aim(what, against, aim, f"{_percent(share)} ({held})", share <= 0.6)]


def _at_most(
    arm: str, size: str, most: float, context: int | None = None, memory: bool = False
) -> Callable[[Measured], list[Aim]]:
    """Return the target that an arm's step takes at most `most` times standard's; with `memory` the peak is stated too."""

    def line(measured: Measured) -> list[Aim]:
        at = f"{size}, context {context}" if context else size
        aim = "not slower, within 0.5 %" if most == 1 else f"at most {most:g}x the time"
        empty = Aim(f"training step, `{arm}`, {at}", "`standard`", aim)
        row = measured.over_standard(arm, size, context)
        if row is None:
            return [empty]
        if "failed" in row:
            return [Aim(empty.what, empty.against, aim, f"failed: {row['failed']}", False)]
        result = f"{row['over']:.3f}x{', equal parameters' if row['matched'] else ''}"
        if memory and row["memory"] and row["standard_memory"]:
            result += f"; {short_bytes(row['memory'])} (`standard` {short_bytes(row['standard_memory'])})"
        # Two measurements of the same arm differ by 0.5 %.
        return [Aim(empty.what, empty.against, aim, result, row["over"] <= (1.005 if most == 1 else most))]

    return line


def _kernel(measured: Measured) -> list[Aim]:
    what = "fused coupling, euler, forward + backward, (64, 8, 512, 64)"
    rows = [row for row in measured.timed_kernels() if row["case"] == "coupled euler"]
    if not rows:
        return [Aim(what, "byte floor", "within 2.5x")]
    row = rows[-1]
    reached = f"{row['over_floor']:.2f}x, {row['faster']:.2f}x as fast as the compiled plain reference"
    return [Aim(what, "byte floor", "within 2.5x", reached, row["over_floor"] <= 2.5)]


def _decoding(measured: Measured) -> list[Aim]:
    found = []
    for keys, dim in ((8192, 64), (32_768, 128)):
        for turn, label in (
            ("nothing", "no rotation"),
            ("roundtrip", "`rope=roundtrip`"),
            ("score", "`rope=score`"),
        ):
            rows = measured.decoding(
                lambda row, keys=keys, dim=dim, turn=turn: (  # type: ignore[misc]
                    (row["keys"], row["dim"], row["turned"]) == (keys, dim, turn)
                )
            )
            what = f"decoding with K=V, {keys:,} cached tokens, dim {dim}, {label}"
            against, aim = "cuDNN with K and V; copy bandwidth", "at least 1.8x; at least 80 %"
            if not rows:
                found.append(Aim(what, against, aim))
                continue
            fast, share = rows[-1]["faster"], rows[-1]["share_of_copy"]
            reached = f"{fast:.2f}x; {_percent(share)}"
            found.append(Aim(what, against, aim, reached, fast >= 1.8 and share >= 0.8))
    return found


def _generating(measured: Measured) -> list[Aim]:
    rates = {row["contender"]: row["tokens_per_second"] for row in measured.generation()}
    what, ours = "generation, 350m, batch 64, 8k context, K=V", rates.get("sharing:tie=kv")
    against = {name: rate for name, rate in rates.items() if name != "sharing:tie=kv"}
    aim = "at least 3x transformers' default, 1.5x its static cache"
    if ours is None or not against:
        return [Aim(what, "transformers' generate; our `standard`", aim)]
    reached = ", ".join(f"{ours / rate:.2f}x {name}" for name, rate in against.items())
    least = {name: 1.5 if "static" in name else 3.0 for name in against if name.startswith("transformers")}
    met = len(least) == 2 and all(ours / against[name] >= factor for name, factor in least.items())
    return [
        Aim(
            what,
            "transformers' generate; our `standard`",
            aim,
            f"{short_count(ours)} tokens/s: {reached}",
            met,
        )
    ]


def _stacking(measured: Measured) -> list[Aim]:
    found = []
    for seeds, aimed in ((5, 15e6), (16, 20e6)):
        what, against = f"population of {seeds} seeds, `1m`", "a single run; as many separate processes"
        aim = f"at least {aimed / 1e6:.0f} M tokens/s, more than separate processes"
        row = next((row for row in measured.stacked() if (row["size"], row["seeds"]) == ("1m", seeds)), None)
        if row is None:
            found.append(Aim(what, against, aim))
            continue
        rate, apart = row["stacked_tokens_per_second"], row["over_separate"]
        text = f"{rate / 1e6:.1f} M"
        text += f", {row['over_single']:.2f}x a single run" if row["over_single"] else ""
        text += "" if apart is None else f", {apart:.2f}x separate processes"
        text += " (neither compiled; processes timed in an earlier run)" if row.get("earlier") else ""
        found.append(Aim(what, against, aim, text, rate >= aimed and apart is not None and apart > 1))
    return found


def _cpu(measured: Measured) -> list[Aim]:
    found = []
    for size in ("nano", "1m"):
        for compiled in (False, True):
            way = "both compiled" if compiled else "both eager"
            what, against = (
                f"CPU, `{size}`, {way}",
                "transformers' Llama; sum of matrix and attention kernels",
            )
            aim = "at least 1.2x" if size == "nano" else "within 1.2x of the kernel time"
            rows = measured.rows(
                "cpu",
                lambda row, size=size, compiled=compiled: (  # type: ignore[misc]
                    (row["size"], row.get("compiled", False)) == (size, compiled)
                ),
            )
            if not rows:
                found.append(Aim(what, against, aim))
                continue
            row = max(rows, key=lambda row: row["date"])
            over = row["step_over_kernels"]
            text = f"{row['ratio']:.2f}x; {over:.2f}x the kernel time, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
            met = row["ratio"] >= 1.2 if size == "nano" else over <= 1.2
            found.append(Aim(what, against, aim, text, met))
    return found


_GROUPS: tuple[Callable[[Measured], list[Aim]], ...] = (
    _training,
    _memory,
    _at_most("coupled", "60m", 1.08),
    _at_most("coupled:dynamics=leapfrog,steps=7", "60m", 1.3),
    _kernel,
    _at_most("kuramoto", "5m", 1.2),
    *(_at_most(arm, "60m", 1.3) for arm in ("differential", "differential:version=2", "latent")),
    *(_at_most("approximate", "60m", 1.6, context) for context in (512, 2048)),
    *(
        _at_most(arm, "60m", 1.0, 2048)
        for arm in ("non_approximate", "rnd_emb_qk", "fixed_seq_qk", "token_mlp")
    ),
    *(
        _at_most(arm, "60m", most, 2048, memory=True)
        for arm, most in {
            **dict.fromkeys(("gated", "sink", "exclusive", "value_residual", "canon"), 1.1),
            "forgetting": 1.35,
            **dict.fromkeys(("gated_delta", "gated_linear", "selective_state"), 1.25),
        }.items()
    ),
    _decoding,
    _generating,
    _stacking,
    _cpu,
)
