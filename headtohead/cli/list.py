"""h2h list."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import Json, flag
from headtohead.cli.shared.pages import option_values, write_pages
from headtohead.cli.shared.tables import print_table
from headtohead.common.terminal import say, say_json
from headtohead.data.corpora import corpus_names
from headtohead.mechanisms.contract.options import value_text
from headtohead.study.probes import PROBES


def _show_probes() -> None:
    rows = [(name, probe.argument, probe.of, probe.about) for name, probe in PROBES.items()]
    columns = ("probe", "argument", "studies of", "what it measures")
    print_table('probes, as probes = ["indicators", "tasks:lambada"] or --probes', columns, rows)


def command(
    *, json_: Json = False, pages: Annotated[Path | None, flag("DIR")] = None, probes: bool = False
) -> None:
    """Show mechanisms with their options, sizes, corpora, named layouts and probes.

    Args:
        json_: print one JSON document
        pages: write one Markdown page per mechanism into this directory instead (default: none)
        probes: show only the probes
    """
    if pages is not None:
        say(f"{len(write_pages(pages))} pages written to {pages}")
        return
    if probes and not json_:
        _show_probes()
        return
    everything = api.catalog()
    if json_:
        say_json(everything, indent=1)
        return
    for mechanism in everything["mechanisms"]:
        rows = [
            (option["name"], value_text(option["default"]), option_values(option), option["help"])
            for option in mechanism["options"]
        ]
        title = f"{mechanism['name']}: {mechanism['summary']}"
        if mechanism["alone"]:
            title += f" Its runs cannot be rows of a population: {mechanism['alone']}"
        if rows:
            print_table(title, ("option", "default", "values", "description"), rows)
        else:
            say(title)
    sizes = [(size["name"], f"{size['parameters']:,}", size["dims"]) for size in everything["sizes"]]
    columns = ("size", "parameters (standard)", "width/layers/heads/feed-forward")
    print_table("sizes", columns, sizes, right=("parameters (standard)",))
    print_table("corpora", ("corpus", "contents"), corpus_names().items())
    _show_probes()
    say("layouts: " + ", ".join(f"{name}(x)" for name in everything["layouts"]) + ", (a b)*3, a*6")
