"""Draw time per token against context from the rows written by `h2h bench growth --out rows.json`.

python benchmarks/draw_growth.py results/speed/growth.json docs/images/growth.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import headtohead
from headtohead.common.files import read_json


def main() -> None:
    """Draw the figure and print its path."""
    rows, figure = (Path(argument) for argument in sys.argv[1:3])
    print(headtohead.draw_growth(read_json(rows)["rows"], figure))


if __name__ == "__main__":
    main()
