"""h2h list."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from headtohead import api
from headtohead.api.catalog import size_rows, study_rows
from headtohead.cli.shared.options import Json, flag
from headtohead.cli.shared.pages import option_values, write_pages
from headtohead.cli.shared.tables import print_table, say_wrapped, width
from headtohead.common.errors import UserError
from headtohead.common.numbers import short_count
from headtohead.common.terminal import say, say_json
from headtohead.data.corpora import corpus_names
from headtohead.data.tasks.registry import task_names, zeroshot_names
from headtohead.mechanisms.contract.describe import Description, describe, describe_variant
from headtohead.mechanisms.contract.options import Options, value_text
from headtohead.mechanisms.contract.registry import builtin_mechanisms, did_you_mean, file_mechanisms
from headtohead.model.layout import NAMED_LAYOUTS, parse_layout
from headtohead.study.config.shipped import shipped_studies
from headtohead.study.probes import PROBES


def command(
    name: Annotated[str, flag("NAME")] = "",
    *,
    json_: Json = False,
    pages: Annotated[Path | None, flag("DIR")] = None,
    probes: bool = False,
) -> None:
    """Show what a study can name on one screen, or one mechanism with its options, or one section in full.

    Example: h2h list sharing

    Args:
        name: a mechanism, a shipped study, FILE.py, FILE.py:NAME, or a section: mechanisms, sizes, corpora, tasks, layouts, probes, studies (default: all)
        json_: print one JSON document with everything
        pages: write one Markdown page per mechanism into this directory instead (default: none)
        probes: the same as h2h list probes
    """
    name = "probes" if probes and not name else name
    if pages is not None:
        say(f"{len(write_pages(pages))} pages written to {pages}")
    elif json_ and (not name or name in SECTIONS):
        everything = api.catalog()
        say_json({name: everything[name]} if name else everything, indent=1)
    elif not name:
        _show_all()
    elif name in SECTIONS:
        SECTIONS[name]()
    elif name in shipped_studies() and name not in builtin_mechanisms():
        say(shipped_studies()[name].read_text(encoding="utf-8"), end="")
    elif json_:
        records = [one.as_dict() for one in _described(name).values()]
        say_json(records[0] if len(records) == 1 else records, indent=1)
    elif len(found := _described(name)) > 1:
        _show_file(found)
    else:
        _show_mechanism(*next(iter(found.items())))


def _show_all() -> None:
    """Print one line per mechanism and the names of everything else."""
    _show_mechanisms()
    say()
    sizes = [f"{row['name']} {short_count(row['parameters'])}" for row in size_rows()]
    general = [size for size in sizes if "-" not in size]  # the others are named after a paper
    listed: dict[str, Iterable[str]] = {
        "sizes": (*general, f"and {len(sizes) - len(general)} of papers"),
        "corpora": corpus_names(),
        "layouts": (*(f"{name}(x)" for name in sorted(NAMED_LAYOUTS)), "(a b)*3", "a*6"),
        "probes": PROBES,
        "studies": shipped_studies(),
    }
    for section, names in listed.items():
        # A name is not separated from what follows it.
        text = ", ".join(name.replace(" ", "\0") for name in names)
        lines = textwrap.wrap(text, min(width(), 120) - 9, break_on_hyphens=False)
        shown = "\n".join(f"{'' if index else section:<9}{line}" for index, line in enumerate(lines))
        say(shown.replace("\0", " "))
    say("\nh2h list NAME shows a mechanism, a study or a section (also: tasks) in full.")


def _show_mechanisms() -> None:
    say("mechanisms")
    wide = max(map(len, builtin_mechanisms())) + 4
    for name, kind in builtin_mechanisms().items():
        summary = textwrap.shorten(describe(kind).summary, min(width(), 120) - wide, placeholder=" …")
        say(f"{f'  {name}':<{wide}}{summary}")


def _show_sizes() -> None:
    rows = [(row["name"], f"{row['parameters']:,}", row["dims"]) for row in size_rows()]
    columns = ("size", "parameters (standard)", "width/layers/heads/feed-forward")
    print_table("", columns, rows, right=("parameters (standard)",))


def _show_corpora() -> None:
    print_table("", ("corpus", "contents"), corpus_names().items())


def _show_tasks() -> None:
    print_table("", ("task", "contents"), task_names().items())
    print_table("", ("zero-shot task", "contents"), zeroshot_names().items())


def _show_layouts() -> None:
    """Print which layers each named layout gives to x in a model of eight."""
    rows = []
    for name in sorted(NAMED_LAYOUTS):
        others = [str(layer) for layer in range(1, 9) if layer not in NAMED_LAYOUTS[name](8)]
        rows.append((f"{name}(x)", ", ".join(others)))
    print_table("", ("layout", "layers of x in a model of 8; the others are standard"), rows)
    say("\n(a b)*3 and a*6 give every layer; a b repeats until the model is full.")


def _show_probes() -> None:
    rows = [(name, probe.argument, probe.of, probe.about) for name, probe in PROBES.items()]
    columns = ("probe", "argument", "studies of", "what it measures")
    print_table('probes, as probes = ["indicators", "tasks:lambada"] or --probes', columns, rows)


def _show_studies() -> None:
    rows = [(row["name"], row["title"], row["claims"] or "") for row in study_rows()]
    print_table("", ("study", "title", "claims"), rows, right=("claims",))
    say("\nh2h race NAME runs a study; h2h reproduce NAME runs one with claims and decides them.")


SECTIONS: dict[str, Callable[[], None]] = {
    "mechanisms": _show_mechanisms,
    "sizes": _show_sizes,
    "corpora": _show_corpora,
    "tasks": _show_tasks,
    "layouts": _show_layouts,
    "probes": _show_probes,
    "studies": _show_studies,
}


def _described(name: str) -> dict[str, Description]:
    """Return the mechanism of a name, or those of a file, by the arms that name them."""
    if name.endswith(".py"):
        return {f"{name}:{own}": describe(kind) for own, kind in file_mechanisms(name).items()}
    if ".py:" in name:
        term = parse_layout(name).pattern[0].terms[0]
        return {f"{term.path}:{term.kind.__name__}": describe(term.kind)}
    base, _, variant = name.partition(":")
    kind = builtin_mechanisms().get(base)
    if kind is None:
        others = {**SECTIONS, **shipped_studies()}
        close, names = did_you_mean(name, others=others), sorted({*builtin_mechanisms(), *others})
        raise UserError(f"unknown mechanism, study or section '{name}'{close} (allowed: {', '.join(names)})")
    if issubclass(kind.Options, Options) and variant in kind.Options.variants():
        return {name: describe_variant(kind, variant)}
    if variant:
        raise UserError(f"'{name}' has options; h2h list {base} shows all it takes")
    return {name: describe(kind)}


def _show_file(found: dict[str, Description]) -> None:
    """Print one line for each mechanism of a file."""
    print_table("", ("arm", "what it does"), [(arm, one.summary) for arm, one in found.items()])
    say(f"\nh2h list {next(iter(found))} shows one with its options.")


def _show_mechanism(arm: str, found: Description) -> None:
    say_wrapped(f"{arm}: {found.summary}")
    rows = [
        (option["name"], value_text(option["default"]), option_values(option), option["help"])
        for option in found.options
    ]
    if rows:
        print_table("", ("option", "default", "values", "description"), rows)
        say(f"\nas an arm: {arm}{_example(arm, found)}")
    else:
        say("It has no options.")
    if found.name in builtin_mechanisms():
        say(f"idea, equation and claims: docs/mechanisms/{found.name}.md; costs: h2h cost {found.name}")


def _example(arm: str, found: Description) -> str:
    """Return an option of the mechanism's own as it follows the arm; nothing if it has only those of every layer."""
    usual = "kv_heads"
    shown = next((option for option in found.options if option["name"] != usual), found.options[0])
    if shown["name"] == usual and ":" in arm:
        return ""
    value = value_text(shown["choices"][-1] if shown["choices"] else shown["default"])
    return f"{',' if ':' in arm else ':'}{shown['name']}={value or 'VALUE'}"
