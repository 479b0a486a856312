from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headtohead
from headtohead.common.errors import UserError
from headtohead.report.growth import GROWS, STANDARD, STAYS, growth_chart, spread


def rows() -> list[dict[str, Any]]:
    """Return three arms at two contexts, and one row that is not on the context axis."""
    base = {"context": 512, "batch": 4, "layers": 2, "width": 64}
    same = {
        "size": "nano",
        "device": "cpu",
        "precision": "float32",
        "compiled": False,
        "base": base,
        "width": 64,
    }
    found = [
        same
        | {"arm": arm, "context": context, "batch": 2048 // context, "layers": 2}
        | {"seconds": 1e-3 * more, "flops": 1e6 * more}
        for arm, growth in (("standard", 3), ("coupled", 3), ("token_mlp", 1))
        for context, more in ((512, 1), (2048, growth))
    ]
    return [*found, found[0] | {"layers": 4, "seconds": 9.0}]


def test_lines_are_colored_by_declared_growth() -> None:
    definition = growth_chart(rows())
    points = definition["layer"][0]["data"]["values"]
    kinds = {row["arm"]: row["kind"] for row in points}
    assert kinds == {"standard": STANDARD, "coupled": GROWS, "token_mlp": STAYS}
    assert len(points) == 6
    assert {row["time"] for row in points if row["arm"] == "token_mlp"} == {1e9 / 2048 / 1e6}


def test_labels_keep_their_order_and_a_minimum_distance() -> None:
    places = spread([1.0, 1.1, 1.1, 5.0], 0.5, 0.0, 5.0)
    assert places == [1.0, 1.5, 2.0, 5.0]
    assert spread([4.8, 4.9, 5.0], 0.5, 0.0, 5.0) == [4.0, 4.5, 5.0]


def test_a_picture_is_a_png_or_an_svg(tmp_path: Path) -> None:
    assert headtohead.draw_growth(rows(), tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match=r"\.png or \.svg"):
        headtohead.draw_growth(rows(), tmp_path / "growth.jpg")
    with pytest.raises(UserError, match="no directory"):
        headtohead.draw_growth(rows(), tmp_path / "nowhere" / "growth.svg")
    with pytest.raises(UserError, match="two contexts"):
        headtohead.draw_growth(rows()[:1], tmp_path / "growth.svg")
    with pytest.raises(UserError, match="no rows"):
        headtohead.draw_growth([], tmp_path / "growth.svg")
