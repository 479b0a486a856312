"""What a user's file has is known by the name that the file has for it: two objects from one factory are two mechanisms."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headtohead as h2h
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Shape
from headtohead.mechanisms.contract.terms import Term
from headtohead.model.layout import parse_layout

SCORES = """\
import headtohead as h2h
import torch


def make(c):
    @h2h.score
    def cap(s, head, i, j):
        return c * torch.tanh(s / c)

    return cap


def base(s, head, i, j):
    return s / 2


cap = make(30.0)
cap_tiny = make(0.001)
half = h2h.score(lambda s, head, i, j: s / 2)
mild = h2h.score(base)
from headtohead.mechanisms.families.scores import alibi as mine
"""
CLASSES = """\
import headtohead as h2h
from torch import nn


def make(factor, own=h2h.Mechanism):
    class Scaled(own):
        '''x, scaled.'''

        scale = factor

        def __init__(self, shape, options):
            super().__init__() if own is nn.Module else super().__init__(shape, options)
            self.v = nn.Linear(shape.width, shape.width)

        def forward(self, x, frame):
            return self.scale * self.v(x)

    return Scaled


Double = make(2.0)
Half = make(0.5)
Plain = make(3.0, nn.Module)
Wrapped = h2h.wrap(nn.Linear(16, 16), name="linear")
Other = h2h.wrap(nn.Linear(16, 16), name="linear")
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a user's file and returns its path."""

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return str(tmp_path / "mine.py")

    return write


def term(arm: Any) -> Term:
    return parse_layout(arm).pattern[0].terms[0]


@pytest.mark.parametrize("name", ["cap", "cap_tiny", "half", "mild", "mine"])
def test_a_score_function_has_the_name_of_its_variable(write: Callable[[str], str], name: str) -> None:
    arm = f"{write(SCORES)}:{name}"
    found = term(arm)
    assert (found.text, found.as_dict()["mechanism"], found.kind.label(found.options)) == (arm, name, name)
    assert term(found.text) == found
    assert name in str(found.options.function)


@pytest.mark.parametrize("name", ["Double", "Half", "Plain", "Wrapped", "Other"])
def test_a_class_has_the_name_of_its_variable(write: Callable[[str], str], name: str) -> None:
    arm = f"{write(CLASSES)}:{name}"
    found = term(arm)
    assert (found.text, found.as_dict()["mechanism"], found.kind.label(found.options)) == (arm, name, name)
    assert term(found.text) == found
    parse_layout(arm).pattern[0].build(Shape(16, 4))


def test_two_score_functions_from_one_factory_compute_what_their_names_say(
    write: Callable[[str], str],
) -> None:
    file, ten = write(SCORES), torch.tensor(10.0)
    wide, tiny = (term(f"{file}:{name}").options.function for name in ("cap", "cap_tiny"))
    assert wide(ten, *[ten] * 3) > 9
    assert tiny(ten, *[ten] * 3) == pytest.approx(0.001)


def test_two_classes_of_one_file_with_one_declared_name_are_one_line(write: Callable[[str], str]) -> None:
    body = "    name = 'same'\n    def forward(self, x, frame): return x\n"
    file = write(
        f"import headtohead as h2h\nclass A(h2h.Mechanism):\n{body}class B(h2h.Mechanism):\n{body}class C(A):\n    pass\n"
    )
    with pytest.raises(UserError, match="A and B are both named 'same'; give each a name of its own"):
        parse_layout(f"{file}:A")
    assert term(f"{file}:C").as_dict()["mechanism"] == "C"


def capped(c: float) -> Any:
    @h2h.score
    def cap(s, head, i, j):  # type: ignore[no-untyped-def]
        return c * torch.tanh(s / c)

    return cap


def test_a_value_that_cannot_identify_a_run_is_one_line() -> None:
    opened = iter([1.0])
    generator = (value for value in opened)

    @h2h.score
    def reads(s, head, i, j):  # type: ignore[no-untyped-def]
        return s + next(generator)

    with pytest.raises(UserError, match="reads uses a generator, which cannot identify a run"):
        parse_layout(reads)


def test_a_file_that_races_itself_while_it_is_imported_is_one_line(write: Callable[[str], str]) -> None:
    file = write(f"{SCORES}\nh2h.Study(arms=[cap])\n")
    with pytest.raises(
        UserError, match=r"uses its own mechanisms while it is imported.* __name__ == '__main__'"
    ):
        parse_layout(f"{file}:cap")
    (Path(file)).write_text(f"{SCORES}\nif __name__ == '__main__':\n    h2h.Study(arms=[cap])\n")
    assert term(f"{file}:cap").text == f"{file}:cap"


def test_an_object_that_the_imported_file_has_not_is_passed_in_python(
    write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(SCORES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", None)  # absent again after the test
    del sys.modules["mine"]
    file = importlib.import_module("mine")
    assert term(file.cap_tiny).text == f"{tmp_path / 'mine.py'}:cap_tiny"
    file.cap = file.make(5.0)  # as below `if __name__ == "__main__":`
    file.later = file.make(6.0)
    assert [term(value).text for value in (file.cap, file.later)] == ["cap", "later"]


VALUES = """\
import headtohead as h2h

CAP = 30.0


def make(values):
    class Mine(h2h.Mechanism):
        table = values

        def forward(self, x, frame):
            return x * self.table[0]

    return Mine


class Base(h2h.Mechanism):
    def forward(self, x, frame):
        return x


class Derived(Base):
    pass


Made = make([1.0])
cap = h2h.score(lambda s, head, i, j: s.clamp_max(CAP))
"""


@pytest.mark.parametrize(
    ("name", "below"),
    [
        ("Made", "Made = make([2.0])"),
        ("Made", "Made.table.append(2.0)"),
        ("cap", "CAP = 1.0"),
        ("Derived", "Base.forward = lambda self, x, frame: -x"),
    ],
)
def test_an_object_changed_below_main_is_not_that_of_the_file(
    write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, name: str, below: str
) -> None:
    file = Path(write(VALUES))
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]
    module = importlib.import_module("mine")
    whole = term(getattr(module, name))
    assert whole.text == f"{file}:{name}"
    exec(below, vars(module))
    changed = term(getattr(module, name))
    assert changed.path == ""
    assert changed.source != whole.source


def test_a_class_of_a_package_with_relative_imports_is_passed_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts_of_mine").mkdir()
    for name, text in {
        "__init__": "",
        "half": "def half(x):\n    return x / 2\n",
        "mine": "import headtohead as h2h\nfrom .half import half\n\n\nclass Mine(h2h.Mechanism):\n"
        "    def forward(self, x, frame):\n        return half(x)\n",
    }.items():
        (tmp_path / "parts_of_mine" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = term(importlib.import_module("parts_of_mine.mine").Mine)
    assert (found.text, found.path) == ("Mine", "")
    assert found.source


def test_a_function_made_at_the_top_level_is_named_by_its_file() -> None:
    found = term(TOP)
    assert found.text == f"{__file__}:TOP"


TOP = capped(2.0)
