from __future__ import annotations

from typing import Any

import pytest

from headtohead.report.advice import advice
from headtohead.report.gather import ArmFacts
from headtohead.study.judge.verdict import Verdict
from tests.results import run_spec

BASE: dict[str, Any] = {"parameters": 1000, "flops_per_token": 2000.0, "cache_bytes_per_token": 512}


def arm(label: str, **changes: Any) -> ArmFacts:
    return ArmFacts(label, label, run_spec(**BASE | changes), 3, {}, [], {})


def verdict(kind: str, **changes: Any) -> Verdict:
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
        "verdict": kind,
        "label": "new",
        "baseline_label": "standard",
    }
    return Verdict(**(given | changes))


@pytest.mark.parametrize(
    ("row", "changes", "text"),
    [
        (
            verdict("worse"),
            {"cache_bytes_per_token": 256},
            "Only where the saving (cache −50%) is worth 0.020 to 0.080 bits per byte.",
        ),
        (verdict("worse"), {}, "Not recommended: worse than standard and not cheaper."),
        (
            verdict("better"),
            {"flops_per_token": 2200.0},
            "Worth trying instead of standard in a similar setting, if its cost (FLOPs +10%) is acceptable.",
        ),
        (
            verdict("equivalent"),
            {"parameters": 900},
            "Can replace standard where the saving (parameters −10%) matters: the difference is within 0.005.",
        ),
        (
            verdict("equivalent"),
            {"parameters": 1004},
            "No reason to prefer it here: equivalent to standard within 0.005 and not cheaper.",
        ),
        (
            verdict("undecided"),
            {"cache_bytes_per_token": 256},
            "No recommendation: undecided with 5 paired seeds (80 % power for a difference of 0.030).",
        ),
        (verdict("undecided", difference=None), {}, "No recommendation: no pair of runs is finished."),
    ],
)
def test_the_recommendation_follows_from_verdict_and_costs(
    row: Verdict, changes: dict[str, Any], text: str
) -> None:
    assert advice([row], [arm("standard"), arm("new", **changes)], "standard")[0]["words"] == text


def test_caveats_are_listed() -> None:
    row = verdict("better", scope="this test set", n=2, added_seeds=[9], primary=False, difference=-0.004)
    text = advice([row], [arm("standard"), arm("new")], "standard")[0]["words"]
    for part in (
        "this test set only",
        "2 seeds",
        "added after results were seen",
        "not the planned comparison",
        "within the margin",
    ):
        assert part in text


def test_an_arm_without_a_cache_costs_more_and_one_without_runs_is_not_judged_by_cost() -> None:
    row = verdict("equivalent")
    found = advice([row], [arm("standard"), arm("new", cache_bytes_per_token=None)], "standard")[0]
    assert found["costlier"] == ["no cache: decoding recomputes"]
    empty = ArmFacts("new", "new", None, 3, {}, [], {})
    assert advice([row], [arm("standard"), empty], "standard")[0]["cheaper"] == []
