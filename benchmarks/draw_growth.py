"""Draw time per token against context from the rows that `h2h bench growth --out rows.json` left.

python benchmarks/draw_growth.py results/speed/growth.json docs/images/growth.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import headtohead
from headtohead.common.files import read_json


def main() -> None:
    """Draw."""
    rows, picture = (Path(word) for word in sys.argv[1:3])
    print(headtohead.draw_growth(read_json(rows)["rows"], picture))


if __name__ == "__main__":
    main()
