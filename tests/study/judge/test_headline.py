from __future__ import annotations

from typing import Any

import pytest

from headtohead.study.judge.headline import headline
from headtohead.study.judge.verdict import Verdict


def row(label: str, verdict: str, **settings: Any) -> Verdict:
    """Return the verdict of an arm; without a difference it has no finished pair of runs."""
    place = {"corpus": "stories", "size": "nano", "shape": "as_is", "length": "tokens"}
    numbers = {"mean": 2.0, "baseline_mean": 2.0, "difference": 0.1, "ci_low": 0.0, "ci_high": 0.2, "p": 0.01}
    fixed = {"metric": "bits_per_byte", "n": 3, "margin": 0.005, "detectable": None}
    names = {"arm": label, "label": label, "baseline": "standard", "baseline_label": "standard"}
    return Verdict(**{**place, **numbers, **fixed, **names, "verdict": verdict, **settings})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "No result yet: no arm has a finished pair of runs."),
        ([row("a", "undecided", difference=None)], "No result yet: no arm has a finished pair of runs."),
        (
            [row("a", "undecided"), row("b", "worse"), row("c", "worse")],
            "Nobody beat standard: 2 worse, 1 undecided.",
        ),
        ([row("a", "better")], "a beat standard."),
        ([row("a", "better"), row("b", "equivalent")], "a beat standard: 1 equivalent."),
        ([row("a", "better"), row("b", "better"), row("c", "better")], "a, b and c beat standard."),
        ([row(name, "better") for name in "abcd"], "4 arms beat standard."),
        (
            [row("a", "worse"), row("b", "undecided", difference=None)],
            "Nobody beat standard: 1 worse, 1 unfinished.",
        ),
        ([row("a", "better", scope="this test set")], "a beat standard on this test set."),
        (
            [row("a", "worse"), row("a", "undecided", size="1m")],
            "Nobody beat standard in any of 2 contests: 1 worse, 1 undecided.",
        ),
        (
            [row("a", "better"), row("a", "undecided", size="1m")],
            "a beat standard in 1 of 2 contests; other comparisons: 1 undecided.",
        ),
        (
            [row("a", "better"), row("a", "better", size="1m")],
            "a beat standard in both contests.",
        ),
        (
            [row(name, "better", size=size) for name, size in ("ax", "bx", "by", "cy")]
            + [row("a", "worse", size="y"), row("c", "worse", size="x")],
            "b beat standard in both contests, a and c in 1 of them each; other comparisons: 2 worse.",
        ),
        (
            [row(name, "better", size=size) for name, size in ("ax", "bx", "by")]
            + [row("a", "worse", size="z")],
            "a and b beat standard in 1 to 2 of 3 contests each; other comparisons: 1 worse.",
        ),
    ],
)
def test_one_sentence_says_who_won(rows: list[Verdict], words: str) -> None:
    assert headline(rows) == words
