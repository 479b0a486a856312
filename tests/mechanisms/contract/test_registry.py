"""What is said about an unknown mechanism: the nearest of our names, also for the names of papers."""

from __future__ import annotations

from pathlib import Path

import pytest

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.describe import describe
from headtohead.mechanisms.contract.registry import OTHER_NAMES, file_mechanisms, find_mechanism
from headtohead.model.layout import parse_layout


@pytest.mark.parametrize(
    ("arm", "close"),
    [
        ("standrd", "standard"),
        ("alibi", "flex:alibi"),
        ("ALiBi", "flex:alibi"),
        ("softcap=30", "flex:softcap=30"),
        ("even(softcap=30)", "flex:softcap=30"),
        ("fox", "forgetting"),
        ("gla", "gated_linear"),
        ("XSA", "exclusive"),
        ("gated_attention", "gated"),
        ("kda", "gated_delta:decay=channel"),
        ("mamba2", "selective_state"),
        ("Mamba-2", "selective_state"),
        ("deltanet", "gated_delta:decay=none"),
        ("GatedDeltaNet", "gated_delta"),
    ],
)
def test_an_unknown_mechanism_has_the_nearest_of_our_names(arm: str, close: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_layout(arm)
    assert f"; did you mean '{close}'? (allowed: approximate, " in str(caught.value)
    parse_layout(close)


def test_a_name_like_no_other_has_no_suggestion() -> None:
    with pytest.raises(UserError, match=r"unknown mechanism 'zzz' \(allowed: .*, or FILE\.py\)"):
        find_mechanism("zzz")


def test_every_name_of_a_paper_is_an_arm_of_ours() -> None:
    for name, arm in OTHER_NAMES.items():
        assert parse_layout(arm).text == arm
        assert name == name.lower().replace("_", "").replace("-", "")


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        (
            "flex:window=3",
            "flex: window is an option of sliding, dilated, prefix; write flex:sliding,window=3",
        ),
        ("flex:cap=3", "flex: cap is an option of softcap; write flex:softcap,cap=3"),
    ],
)
def test_an_option_of_a_variant_names_the_variant(arm: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_layout(arm)
    assert str(caught.value) == words
    parse_layout(words.rpartition(" ")[2])


def test_what_is_no_arm_at_all_is_one_line() -> None:
    with pytest.raises(UserError, match="an arm is a string, a class or a score function; got a list"):
        parse_layout(["standard"])
    with pytest.raises(UserError, match=r"bare is a function; race it with @headtohead\.score above it"):
        parse_layout(bare)


def bare() -> None:
    """No score function."""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("class A(h2h.Mechanism):\n    pass", "line 2: A has no forward; write def forward(self, x, frame)"),
        ("class A(nn.Module):\n    pass", "line 2: A has no forward; write def forward(self, x, frame)"),
        ("class A(Stage):\n    pass", "line 2: A has no evolve; write def evolve(self, q, k, frame)"),
        (
            "class A(Base):\n    Options = 3",
            "line 2: A has Options = 3; Options must be a dataclass derived from headtohead.Options",
        ),
        ("A = h2h", "mine.py: A is not a mechanism; derive the class from headtohead.Mechanism"),
    ],
)
def test_what_a_class_lacks_is_one_line(tmp_path: Path, body: str, words: str) -> None:
    file = tmp_path / "mine.py"
    head = "from headtohead.mechanisms.standard import Standard as Base; from headtohead.mechanisms.contract.projected "
    file.write_text(f"import headtohead as h2h; from torch import nn; {head}import Stage\n{body}\n")
    with pytest.raises(UserError) as caught:
        parse_layout(f"{file}:A")
    assert str(caught.value).endswith(words)


def test_a_base_class_without_forward_is_no_mechanism_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import headtohead as h2h\n\n\nclass Base(h2h.Mechanism):\n    pass\n\n\n"
        "class Mine(Base):\n    def forward(self, x, frame):\n        return x\n"
    )
    assert list(file_mechanisms(str(file))) == ["Mine"]
    assert parse_layout(str(file)).label == "Mine"
    assert describe(file_mechanisms(str(file))["Mine"]).summary == "Mine"  # without a docstring of its own


@pytest.mark.parametrize(
    "arm",
    [
        *("canon:kernel", "gated_delta:key_dim", "gated_delta:conv", "gated_delta:decay=channel,decay_rank"),
        *("selective_state:state", "selective_state:conv"),
    ],
)
def test_a_dimension_beyond_all_memory_is_one_line(arm: str) -> None:
    with pytest.raises(UserError, match="=2000000000 is too large; at most"):
        parse_layout(f"{arm}=2000000000")
