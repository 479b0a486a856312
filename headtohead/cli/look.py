"""h2h list, check, cost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from headtohead import api
from headtohead.cli.flags import flag
from headtohead.cli.pages import option_values, write_pages
from headtohead.cli.tables import print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_count, short_bytes, short_count
from headtohead.data.corpora import corpus_names
from headtohead.mechanisms.contract.describe import describe
from headtohead.mechanisms.contract.options import value_text
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.check import LEVELS, check_composed
from headtohead.model.decoder import Decoder
from headtohead.model.layout import NAMED_LAYOUTS, parse_layout
from headtohead.model.sizes import SIZES
from headtohead.study.probes import PROBES


def catalogue() -> dict[str, Any]:
    """Return everything a study can name, JSON-ready."""
    mechanisms = [describe(kind).as_dict() for kind in builtin_mechanisms().values()]
    sizes = []
    for name, size in SIZES.items():
        model = Decoder.on_meta(size, parse_layout("standard").layers(size.layers))
        sizes.append(
            {"name": name, "dims": size.dims, "parameters": model.parameter_count()} | size.as_dict()
        )
    corpora = [{"name": name, "about": about} for name, about in corpus_names().items()]
    probes = [
        {"name": name, "argument": probe.argument, "of": probe.of, "about": probe.about}
        for name, probe in PROBES.items()
    ]
    return {
        "mechanisms": mechanisms,
        "sizes": sizes,
        "corpora": corpora,
        "layouts": sorted(NAMED_LAYOUTS),
        "probes": probes,
    }


def _show_probes() -> None:
    rows = [(name, probe.argument, probe.of, probe.about) for name, probe in PROBES.items()]
    columns = ("probe", "behind a colon", "of studies of", "what it measures on every trained run")
    print_table('probes, as probes = ["indicators", "tasks:lambada"] or --probes', columns, rows)


def list_all(
    *,
    json_: Annotated[bool, flag(name="json")] = False,
    pages: Annotated[Path | None, flag("DIR")] = None,
    probes: Annotated[bool, flag()] = False,
) -> int:
    """Show mechanisms with their options, sizes, corpora, named layouts and probes.

    Args:
        json_: as one JSON document.
        pages: write a page about each mechanism into that directory instead.
        probes: show the probes alone.
    """
    if pages is not None:
        print(f"{len(write_pages(pages))} pages written to {pages}")
        return 0
    if probes and not json_:
        _show_probes()
        return 0
    everything = catalogue()
    if json_:
        print(json.dumps(everything, indent=1, ensure_ascii=False))
        return 0
    for mechanism in everything["mechanisms"]:
        rows = [
            (option["name"], value_text(option["default"]), option_values(option), option["help"])
            for option in mechanism["options"]
        ]
        title = f"{mechanism['name']}: {mechanism['summary']}"
        if rows:
            print_table(title, ("option", "default", "values", "what it does"), rows)
        else:
            print(title)
    sizes = [(size["name"], f"{size['parameters']:,}", size["dims"]) for size in everything["sizes"]]
    columns = ("size", "parameters (standard)", "width/layers/heads/feed-forward")
    print_table("sizes", columns, sizes, right=("parameters (standard)",))
    print_table("corpora", ("corpus", "what it is"), corpus_names().items())
    _show_probes()
    print("layouts: " + ", ".join(f"{name}(x)" for name in everything["layouts"]) + ", (a b)*3, a*6")
    return 0


def cost(
    arms: Annotated[tuple[str, ...], tyro.conf.Positional, flag("ARM")],
    /,
    *,
    size: str = "nano",
    context: Annotated[str | None, flag("COUNT")] = None,
    batch: int = 1,
    json_: Annotated[bool, flag(name="json")] = False,
) -> int:
    """Show what arms cost: parameters, forward FLOPs per token, cache bytes per token, by formula.

    Args:
        arms: mechanisms with options, or layouts.
        size: a model shape (h2h list).
        context: tokens in the window; the size's own when not given.
        batch: sequences that share what a batch computes once, such as a companion's pass.
        json_: as one JSON document.
    """
    if not arms:
        raise UserError(
            "h2h cost needs at least one arm, such as: h2h cost standard sharing:tie=kv --size 350m"
        )
    rows = [api.cost(arm, size=size, context=parse_count(context or 0), batch=batch) for arm in arms]
    if json_:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    first = rows[0]
    table = []
    for row in rows:
        flops, cached = row["flops_per_token"], row["cache_bytes_per_token"]
        fixed = (row["cache_bytes_per_sequence"] or 0) + (row["cache_bytes_shared"] or 0)
        table.append(
            (
                row["label"],
                f"{row['parameters']:,}",
                f"{row['parameters'] / first['parameters']:.3f}",
                short_count(flops["causal"]),
                short_count(flops["full"]),
                short_count(row["decode_flops_per_token"]),
                "none: recomputes" if cached is None else f"{cached:,}",
                short_bytes(cached * row["context"] + fixed) if cached is not None else "–",
            )
        )
    columns = (
        "arm",
        "parameters",
        "ratio",
        "FLOPs/token causal",
        "full",
        "decode",
        "cache bytes/token",
        "cache at context",
    )
    print_table(
        f"{size}: {first['dims']}; context {first['context']}, cache in bf16",
        columns,
        table,
        right=columns[1:],
    )
    return 0


def check(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, flag("NAME|FILE.py:Class")] = (),
    /,
    *,
    all_: Annotated[bool, flag(name="all")] = False,
    compile: Annotated[bool, flag()] = False,
) -> int:
    """Run the conformance suite on mechanisms: raceable, decodable, accounted. Exit code 1 if one is not raceable.

    Args:
        names: built-in mechanisms (with options, if only that setting is meant) or classes in files.
        all_: every built-in mechanism; exit code 1 if one misses the last level.
        compile: also check that torch.compile takes it whole (slow).
    """
    chosen = list(names) or ([*builtin_mechanisms()] if all_ else [])
    if not chosen:
        raise UserError(
            f"h2h check needs a name, FILE.py:Class, or --all (allowed: {', '.join(builtin_mechanisms())})"
        )
    good = True
    for name in chosen:
        composed = parse_layout(name).pattern[0]
        settings = api.check_settings(composed)
        show = (
            (lambda words, name=name: print(f"\r\033[K{name}: {words}", end="", file=sys.stderr))
            if sys.stderr.isatty()
            else None
        )
        found = check_composed(settings, compile, show)
        if show:
            print("\r\033[K", end="", file=sys.stderr)
        plural = "setting" if len(settings) == 1 else "settings"
        print(
            f"{name}: {found.level if found.level != 'none' else 'not raceable'} ({len(settings)} {plural}, {found.seconds:.1f} s)"
        )
        levels = list(LEVELS)
        for finding in found.findings:
            print(f"  {finding.check.replace('_', ' ')}: {finding.words}\n    at {finding.setting}")
        if not found.complete:
            missing = "raceable" if found.level == "none" else levels[levels.index(found.level) + 1]
            print(f"  mend these to be {missing}")
        good = good and (found.complete if all_ else found.level != "none")
    return 0 if good else 1
