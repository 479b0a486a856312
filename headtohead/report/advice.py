"""When to use an arm: the verdict and the counted costs in cautious words, never more than the data bear."""

from __future__ import annotations

from typing import Any

from headtohead.report.gather import ArmFacts
from headtohead.study.judge.trust import failed_check_label
from headtohead.study.judge.verdict import METRIC, Verdict
from headtohead.study.store.manifest import metric_label

_COUNTED = {
    "parameters": "parameters",
    "flops_per_token": "FLOPs",
    "cache_bytes_per_token": "cache",
}
_NOTABLE = 0.01
"""Costs nearer to the baseline's than this share of them count as equal."""


def advice(verdicts: list[Verdict], arms: list[ArmFacts], baseline: str) -> list[dict[str, Any]]:
    """Return a row per verdict: what is cheaper, what is dearer, and what follows in words."""
    records = {arm.label: arm.record for arm in arms}
    rows = []
    for row in verdicts:
        cheaper, dearer = _changes(records.get(row.label, {}), records.get(baseline, {}))
        words = "; ".join([_words(row, cheaper, dearer), *_cautions(row)]) + "."
        rows.append(
            {
                "label": row.label,
                "verdict": row.verdict,
                "cheaper": cheaper,
                "dearer": dearer,
                "words": words[0].upper() + words[1:],
            }
        )
    return rows


def _changes(mine: dict[str, Any], base: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return which counted costs are lower than the baseline's, and which are higher."""
    cheaper: list[str] = []
    dearer: list[str] = []
    if not mine or not base:
        return cheaper, dearer
    for key, name in _COUNTED.items():
        ours, theirs = mine.get(key), base.get(key)
        if ours is None and theirs is not None:
            dearer.append("no cache: decoding recomputes")
        if ours is None or not theirs or abs(ours / theirs - 1) < _NOTABLE:
            continue
        share = ours / theirs - 1
        (cheaper if share < 0 else dearer).append(f"{name} {'−' if share < 0 else '+'}{abs(share):.0%}")
    return cheaper, dearer


def _words(row: Verdict, cheaper: list[str], dearer: list[str]) -> str:
    base, saved = row.baseline_label, ", ".join(cheaper)
    if row.difference is None:
        return "no advice: no pair of runs is finished"
    if row.failed_check or row.baseline_failed_check:
        return f"no advice{failed_check_label(row)}"
    if row.verdict == "better":
        price = f", if its price ({', '.join(dearer)}) can be paid" if dearer else ""
        return f"worth trying in place of {base} in a setting like this one{price}"
    if row.verdict == "equivalent":
        if cheaper:
            price = f" and the price ({', '.join(dearer)}) does not" if dearer else ""
            return f"may stand in for {base} where the saving ({saved}) matters{price}: {_what(row)} is within {row.margin:g}"
        return f"no reason to prefer it here: as good as {base} within {row.margin:g}, and not cheaper"
    if row.verdict == "worse" and row.ci_low is not None and row.ci_high is not None:
        if cheaper:
            low, high = sorted((abs(row.ci_low), abs(row.ci_high)))
            return (
                f"only where the saving ({saved}) is worth {low:.3f} to {high:.3f} {metric_label(row.metric)}"
            )
        return f"nothing here speaks for it: worse than {base}, and not cheaper"
    found = "" if row.detectable is None else f" (they find {row.detectable:.3f} or more four times in five)"
    return f"no advice: {row.n} paired seeds do not decide{found}"


def _what(row: Verdict) -> str:
    return "the loss" if row.metric == METRIC else "what is lost"


def _cautions(row: Verdict) -> list[str]:
    """Return what weakens the words, each in a few words more."""
    found = []
    if row.verdict != "undecided":
        if row.scope == "this test set":
            found.append("on this test set alone")
        if row.verdict != "equivalent" and abs(row.difference or 0.0) < row.margin:
            found.append(f"the difference is real, but within the margin of {row.margin:g}")
        if row.n < 3:
            found.append(f"from {row.n} seeds, which is weak")
        if row.added_seeds:
            found.append("seeds were added after looking")
        if not row.primary:
            found.append("not the planned comparison: confirm it in a study of its own")
    if row.diverged:
        found.append(f"{row.diverged} of its runs diverged")
    return found
