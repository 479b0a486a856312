from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.options import (
    Options,
    build_options,
    changed_options,
    describe_options,
    identifying_options,
    option,
    options_as_dict,
    value_text,
)
from headtohead.mechanisms.contract.registry import builtin_mechanisms


@dataclass(frozen=True)
class Sample(Options):
    steps: int = option(1, "how many", low=1, high=7)
    rate: float = option(0.5, "how fast")
    kind: str = option("soft", "which", choices=("soft", "hard"))
    flag: bool = option(False, "whether")
    count: int = option(0, "a number without limits of its own")
    mix: tuple[float, ...] = option((), "weights")


@dataclass(frozen=True)
class Bare:
    """A user's dataclass, without the base class."""

    needed: int
    extra: float = 2.0


@dataclass(frozen=True)
class Extended(Sample):
    """The options of `Sample` after one more was added."""

    terms: int = option(1, "how many terms", low=1, added_later=True)


def test_an_option_added_later_identifies_a_run_only_if_it_differs_from_its_default() -> None:
    assert identifying_options(Extended()) == identifying_options(Sample()) == options_as_dict(Sample())
    assert identifying_options(Extended(terms=2)) == options_as_dict(Sample()) | {"terms": 2}
    assert identifying_options(Bare(3)) == {"needed": 3, "extra": 2.0}


def test_texts_become_values() -> None:
    options = build_options("x", Sample, {"steps": "3", "rate": "1e-2", "kind": "hard", "flag": "true"})
    assert options == Sample(3, 0.01, "hard", True)
    assert changed_options(options) == {"steps": 3, "rate": 0.01, "kind": "hard", "flag": True}
    assert options_as_dict(Sample()) == {"steps": 1, "rate": 0.5, "kind": "soft", "flag": False} | {
        "count": 0,
        "mix": [],
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stepz": "1"}, "unknown option of x 'stepz'; did you mean 'steps'"),
        ({"steps": "0"}, "at least 1"),
        ({"steps": "8"}, "at most 7"),
        ({"steps": "many"}, "takes a int, got 'many'"),
        ({"steps": "４"}, "takes a int, got '４'"),
        ({"steps": "1_0"}, "takes a int, got '1_0'"),
        ({"kind": "sof"}, "did you mean 'soft'"),
        ({"flag": "perhaps"}, "true or false"),
        ({"rate": "inf"}, "rate=inf must be finite"),
        ({"rate": "nan"}, "rate=nan must be finite"),
        ({"count": "99999999999999999999"}, "count=99999999999999999999 is too large; at most 2147483647"),
        ({"count": "-2147483648"}, "too small; at least -2147483647 is allowed"),
        ({"mix": (1.0, float("nan"))}, r"mix=\(1,nan\) must be finite"),
    ],
)
def test_mistakes_name_the_option_and_what_is_allowed(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_options("x", Sample, given)


def test_a_plain_dataclass_works_too() -> None:
    assert build_options("x", Bare, {"needed": "4"}) == Bare(4)
    with pytest.raises(UserError, match="needs its option 'needed'"):
        build_options("x", Bare, {})


def test_default_examples_try_every_listed_value() -> None:
    assert {(example.kind, example.flag) for example in Sample.examples()} == {
        ("soft", False),
        ("hard", False),
        ("soft", True),
    }  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", builtin_mechanisms())
def test_examples_of_every_mechanism_use_every_listed_value(name: str) -> None:
    kind = builtin_mechanisms()[name]
    examples = [options_as_dict(example) for example in kind.Options.examples()]
    for row in describe_options(kind.Options):
        assert row["help"], f"{name}: option {row['name']} has no description"
        wanted = row["choices"] or ([True, False] if isinstance(row["default"], bool) else [])
        for value in wanted:
            if value != "auto":
                assert any(example[row["name"]] == value for example in examples), (row["name"], value)


def test_values_survive_a_round_trip() -> None:
    assert value_text((1.0, -1.0)) == "(1,-1)"
    assert value_text(True) == "true"
    assert value_text(0.01) == "0.01"
