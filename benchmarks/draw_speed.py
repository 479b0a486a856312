"""Draw the figures of docs/speed.md and write its numbers, from the rows in results/speed.

    python benchmarks/draw_speed.py            # docs/images/speed-*.png, and the marked blocks of docs/speed.md
    python benchmarks/draw_speed.py --check    # check whether the page agrees with the rows; draw nothing

A figure without rows is left out, with a note on the page. `--results` and `--docs` set other directories.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import speed_pictures
import vl_convert
from speed_rows import Measured
from speed_words import blocks

from headtohead.common.files import write_atomic
from headtohead.report.figures import PAPER

ROOT = Path(__file__).parent.parent
GROWTH = "growth.png"
"""Figure drawn by `h2h bench growth`."""
_SCALE = 2.0


def page_with(text: str, contents: dict[str, str]) -> str:
    """Return a page with the content between its marks replaced; an unknown mark raises KeyError."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- rows: {found[1]} -->\n{contents[found[1]]}\n<!-- end -->"

    return re.sub(r"<!-- rows: ([\w-]+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def as_png(definition: dict[str, Any]) -> bytes:
    """Return a chart as PNG on a white background."""
    return bytes(vl_convert.vegalite_to_png(json.dumps({**definition, "config": PAPER}), scale=_SCALE))


def main() -> None:
    """Draw and write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the page with the rows and draw nothing"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "speed")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    measured, page = Measured(given.results), given.docs / "speed.md"
    if not measured.documents:
        parser.error(f"--results {given.results}: no benchmark rows found")
    charts = {name: chart for name, draw in speed_pictures.PICTURES.items() if (chart := draw(measured))}
    before = page.read_text(encoding="utf-8")
    drawn = {name: f"speed-{name}.png" for name in charts}
    if "growth" in measured.documents and (given.docs / "images" / GROWTH).exists():
        drawn["growth"] = GROWTH
    text = page_with(before, blocks(measured, drawn))
    if given.check:
        sys.exit(
            None
            if text == before
            else f"{page} does not agree with the rows; run: python benchmarks/draw_speed.py"
        )
    for name, draw in speed_pictures.PICTURES.items():
        file = given.docs / "images" / f"speed-{name}.png"
        if name in charts:
            write_atomic(file, as_png(charts[name].to_dict()))
            print(f"drawn: {file.name}")
        else:
            file.unlink(missing_ok=True)
            print(f"left out, no rows: {file.name} ({(draw.__doc__ or '').splitlines()[0]})")
    write_atomic(page, text)


if __name__ == "__main__":
    main()
