"""Declarations of score functions: what is wrong with one is said in one line, with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Shape
from headtohead.mechanisms.contract.options import Options
from headtohead.mechanisms.contract.scored import ScoredOptions
from headtohead.model.layout import parse_layout

HEAD = "import functools\nimport headtohead as h2h\nimport torch\n"
LEARNED = "h2h.Learned = h2h.learned"


def built(folder: Path, source: str, rest: str = "") -> nn.Module:
    """Return the layer of the function `f` in a user's file, whose first line of its own is 4."""
    (folder / "mine.py").write_text(f"{HEAD}{source}\n")
    return parse_layout(f"{folder / 'mine.py'}:f{rest}").pattern[0].build(Shape(16, 4))


def defined(*arguments: str, body: str = "s") -> str:
    return f"@h2h.score\ndef f({', '.join(('s', 'head', 'i', 'j', *arguments))}):\n    return {body}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("@h2h.score('sigmoid')\ndef f(s, head, i, j): ...", "write @h2h.score(normalize='sigmoid')"),
        ("@h2h.score\n@h2h.score\ndef f(s, head, i, j): ...", "f is a score function already"),
        ("f = h2h.score(3)", "takes a function, def or lambda, not a int"),
        ("f = h2h.score(functools.partial(print))", "def or lambda, not a partial"),
        ("@h2h.score\nclass f: ...", "def or lambda, not the class f"),
        ("@h2h.score\nasync def f(s, head, i, j): ...", "f is async"),
        (
            "@h2h.score(normalise='sigmoid')\ndef f(s, head, i, j): ...",
            "unknown argument of h2h.score 'normalise'; did you mean 'normalize'",
        ),
        ("def f(s, head, i, j): ...", "f is a function; race it with @headtohead.score above it"),
        (defined("a: float = float('nan')"), "default of f: a=nan must be finite"),
        (defined("a: int = 10**30"), "default of f: a=1000000000000000000000000000000 is too large"),
        (defined("a: float = h2h.option(-1.0, 'x', low=0)"), "default of f: a=-1 is too small"),
        (defined("context: int = 5"), "argument context of f is a number of the model; write it without a"),
        (defined(f"heads: {LEARNED}(4)"), "argument heads of f is a number of the model"),
        (defined(f"reach: int = 0, t: {LEARNED}('reach')"), "default of f: reach=0 is too small; at least 1"),
        (defined(f"t: {LEARNED}('heads', init=torch.inf)"), "argument t of f has init=inf, std=0"),
        (defined(f"t: {LEARNED}('heads', std=-1.0)"), "argument t of f has init=0, std=-1"),
        (defined(f"t: {LEARNED}(True)"), "dimension True of learned t is not a number above 0"),
        ("@h2h.score\ndef f(*, s, head, i, j): ...", "f(*, s, head, i, j) must begin with (s, head, i, j)"),
        ("@h2h.score\ndef f(s, head, i, *j): ...", "f(s, head, i, *j) must begin with (s, head, i, j)"),
        (defined(f"t: {LEARNED}('heads', 10**12)"), "the shape (4, 1000000000000); at most 268,435,456"),
    ],
)
def test_a_wrong_declaration_is_one_line_with_its_place(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        built(tmp_path, source)
    assert words in str(caught.value)
    assert "mine.py, line 4: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_arguments_can_be_positional_only(tmp_path: Path) -> None:
    assert built(tmp_path, "@h2h.score\ndef f(s, head, i, j, /, cap: float = 1.0):\n    return s")


def test_a_function_without_the_decorator_is_named_if_the_file_has_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def other(x): ...\ndef f(s, head, i, j):\n    return s\n")
    with pytest.raises(UserError, match=r"line 2: f is a function; race it with @headtohead\.score above it"):
        parse_layout(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            *(name for name in dir(ScoredOptions) if name[0] != "_"),
            *Options.__annotations__,
            *ScoredOptions.__annotations__,
        }
    ),
)
def test_an_option_cannot_have_the_name_of_an_attribute_of_options(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"line 4: f cannot have an option '{name}'.*rename it") as caught:
        built(tmp_path, defined(f"{name}: int = 3"))
    assert "\n" not in str(caught.value)


def test_every_attribute_that_options_use_is_reserved() -> None:
    assert {"validate", "selector", "examples", "cases", "variants", "state_rows"} <= set(dir(ScoredOptions))


@pytest.mark.parametrize("name", sorted(name for name in vars(nn.ParameterDict) if name[0] != "_"))
def test_a_learned_tensor_cannot_have_the_name_of_an_attribute_of_its_container(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(
        UserError, match=f"argument {name} of f cannot be learned under a name that torch uses"
    ):
        built(tmp_path, defined(f"{name}: {LEARNED}('heads')", body=f"s + {name}[head]"))


def test_a_dimension_is_at_least_1(tmp_path: Path) -> None:
    source = defined(f"reach: int = 4, t: {LEARNED}('reach')", body="s + t[(i - j).clamp_max(reach - 1)]")
    for value in (0, -1):
        with pytest.raises(UserError, match=f"reach={value} is too small; at least 1 is allowed"):
            built(tmp_path, source, f",reach={value}")
    assert built(tmp_path, source, ",reach=1").get_parameter("learned.t").shape == (1,)


def test_a_parameter_that_is_no_argument_is_one_line(tmp_path: Path) -> None:
    table = "w = torch.nn.Parameter(torch.ones(4))\n"
    with pytest.raises(
        UserError, match=r"line 5: f uses a parameter .* declare it .* h2h\.learned\(\.\.\.\)"
    ):
        built(tmp_path, table + defined(body="s + w[head]"))
    built(tmp_path, table + defined(body="s + w.detach()[head]"))
    learned = built(tmp_path, defined(f"w: {LEARNED}('heads')", body="s + w[head]"))
    assert isinstance(learned.get_parameter("learned.w"), torch.Tensor)
