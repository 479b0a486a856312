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

import altair as alt
import vl_convert
from findings_words import NOT_DECIDED, Section, headline, page, read_sections

from headtohead.common.files import write_atomic
from headtohead.report.charts import OUTCOMES, Chart
from headtohead.report.figures import PAPER, as_svg
from headtohead.report.panels.verdicts.claims import forest

ROOT = Path(__file__).parent.parent
_WIDTH, _SCALE = 840, 2.0
_CELL = 44
OVERVIEW = "findings"


def pictures(sections: Sequence[Section]) -> dict[str, Chart]:
    """Return the picture of every paper with published and measured effects, by the paper's name."""
    found = {section.name: forest(list(section.results.values())) for section in sections}
    return {name: chart for name, chart in found.items() if chart is not None}


def overview(sections: Sequence[Section]) -> Chart:
    """Return the outcomes of all claims as cells, one line per paper."""
    rows = [
        {"paper": section.name, "claim": claim.id.rpartition(".")[2], "outcome": section.outcome(claim)}
        for section in sections
        for claim in section.claims
    ]
    for row in rows:
        row["dark"] = "white" if row["outcome"] in ("supported", "contradicted") else "black"
    shown = {**OUTCOMES, **dict.fromkeys(NOT_DECIDED, "#ececec")}
    shown = {word: color for word, color in shown.items() if any(row["outcome"] == word for row in rows)}
    colors = alt.Scale(domain=list(shown), range=list(shown.values()))
    x = alt.X("claim:O", sort=None, axis=None)
    y = alt.Y("paper:N", sort=None, title=None, axis=alt.Axis(labelFontSize=14, domain=False, ticks=False))
    cells = alt.Chart(alt.Data(values=rows))
    color = alt.Color(
        "outcome:N", scale=colors, legend=alt.Legend(title=None, orient="bottom", labelFontSize=13)
    )
    text = cells.mark_text(fontSize=12).encode(
        x=x, y=y, text="claim:N", color=alt.Color("dark:N", scale=None)
    )
    title = alt.Title(headline(sections), anchor="start", fontSize=16, offset=12)
    layers = alt.layer(cells.mark_rect(stroke="white", strokeWidth=3).encode(x=x, y=y, color=color), text)
    width = _CELL * max(len(section.claims) for section in sections)
    return layers.properties(title=title, height=34 * len(sections), width=width).configure_view(stroke=None)


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
    write_atomic(
        given.docs / "images" / f"{OVERVIEW}.png",
        vl_convert.vegalite_to_png(overview(sections).to_dict(), scale=_SCALE),
    )
    print(f"drawn: {OVERVIEW}.png")
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
