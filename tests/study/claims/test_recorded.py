"""Reading claims.json: older files load, damaged ones are named, effects have shares of the published ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headtohead.common.errors import UserError
from headtohead.study.claims import ClaimResult
from headtohead.study.claims.recorded import effects, read_claims

OLD = {
    "id": "p.1",
    "statement": "said",
    "published": "some",
    "measured": [],
    "direction": "open",
    "size": "open",
    "scale": "reduced scale",
    "reason": "why",
}


def claim(*measured: dict[str, Any]) -> ClaimResult:
    return ClaimResult(**(OLD | {"measured": list(measured)}))


def test_a_file_of_an_older_version_loads(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    path.write_text(json.dumps([OLD]))
    (found,) = read_claims(path)
    assert (found.id, found.run, found.criteria) == ("p.1", "", [])


@pytest.mark.parametrize("content", ['{"id": 1}', '[{"id": "p.1"}]', "[3]"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "claims.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"damaged file .*claims\.json"):
        read_claims(path)


def test_an_effect_is_a_share_of_the_published_one() -> None:
    row = {"what": "a - b", "unit": "bits_per_byte", "difference": -0.01, "ci_low": -0.03, "ci_high": 0.01}
    (found,) = effects(claim(row | {"published": [-0.01, -0.03]}))
    assert found.reference == pytest.approx(-0.02)
    assert [found.share(end) for end in (-0.02, 0.0, 0.02)] == pytest.approx([1.0, 0.0, -1.0])
    assert found.measured == "-0.0100 (-0.0300 to +0.0100) bits per byte"
    assert found.stated == "-0.0300 to -0.0100"


@pytest.mark.parametrize("published", [None, [0.0], [-0.003, 0.003]])
def test_an_effect_without_a_published_sign_has_no_share(published: list[float] | None) -> None:
    (found,) = effects(claim({"what": "a - b", "difference": 0.1, "published": published}))
    assert found.reference is None
    with pytest.raises(ValueError, match="no published effect"):
        found.share(0.1)


def test_ratios_are_effects_relative_to_one() -> None:
    cost = {"what": "cache", "ratio": 0.5, "published": 0.5}
    speed = {"what": "a - b", "unit": "log ratio of headline (decode)", "difference": math.log(1.1)}
    speed |= {"ci_low": math.log(1.05), "ci_high": math.log(1.2), "published": [math.log(1.05)]}
    formula, measured = effects(claim(cost, speed))
    assert (formula.share(formula.value), formula.measured) == (1.0, "0.5")
    assert measured.share(measured.value) == pytest.approx(2.0)
    assert measured.measured == "1.1 (1.05 to 1.2) ratio of headline"


def test_rows_without_a_number_are_no_effects() -> None:
    checked = {"check": "t1", "what": "x", "value": 1.0, "expected": 1.0, "holds": True}
    assert effects(claim({"what": "a - b", "n": 0, "difference": None}, checked)) == []


def test_digits_follow_the_largest_number() -> None:
    row = {"what": "a", "unit": "accuracy", "difference": -0.0125, "ci_low": -0.0247, "ci_high": -0.000297}
    assert effects(claim(row))[0].measured == "-0.0125 (-0.0247 to -0.0003) accuracy"
    assert effects(claim({"what": "a", "difference": 0.0}))[0].measured == "+0"
