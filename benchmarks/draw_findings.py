"""Write docs/findings.md and its pictures from the shipped studies and the claims.json files in results.

    python benchmarks/draw_findings.py            # docs/findings.md and docs/images/findings-*.png
    python benchmarks/draw_findings.py --check    # check whether the page agrees with the results; draw nothing

What a reader of a paper should know is in results/NAME/summary.md. `--results` and `--docs` set other directories.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import vl_convert
from findings_words import Section, page, read_sections

from headtohead.common.files import write_atomic
from headtohead.report.charts import Chart
from headtohead.report.figures import PAPER, as_svg
from headtohead.report.panels.verdicts.claims import forest

ROOT = Path(__file__).parent.parent
_WIDTH, _SCALE = 840, 2.0


def pictures(sections: Sequence[Section]) -> dict[str, Chart]:
    """Return the picture of every paper with published and measured effects, by the paper's name."""
    found = {section.name: forest(list(section.results.values())) for section in sections}
    return {name: chart for name, chart in found.items() if chart is not None}


def main() -> None:
    """Draw and write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the page with the results and draw nothing"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    file, sections = given.docs / "findings.md", read_sections(given.results)
    charts = pictures(sections)
    text = page(sections, list(charts))
    if given.check:
        agrees = file.is_file() and file.read_text(encoding="utf-8") == text
        sys.exit(None if agrees else f"{file} is out of date; run: python benchmarks/draw_findings.py")
    for section in sections:
        picture = given.docs / "images" / f"findings-{section.name}.png"
        if section.name not in charts:
            picture.unlink(missing_ok=True)
            continue
        svg = as_svg(charts[section.name].to_dict(), PAPER, _WIDTH)
        write_atomic(picture, vl_convert.svg_to_png(svg, scale=_SCALE))
        print(f"drawn: {picture.name}")
    for section in sections:
        if section.results and not section.summary:
            print(f"missing: {given.results / section.name / 'summary.md'} (three sentences for readers)")
    write_atomic(file, text)


if __name__ == "__main__":
    main()
