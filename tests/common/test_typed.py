from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest

from headtohead.common.errors import UserError
from headtohead.common.typed import decode


@dataclass(frozen=True)
class Inner:
    kind: Literal["rope", "none"] = "rope"
    share: float = 0.0
    limit: ClassVar[float] = 1

    def __post_init__(self) -> None:
        if self.share > self.limit:
            raise UserError(f"share={self.share} is above 1")


class Outer(msgspec.Struct, rename={"start": "from"}):
    name: str
    start: str = ""
    names: str | Annotated[list[str], msgspec.Meta(min_length=1)] = "a"
    margin: Annotated[float, msgspec.Meta(ge=0)] | None = None
    good: bool = True
    inner: Inner = Inner()
    counts: dict[str, int] = {}


def test_a_class_variable_is_no_setting() -> None:
    with pytest.raises(UserError, match=re.escape("unknown setting 'limit' (allowed: kind, share)")):
        decode(Inner, {"limit": 2.0})


def test_plain_values_become_typed_objects() -> None:
    found = decode(Outer, {"name": "x", "from": "y", "names": ("a", "b"), "inner": {"share": 1}})
    assert (found.name, found.start, found.names, found.inner) == ("x", "y", ["a", "b"], Inner(share=1.0))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "at.name is missing"),
        ({"nme": "x"}, "unknown at setting 'nme'; did you mean 'name'? (allowed: counts, from, "),
        ({"name": 3}, "at.name takes a string, got 3"),
        ({"name": "x", "from": []}, "at.from takes a string, got []"),
        ({"name": "x", "names": 4}, "at.names takes a string or a list of strings, got 4"),
        ({"name": "x", "names": [4]}, "at.names takes a string, got 4"),
        ({"name": "x", "names": []}, "at.names takes a string or a list of strings of length >= 1, got []"),
        ({"name": "x", "margin": -1}, "at.margin takes a number >= 0.0, got -1"),
        ({"name": "x", "margin": 10**309}, "at.margin takes a number, got 1000"),
        ({"name": "x", "good": "yes"}, "at.good takes true or false, got 'yes'"),
        ({"name": "x", "inner": 3}, "at.inner takes a table, got 3"),
        (
            {"name": "x", "inner": {"kind": "rop"}},
            "unknown value for at.inner.kind 'rop'; did you mean 'rope'?",
        ),
        ({"name": "x", "inner": {"kind": 3}}, "at.inner.kind takes one of none, rope, got 3"),
        ({"name": "x", "inner": {"share": 2}}, "share=2.0 is above 1"),
        ({"name": "x", "counts": {"a": "b"}}, "a value of at.counts takes a whole number, got {'a': 'b'}"),
        ([1], "at takes a table, got [1]"),
    ],
)
def test_a_mistake_names_the_setting_what_it_takes_and_what_was_given(value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        decode(Outer, value, "at")
    assert str(caught.value).startswith(message)
