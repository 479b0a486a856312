from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headtohead.common.errors import UserError
from headtohead.model.layout import NAMED_LAYOUTS, Layout, parse_layout
from tests.fuzz import fuzz

KV = "sharing:tie=kv"


def kept(text: str, layers: int) -> list[int]:
    """Return the layers, counted from 1, that are standard."""
    return [
        place
        for place, composed in enumerate(parse_layout(text).layers(layers), 1)
        if composed.text == "standard"
    ]


PUBLISHED = {
    "even": list(range(2, 25, 2)),
    "odd": list(range(1, 24, 2)),
    "top": list(range(1, 13)),
    "middle": [*range(1, 7), *range(19, 25)],
    "bottom": list(range(13, 25)),
    "quarter": [4, 8, 12, 16, 20, 24],
    "first": [1],
    "last": [24],
    "bilateral": [1, 24],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_layouts_give_the_published_lists(name: str) -> None:
    assert kept(f"{name}({KV})", 24) == PUBLISHED[name]


def test_every_named_layout_is_published() -> None:
    assert set(NAMED_LAYOUTS) == set(PUBLISHED)


def test_patterns_repeat_or_count() -> None:
    assert kept("standard", 3) == [1, 2, 3]
    assert kept(f"({KV} standard)*3", 6) == [2, 4, 6]
    assert kept(f"{KV} standard", 6) == [2, 4, 6]
    assert kept(f"{KV}*2 standard*4", 6) == [3, 4, 5, 6]
    assert kept(f"(({KV} standard)*2 standard)*2", 10) == [2, 4, 5, 7, 9, 10]


@pytest.mark.parametrize(
    ("text", "layers", "words"),
    [
        ("standard*6", 5, "has 6 layers; this size has 5"),
        (f"{KV} standard", 5, "cannot fill 5"),
        (f"middle({KV})", 6, "divisible by 4"),
        (f"top({KV})", 5, "divisible by 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_rejected(text: str, layers: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_layout(text).layers(layers)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty arm"),
        ("standrd", "did you mean 'standard'"),
        ("evn(standard)", "unknown layout 'evn'; did you mean 'even'"),
        ("even(standard", r"'\)' is missing"),
        ("(standard", r"'\)' is missing"),
        ("standard)", "unexpected text"),
        ("standard*", "count after"),
        ("standard*0", "between 1 and"),
        ("even(standard)*2", "takes no count"),
        ("even(standard) standard", "nothing can be added to it"),
        ("(even(standard))", "cannot be in a group"),
        ("sharing:", "option's name is missing"),
        ("sharing:tie", "'=' is missing"),
        ("sharing:tie=", "value is missing"),
        ("sharing:tie=kv,tie=kv", "given twice"),
        ("sharing:value_mix=(1,-1", "not closed"),
        ("sharing:ty=kv", "did you mean 'tie'"),
        ("standard+", "name is missing"),
        ("./none.py:Mine", "no such file"),
        ("mine.py", "no such file: mine.py"),
        ("(gated standard)*1e9", "a count has digits only; after it comes a space or the end, before 'e9'"),
        ("(gated standard)*1.5", "a count has digits only; after it comes a space or the end, before '.5'"),
        ("standard*2gated", "after it comes a space or the end, before 'gated'"),
        ("(gated standard)x3", r"after '\)' comes a space, a count such as '\*3', or the end, before 'x3'"),
        ("(gated standard)(gated)", r"after '\)' comes a space"),
        ("./sp ace/my score.py", r"ends in .py and has no spaces and none of \* \+ .*, before './sp ace"),
        ("./notpy.txt", "a file's path ends in .py"),
        ("notpy.txt", "a file's path ends in .py"),
    ],
)
def test_typing_mistakes_are_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse_layout(text)
    assert "\n" not in str(caught.value)


def test_labels_of_layouts() -> None:
    assert parse_layout("standard*6").label == "standard"
    assert parse_layout(f"even({KV})").label == "even((Q, K=V))"
    assert parse_layout(f"{KV} standard").label == "(Q, K=V) / standard"


ATOMS = st.sampled_from(
    ["standard", KV, "sharing:value_mix=(1,-1)", "diagonal", "standard:kv_heads=1,window=4"]
)


@st.composite
def layouts(draw: st.DrawFn, depth: int = 2) -> str:
    """Generate valid layouts as text."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        inner = draw(ATOMS) if depth == 0 or draw(st.booleans()) else f"({draw(layouts(depth=depth - 1))})"
        parts.append(inner + (f"*{draw(st.integers(1, 3))}" if draw(st.booleans()) else ""))
    return " ".join(parts)


@given(layouts())
@fuzz(60)
def test_any_valid_layout_fills_a_multiple_of_itself(text: str) -> None:
    layout = parse_layout(text)
    count = len(layout.pattern)
    layers = layout.layers(count)
    assert len(layers) == count
    rewritten = " ".join(composed.text for composed in layers)
    assert parse_layout(rewritten).layers(count) == layers


@given(st.text(alphabet="standrdshig:=(),*+ev0123456789. \n'\"<>", max_size=40))
@fuzz(300)
def test_any_text_is_a_layout_or_a_clear_error(text: str) -> None:
    try:
        assert isinstance(parse_layout(text), Layout)
    except UserError as error:
        assert str(error)


VALID = [
    "sharing:tie=kv,kv_heads=2",
    "(sharing:value_mix=(1,-1) standard)*3",
    "even(standard:window=4)",
    "standard*6",
]


@given(st.sampled_from(VALID), st.data())
@fuzz(200)
def test_any_misspelled_arm_is_a_layout_or_a_clear_error(text: str, data: st.DataObject) -> None:
    letters = list(text)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(letters)))
        letters[place : place + data.draw(st.integers(0, 2))] = data.draw(st.text(max_size=2))
    try:
        assert isinstance(parse_layout("".join(letters)), Layout)
    except UserError as error:
        assert str(error)


@pytest.mark.parametrize(
    "text", ["(" * 5000 + "standard" + ")" * 5000, "((standard*9999)*9999)*9999", "standard*99999999999"]
)
def test_a_layout_with_too_many_layers_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match=r"nest too deep|must give between"):
        parse_layout(text)
