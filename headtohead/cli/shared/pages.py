"""Writes the pages of docs/mechanisms/ and docs/settings.md from docstrings and declarations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from headtohead.common.files import write_atomic
from headtohead.common.numbers import short_count
from headtohead.evaluation.cost import arm_cost, attention_parameters
from headtohead.mechanisms.contract.describe import Description, describe
from headtohead.mechanisms.contract.options import value_text
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size, find_size
from headtohead.study.config.settings import study_settings

SIZE, BATCH = "60m", 32
NOTE = "<!-- written by `h2h list --pages docs/mechanisms`; edit the mechanism's file instead -->"
COSTS = (
    "parameters of a layer's attention",
    "of the model",
    "FLOPs per token",
    "decoding",
    "cache per token and layer",
)


def mechanism_pages() -> dict[str, str]:
    """Return the text of every page by its file's name: one for each mechanism, and README.md that links them."""
    receive = [describe(kind) for kind in builtin_mechanisms().values()]
    return {"README.md": _index(receive)} | {f"{one.name}.md": _page(one) for one in receive}


def write_pages(folder: Path) -> list[Path]:
    """Write every page and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = mechanism_pages()
    for name, text in pages.items():
        write_atomic(folder / name, text)
    return [folder / name for name in pages]


SETTINGS_NOTE = "<!-- written by `h2h settings --page docs/settings.md`; edit the line below the setting's field instead -->"
_TABLES = {
    "": "",
    "model": "## The table `model`\n\nSettings of the model, for the study or for one arm.",
    "tune": "## The table `tune`\n\nTunes the learning rate of every arm before the study.",
    "circuit_lr": "## A rule of `circuit_lr`\n\n[Studies](studies.md#study-file) has examples.",
}


def settings_page() -> str:
    """Return docs/settings.md: every setting of a study with type, default and one line."""
    parts = [
        "# Settings of a study",
        SETTINGS_NOTE,
        "Each is `NAME = VALUE` in a study file, `Study(NAME=VALUE)` in Python and `--set NAME=VALUE` on the command line; "
        "the common ones have a flag (`h2h race --help`). `h2h settings NAME` shows one. A count may be written 120000, 120k "
        "or 65M. [Studies](studies.md) explains them in context.",
    ]
    for group, head in _TABLES.items():
        rows = [
            (f"`{one.name}`", one.type, f"`{one.default}`" if one.default else "", one.about)
            for one in study_settings()
            if one.group == group
        ]
        parts += [head, _table(("setting", "type", "default", "what it does"), rows)]
    return "\n\n".join(filter(None, parts)) + "\n"


def option_values(option: dict[str, Any]) -> str:
    """Return what an option takes: its choices, or its type."""
    return "|".join(map(value_text, option["choices"])) if option["choices"] else str(option["type"])


def _page(receive: Description) -> str:
    size = _size(receive.name)
    arms = ["standard", *([] if receive.name == "standard" else [receive.name]), *receive.arms]
    options = [
        (f"`{one['name']}`", f"`{value_text(one['default'])}`", f"`{option_values(one)}`", one["help"])
        for one in receive.options
    ]
    parts = [
        f"# `{receive.name}`",
        NOTE,
        f"**{receive.summary}**",
        "## Idea",
        receive.idea,
        "## Equation",
        receive.equation,
        "## Options",
        _table(("option", "default", "values", "what it does"), options) if options else "None.",
        "## Cost",
        _conditions(size),
        _table(("arm", *COSTS), [(f"`{arm}`", *_costs(arm, size)) for arm in arms]),
        "## What the paper claims",
        receive.claims,
        "## What to watch",
        receive.watch,
        _limits(receive.name),
        "All mechanisms: [README](README.md). The contract, arms and `h2h check`: [mechanisms](../mechanisms.md).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _index(receive: Sequence[Description]) -> str:
    size, rows, others = find_size(SIZE), [], ""
    for one in receive:
        own = _size(one.name)
        rows.append((f"[`{one.name}`]({one.name}.md)", one.summary.rstrip("."), *_costs(one.name, own)))
        others += f"; `{one.name}` with {own.settings.positions} positions" if own != size else ""
    parts = [
        "# The mechanisms here",
        NOTE,
        "One page each: idea, equation, options, cost, what the paper claims, what to watch. The contract, arms and "
        "`h2h check` are in [mechanisms](../mechanisms.md), with a picture of "
        "[what each attends to](../mechanisms.md#what-they-attend-to).",
        _table(("mechanism", "what it does", *COSTS), rows),
        f"{_conditions(size)} Each with its default options{others}.",
    ]
    return "\n\n".join(parts) + "\n"


def _size(name: str) -> Size:
    """Return the size that costs are shown at, with positions the mechanism can take."""
    size = find_size(SIZE)
    able = builtin_mechanisms()[name].supports.positions
    return size if size.settings.positions in able else size.with_settings(positions="learned")


def _conditions(size: Size) -> str:
    positions = "" if size.settings == find_size(SIZE).settings else f", {size.settings.positions} positions"
    return (
        f"At `{SIZE}` ({size.dims}{positions}), {BATCH} sequences in a batch, cache in bf16; x is the ratio to "
        "`standard`. FLOPs are forward, of the whole model, keys seen counted."
    )


@cache
def _facts(arm: str, size: Size) -> tuple[dict[str, Any], list[int]]:
    layers = parse_layout(arm).layers(size.layers)
    return arm_cost(size, layers, batch=BATCH), attention_parameters(size, layers)


def _costs(arm: str, size: Size) -> tuple[str, ...]:
    """Return the cells of COSTS for an arm: parameters, FLOPs and cache beside standard's."""
    (mine, owned), (base, _) = _facts(arm, size), _facts("standard", size)
    cells = [f"{owned[0]:,}" if len(set(owned)) == 1 else f"{sum(owned) / len(owned):,.0f} on average"]
    cells.append(f"{mine['parameters'] / base['parameters']:.3f}x")
    for flops, others in (
        (mine["flops_per_token"]["causal"], base["flops_per_token"]["causal"]),
        (mine["decode_flops_per_token"], base["decode_flops_per_token"]),
    ):
        cells.append(f"{short_count(flops)}, {flops / others:.3f}x")
    return *cells, _cache(mine, base, size)


def _cache(mine: dict[str, Any], base: dict[str, Any], size: Size) -> str:
    per_token = mine["cache_bytes_per_token"]
    if per_token is None:
        return "none: decoding recomputes"
    words = (
        [f"{per_token / size.layers:,.0f} bytes, {per_token / base['cache_bytes_per_token']:.3g}x"]
        if per_token
        else []
    )
    if fixed := mine["cache_bytes_per_sequence"]:
        words.append(f"{fixed / size.layers:,.0f} bytes per sequence")
    if shared := mine["cache_bytes_shared"]:
        words.append(f"{shared / size.layers:,.0f} bytes per batch")
    return " + ".join(words) or "nothing"


def _limits(name: str) -> str:
    """Return what the mechanism declares that it cannot take, and where its states live."""
    kind = builtin_mechanisms()[name]
    able, words = kind.supports, []
    if len(able.positions) < 3:
        words.append(f"Positions it takes: {', '.join(sorted(able.positions))}.")
    if not able.bidirectional:
        words.append("Causal only.")
    if (space := getattr(kind, "residual", "euclidean")) != "euclidean":
        words.append(f"States live on the {space}.")
    return " ".join(words)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
