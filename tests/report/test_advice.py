from __future__ import annotations

from typing import Any

import pytest

from headtohead.report.advice import advice
from headtohead.report.gather import ArmFacts
from headtohead.study.judge.verdict import Verdict

BASE = {"parameters": 1000, "flops_per_token": 2000.0, "cache_bytes_per_token": 512}


def arm(label: str, **changes: Any) -> ArmFacts:
    return ArmFacts(label, label, BASE | changes, 3, {}, [], {})


def verdict(words: str, **changes: Any) -> Verdict:
    numbers = {"difference": 0.05, "ci_low": 0.02, "ci_high": 0.08, "detectable": 0.03, "primary": True}
    given: dict[str, Any] = {
        **dict.fromkeys(("arm", "baseline", "corpus", "size", "shape", "length"), "x"),
        "metric": "bits_per_byte",
        "n": 5,
        "mean": 2.0,
        "baseline_mean": 2.0,
        "p": 0.01,
        "p_holm": 0.01,
        "margin": 0.005,
        **numbers,
        "verdict": words,
        "label": "new",
        "baseline_label": "standard",
    }
    return Verdict(**(given | changes))


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        (
            verdict("worse"),
            {"cache_bytes_per_token": 256},
            "Only where the saving (cache −50%) is worth 0.020 to 0.080 bits per byte.",
        ),
        (verdict("worse"), {}, "Nothing here speaks for it: worse than standard, and not cheaper."),
        (
            verdict("better"),
            {"flops_per_token": 2200.0},
            "Worth trying in place of standard in a setting like this one, if its price (FLOPs +10%) can be paid.",
        ),
        (
            verdict("equivalent"),
            {"parameters": 900},
            "May stand in for standard where the saving (parameters −10%) matters: the loss is within 0.005.",
        ),
        (
            verdict("equivalent"),
            {"parameters": 1004},
            "No reason to prefer it here: as good as standard within 0.005, and not cheaper.",
        ),
        (
            verdict("undecided"),
            {"cache_bytes_per_token": 256},
            "No advice: 5 paired seeds do not decide (they find 0.030 or more four times in five).",
        ),
        (verdict("undecided", difference=None), {}, "No advice: no pair of runs is finished."),
    ],
)
def test_the_words_follow_from_verdict_and_costs(row: Verdict, changes: dict[str, Any], words: str) -> None:
    assert advice([row], [arm("standard"), arm("new", **changes)], "standard")[0]["words"] == words


def test_what_weakens_a_verdict_is_said() -> None:
    row = verdict("better", scope="this test set", n=2, added_seeds=[9], primary=False, difference=-0.004)
    words = advice([row], [arm("standard"), arm("new")], "standard")[0]["words"]
    for part in (
        "this test set alone",
        "2 seeds",
        "added after looking",
        "not the planned comparison",
        "within the margin",
    ):
        assert part in words


def test_an_arm_without_a_cache_is_dearer_and_one_without_runs_is_not_judged_by_cost() -> None:
    row = verdict("equivalent")
    found = advice([row], [arm("standard"), arm("new", cache_bytes_per_token=None)], "standard")[0]
    assert found["dearer"] == ["no cache: decoding recomputes"]
    empty = ArmFacts("new", "new", {}, 3, {}, [], {})
    assert advice([row], [arm("standard"), empty], "standard")[0]["cheaper"] == []
