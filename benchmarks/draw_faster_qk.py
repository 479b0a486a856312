"""Draw the figures of docs/faster_qk.md from the studies in a folder.

    python benchmarks/draw_faster_qk.py races/fq

The folder is the output of `h2h reproduce faster_qk --scale small --out races/fq`. The toy's charts are used as found there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

import headtohead as h2h

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 1400
PICTURES = {
    "faster-qk-look": ("hatexplain", "explain-layer_mean"),
    "faster-qk-accuracy": ("hatexplain", "forest"),
    "faster-qk-squad": ("squad", "explain-layer_mean"),
    "faster-qk-language": (".", "forest"),
    "faster-qk-counter": ("counter", "forest"),
    **{f"toy-{name}": ("", f"toy-{name}") for name in ("alpha-at-loss", "phases", "heat")},
}


def shrink(source: Path, target: Path) -> None:
    """Write an image at the page's width with 256 colors; colors of small marks, as in a legend, are kept."""
    picture = Image.open(source).convert("RGB")
    small = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
    few = small.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(target, optimize=True)


def main(folder: Path) -> None:
    """Draw every figure whose study is in the folder."""
    for study in sorted({study for study, _ in PICTURES.values() if study}):
        h2h.open_study(folder / study).write_charts()
    for name, (study, chart) in PICTURES.items():
        source = folder / study / "charts" / f"{chart}.png"
        if source.is_file():
            shrink(source, IMAGES / f"{name}.png")
            print(IMAGES / f"{name}.png")
        else:
            print(f"{source} not found: {name} is unchanged")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
