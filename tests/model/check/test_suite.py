"""Each check catches the mechanism that is broken in its way, names it, and lets correct ones pass."""

from __future__ import annotations

import pytest

import headtohead as h2h
from headtohead.api import check_settings
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.mechanisms.contract.terms import Composed, Term
from headtohead.model.check import LEVELS, accounted, check_composed
from headtohead.model.check.fixture import Failure, Fixture
from headtohead.model.check.suite import SLOW
from headtohead.model.layout import parse_layout
from tests.model.check import broken


def check(kind: type[Mechanism], compile: bool = False):  # type: ignore[no-untyped-def]
    return check_composed([Composed((Term(kind, broken.StandardOptions()),))], compile)


@pytest.mark.parametrize("kind", broken.CAUGHT, ids=lambda kind: kind.__name__)
def test_a_broken_mechanism_is_caught_by_the_check_for_it(kind: type[Mechanism]) -> None:
    name, words = broken.CAUGHT[kind]
    found = check(kind)
    caught = {finding.check: finding.words for finding in found.findings}
    assert name in caught, f"caught by {caught or 'nothing'}"
    assert words in caught[name]
    assert found.level == broken.LEVEL_WITH.get(name, "none")


def test_every_check_has_a_mechanism_that_fails_it() -> None:
    checks = {check.__name__ for level in LEVELS.values() for check in level}
    assert checks == {name for name, _ in broken.CAUGHT.values()} - {"build"}
    assert [check.__name__ for check in SLOW] == ["compiles"]


def test_a_graph_break_is_caught() -> None:
    found = check(broken.BreaksTheGraph, compile=True)
    assert [finding.check for finding in found.findings] == ["compiles"]
    assert "breaks the graph" in found.findings[0].words
    assert found.level == "decodable"


@pytest.mark.slow
def test_a_sound_mechanism_reaches_the_last_level_compiled_too() -> None:
    found = check_composed(
        [Composed((Term(broken.Sound, broken.StandardOptions(kv_heads=2)),))], compile=True
    )
    assert found.findings == []
    assert found.level == "accounted"
    assert found.complete


def test_a_bidirectional_mechanism_on_the_torus_reaches_the_last_level() -> None:
    assert broken.SoundOnTorus.supports.bidirectional
    assert check(broken.SoundOnTorus).findings == []


@pytest.mark.parametrize("kind", broken.WRONG_KIND, ids=lambda kind: kind.__name__)
def test_a_map_of_another_kind_than_declared_is_caught(kind: type[Mechanism]) -> None:
    bench = Fixture.of(Composed((Term(kind, broken.StandardOptions()),)))
    with pytest.raises(Failure, match=broken.WRONG_KIND[kind]):
        accounted.attention_map(bench)


def test_a_declared_sub_stochastic_map_reaches_the_last_level() -> None:
    assert check(broken.SoundWithASink).findings == []


def test_unsupported_features_are_not_checked() -> None:
    assert check(broken.Honest).complete


CORE = ("standard", "sharing", "coupled", "kuramoto", "gated_linear", "flex")
"""Checked by `make test`; `make test-slow` checks all."""


@pytest.mark.parametrize(
    "name",
    [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in builtin_mechanisms()],
)
def test_a_built_in_mechanism_reaches_the_last_level(name: str) -> None:
    """Its first setting; the test below, in `make test-slow`, runs every setting."""
    found = check_composed(check_settings(parse_layout(name).pattern[0])[:1])
    assert found.findings == []
    assert found.complete


@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_mechanisms())
def test_every_setting_of_a_built_in_mechanism_reaches_the_last_level(name: str) -> None:
    found = h2h.check(name)
    assert found.findings == []
    assert found.complete


def test_given_options_are_checked_alone() -> None:
    assert len(check_settings(parse_layout("sharing").pattern[0])) > 10
    assert len(check_settings(parse_layout("sharing:tie=kv").pattern[0])) == 1
