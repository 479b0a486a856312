from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headtohead as h2h
from headtohead.api.study import plain
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.score import Score
from headtohead.study.config.folder import default_folder
from headtohead.study.config.spec import build_study, read_study
from tests.fuzz import damaged, fuzz

ARMS = ["standard", "sharing:tie=kv"]


def print_nothing() -> None:
    """A function that is no score function."""


def test_defaults_are_five_paired_seeds_against_the_first_arm() -> None:
    spec = build_study({"arms": ARMS})
    assert spec.seeds == (1, 2, 3, 4, 5)
    assert spec.baseline_arm.text == "standard"
    assert spec.primary_arm is not None
    assert spec.primary_arm.text == "sharing:tie=kv"
    assert (spec.shapes, spec.lengths, spec.margin) == (("as_is",), ("tokens",), 0.005)


def test_an_arm_may_be_a_table_with_settings_of_its_own() -> None:
    spec = build_study(
        {
            "arms": ["standard", {"arm": "standard", "name": "fast", "lr": 0.01, "model": {"dropout": 0.1}}],
            "lr": 0.002,
        }
    )
    base, fast = spec.arms
    assert (fast.label, fast.text) == ("fast", "standard")
    assert spec.train_settings(base).lr == 0.002
    assert spec.train_settings(fast).lr == 0.01
    assert spec.size("nano", fast).settings.dropout == 0.1
    assert spec.size("nano", base).settings.dropout == 0.0


def halved(factor: float = 2.0) -> Score:
    @h2h.score
    def half(s, head, i, j):  # type: ignore[no-untyped-def]
        return s / factor

    return half


def test_an_arm_may_be_a_score_function() -> None:
    half = halved()
    for arms in (["standard", half], ["standard", {"arm": half, "lr": 0.01}]):
        assert [arm.label for arm in build_study({"arms": arms}).arms] == ["standard", "half"]
    assert (
        build_study({"arms": half}).arms[0].layout.pattern[0].base.options.function.function is half.function
    )
    study = h2h.Study(arms=half)
    assert plain(study.values)["arms"] == "half"


def test_two_mechanisms_with_one_name_are_rejected() -> None:
    words = "two arms are different mechanisms called 'half'; put them into a file under two names"
    with pytest.raises(UserError, match=words):
        build_study({"arms": [halved(), {"arm": halved(3.0), "name": "third"}]})
    with pytest.raises(UserError, match="'half' is given twice"):
        build_study({"arms": [halved(), halved()]})


def test_the_baseline_is_named_by_text_or_label() -> None:
    for name in ("sharing:tie=kv", "(Q, K=V)"):
        spec = build_study({"arms": ARMS, "baseline": name})
        assert spec.baseline_arm.label == "(Q, K=V)"
        assert spec.primary_arm is not None
        assert spec.primary_arm.text == "standard"


