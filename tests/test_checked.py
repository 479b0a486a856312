"""Wrong types of arguments are one line that names the argument, what it takes and what was given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import headtohead as h2h
from headtohead.api.checked import checked
from headtohead.common.errors import UserError


@checked
def example(
    a: int = 0,
    b: float = 0.0,
    c: str | Path | None = None,
    d: str | Path | Sequence[str | Path] = (),
    e: Literal["x", "y"] = "x",
    f: bool = False,
    g: object = None,
) -> str:
    return "called"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"a": 1, "b": 1, "c": "x", "d": ["x", Path("y")], "e": "z", "f": True, "g": print},
        {"a": np.int64(1), "b": np.float32(1), "c": Path("x"), "d": Path("x")},
    ],
)
def test_arguments_of_the_annotated_types_are_accepted(given: dict[str, Any]) -> None:
    assert example(**given) == "called"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": "1"}, "a takes a whole number, got '1'"),
        ({"a": True}, "a takes a whole number, got True"),
        ({"b": None}, "b takes a number, got None"),
        ({"c": 3}, "c takes a path or None, got 3"),
        ({"d": [None]}, "d takes a path or a list of paths, got [None]"),
        ({"e": 1}, "e takes a text, got 1"),
        ({"f": 1}, "f takes True or False, got 1"),
    ],
)
def test_other_types_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        example(**given)
    assert str(error.value) == message


def study(story: Path) -> h2h.Study:
    return h2h.Study(["standard"], corpus=f"file:{story}", tokens=512, batch=256, seeds=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": None}, "device takes a text, got None"),
        ({"device": 3}, "device takes a text, got 3"),
        ({"threads": None}, "threads takes a whole number, got None"),
        ({"workers": "a"}, "workers takes a whole number, got 'a'"),
        ({"out": 3}, "out takes a path or None, got 3"),
        ({"out": ""}, "out is empty"),
        ({"time_limit": math.nan}, "expected a duration of 0 seconds or more, or a text such as 8m, got nan"),
        ({"time_limit": -1}, "expected a duration of 0 seconds or more, or a text such as 8m, got -1"),
        ({"time_limit": None}, "time_limit takes a number or a text, got None"),
    ],
)
def test_a_study_is_not_run_with_wrong_arguments(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        study(story).run(**({"out": tmp_path / "out", "quiet": True} | values))
    assert str(error.value).startswith(message)
    assert not list(tmp_path.iterdir())


def test_other_functions_name_a_wrong_argument(tmp_path: Path) -> None:
    calls: dict[str, Any] = {
        "paper takes a path, got None": lambda: h2h.reproduce(None),
        "scale takes a text, got 3": lambda: h2h.reproduce("sharing", scale=3),
        "expected a duration": lambda: h2h.reproduce("sharing", out=tmp_path, time_limit=-1),
        "no such study file: ": lambda: h2h.reproduce(tmp_path / "x.toml"),
        "path takes a path, got None": lambda: h2h.open_study(None),
        "run takes a path, got None": lambda: h2h.load(None),
        "out is empty": lambda: h2h.write_site([tmp_path], ""),
    }
    for message, call in calls.items():
        with pytest.raises(UserError) as error:
            call()
        assert str(error.value).startswith(message)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_of_arms_has_no_first_one(kind: Any) -> None:
    with pytest.raises(UserError, match="arms is a set, which has no order"):
        h2h.Study(kind(["standard", "gated"]))