def test_equal_labels_are_made_distinct() -> None:
    spec = build_study({"arms": ["sharing:tie=kv", "sharing:tie=kv*2"]})
    assert [arm.label for arm in spec.arms] == ["(Q, K=V)", "sharing:tie=kv*2"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs arms"),
        ({"arms": []}, "needs arms"),
        ({"arms": [3]}, "an arm is a string"),
        ({"arms": [len]}, "a score function, or a table with 'arm' and its own settings; got <built-in"),
        (
            {"arms": [print_nothing]},
            "print_nothing is a function; race it with @headtohead.score above",
        ),
        ({"arms": [["x" * 500]]}, r"got \['x{70,80}$"),
        ({"arms": ["standard", "standard"]}, "given twice"),
        ({"arms": [{"name": "x"}]}, "an arm is a string"),
        ({"arms": [{"arm": "standard", "corpus": "x"}]}, "setting of arm"),
        ({"arms": ["standrd"]}, "did you mean 'standard'"),
        ({"arms": ARMS, "tokns": 5}, "unknown study setting 'tokns'; did you mean 'tokens'"),
        ({"arms": 0}, "needs arms"),
        ({"arms": [{"arm": "standard", "name": " "}]}, "its name is empty"),
        ({"arms": ["standard\x00"]}, "arms contains a control character"),
        ({"arms": ARMS, "corpus": "\ud800"}, "corpus is not valid UTF-8"),
        ({"arms": ARMS, "name": "\ud800"}, "name is not valid UTF-8"),
        ({"arms": ARMS, "name": "x" * 300}, "name takes a text of 1 to 200 bytes"),
        ({"arms": ARMS, "model": {"a\nb": 1}}, "contains a control character"),
        ({"arms": ARMS, "tokens": 16**4000}, "tokens is an integer of 16,001 bits"),
        ({"arms": ARMS, "lr": 0}, "lr=0 trains nothing"),
        ({"arms": [{"arm": "standard", "lr": 0}]}, "lr=0 trains nothing"),
        ({"arms": ARMS, "batch": 0}, "batch=0 is too small"),
        ({"arms": ARMS, "seeds": [2**63]}, "whole number"),
        ({"arms": ARMS, "seeds": [-1]}, "whole number"),
        ({"arms": ARMS, "seeds": [2**50]}, "seed 1125899906842624 is too large"),
        ({"arms": ARMS, "tokens": "lots"}, "expected a count"),
        ({"arms": ARMS, "tokens": -4}, "whole number"),
        ({"arms": ARMS, "seeds": 0}, "seeds=0"),
        ({"arms": ARMS, "seeds": "x"}, "expected a count"),
        ({"arms": ARMS, "seeds": [1, 1]}, "contain a duplicate"),
        ({"arms": ARMS, "size": "nanno"}, "did you mean 'nano'"),
        ({"arms": ARMS, "size": 4}, "size takes a string or a list of strings, got 4"),
        ({"arms": ARMS, "shape": "parms"}, "did you mean 'params'"),
        ({"arms": ARMS, "length": "flopz"}, "did you mean 'flops'"),
        ({"arms": ARMS, "baseline": "sharing"}, "arm given as baseline"),
        ({"arms": ARMS, "primary": "standard"}, "cannot be compared with itself"),
        ({"arms": ARMS, "margin": -1}, "margin"),
        ({"arms": ARMS, "batch": 100}, "not a multiple of the context"),
        ({"arms": ARMS, "model": 3}, "takes a table"),
        ({"arms": ARMS, "model": {"positionz": "rope"}}, "did you mean 'positions'"),
        ({"arms": ARMS, "model": {"dropout": "much"}}, "model.dropout takes a number"),
        ({"arms": ["standard*3"]}, "3 layers; this size has 2"),
        ({"arms": ["sharing:tie=qk,kv_heads=2"]}, "leave kv_heads out"),
        ({"arms": ["sharing:tie=kv,kv_heads=3"]}, None),
    ],
)
def test_mistakes_give_a_one_line_error(values: dict[str, Any], message: str | None) -> None:
    if message is None:
        build_study(values)  # rejected later, when the shape is known
        return
    with pytest.raises(UserError, match=message) as caught:
        build_study(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("arms = [", "is not TOML"), ("arms = 'a'\narms = 'b'", "is not TOML"), ("\x00", "is not TOML")],
)
def test_a_file_that_is_not_toml_is_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_study(tmp_path / "s.toml")
    with pytest.raises(UserError, match="no such study file"):
        read_study(tmp_path / "t.toml")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 10**7)
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "arms",
        "corpus",
        "size",
        "tokens",
        "seeds",
        "shape",
        "lr",
        "model",
        "batch",
        "margin",
        "name",
        "schedule",
    ]
)


@given(st.dictionaries(KEYS | st.text(max_size=5), VALUES, max_size=5), st.booleans())
@fuzz(300)
def test_any_values_are_a_study_or_a_clear_error(values: dict[str, Any], with_arms: bool) -> None:
    if with_arms:
        values["arms"] = ARMS
    try:
        build_study(values)
    except UserError as error:
        assert str(error)


TOML = """
name = "mine"
arms = ["standard", {arm = "sharing:tie=kv", name = "shared"}]
corpus = "stdlib"
size = ["nano", "1m"]
tokens = "500k"
seeds = [1, 2, 3]
shape = "params"
lr = 2e-3
[model]
positions = "rope"
"""


@given(damaged(TOML.encode()) | st.text(max_size=80).map(str.encode))
@fuzz(200)
def test_any_text_is_a_study_file_or_a_clear_error(scratch: Path, content: bytes) -> None:
    (scratch / "study.toml").write_bytes(content)
    try:
        build_study(read_study(scratch / "study.toml"))
    except UserError as error:
        assert str(error)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 10**400}, "lr takes a number"),
        ({"tune": {"lr": [1e-3, 2e-3, 10**400]}}, "tune.lr takes numbers"),
        ({"circuit_lr": [{"tag": "qk", "factor": 10**400}]}, "factor takes a number"),
        ({"branches": [10**400, "1M"]}, "branches: expected a whole number"),
        ({"bytes": 0}, "bytes=0 gives no text"),
        ({"tune": {"lr": [1e-3, 2e-3, 4e-3], "tokens": 10}}, "tune: tokens=10 do not fill one step"),
        ({"tune": 5}, "got 5"),
    ],
)
def test_numbers_out_of_range_are_rejected_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        build_study({"arms": ["standard", "diagonal"], **settings})


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mine", "mine"),
        ("/tmp/elsewhere", "_tmp_elsewhere"),
        ("..", "_"),
        ("../../x", ".._.._x"),
        ("A b", "A b"),
    ],
)
def test_a_name_is_one_directory_below_races(name: str, folder: str) -> None:
    assert default_folder(build_study({"arms": ARMS, "name": name})) == Path("races") / folder


def test_a_study_without_a_name_is_stored_by_its_arms_and_datasets() -> None:
    given = {"arms": ["standard", "even(prefix_mean)"], "corpus": "first:9M/100k(file:/data/b.txt)"}
    assert default_folder(build_study(given)) == Path(
        "races/standard-even_prefix_mean-on-first_9M_100k_b.txt"
    )
