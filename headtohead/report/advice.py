"""Recommendations per arm from its verdict and counted costs, limited to what the data support."""

from __future__ import annotations

from typing import Any

from headtohead.report.gather import ArmFacts
from headtohead.study.judge.trust import failed_check_label
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import metric_label
from headtohead.study.store.run_spec import RunSpec

_COUNTED = {
    "parameters": "parameters",
    "flops_per_token": "FLOPs",
    "cache_bytes_per_token": "cache",
}
_NOTABLE = 0.01
"""Relative differences in cost below this count as equal."""


def advice(verdicts: list[Verdict], arms: list[ArmFacts], baseline: str) -> list[dict[str, Any]]:
    """Return one row per verdict: lower costs, higher costs and a recommendation."""
    specs = {arm.label: arm.spec for arm in arms}
    rows = []
    for row in verdicts:
        cheaper, costlier = _changes(specs.get(row.label), specs.get(baseline))
        text = "; ".join([_recommendation(row, cheaper, costlier), *_cautions(row)]) + "."
        rows.append(
            {
                "label": row.label,
                "verdict": row.verdict,
                "cheaper": cheaper,
                "costlier": costlier,
                "words": text[0].upper() + text[1:],
            }
        )
    return rows


def _changes(mine: RunSpec | None, base: RunSpec | None) -> tuple[list[str], list[str]]:
    """Return the counted costs that are lower than the baseline's, and those that are higher."""
    cheaper: list[str] = []
    costlier: list[str] = []
    if mine is None or base is None:
        return cheaper, costlier
    for key, name in _COUNTED.items():
        ours, theirs = getattr(mine, key), getattr(base, key)
        if ours is None and theirs is not None:
            costlier.append("no cache: decoding recomputes")
        if ours is None or not theirs or abs(ours / theirs - 1) < _NOTABLE:
            continue
        share = ours / theirs - 1
        (cheaper if share < 0 else costlier).append(f"{name} {'−' if share < 0 else '+'}{abs(share):.0%}")
    return cheaper, costlier


def _recommendation(row: Verdict, cheaper: list[str], costlier: list[str]) -> str:
    base, saved = row.baseline_label, ", ".join(cheaper)
    if row.difference is None:
        return "no recommendation: no pair of runs is finished"
    if row.failed_check or row.baseline_failed_check:
        return f"no recommendation{failed_check_label(row)}"
    if row.verdict == "better":
        price = f", if its cost ({', '.join(costlier)}) is acceptable" if costlier else ""
        return f"worth trying instead of {base} in a similar setting{price}"
    if row.verdict == "equivalent":
        if cheaper:
            price = f" and the cost ({', '.join(costlier)}) does not" if costlier else ""
            return f"can replace {base} where the saving ({saved}) matters{price}: the difference is within {row.margin:g}"
        return f"no reason to prefer it here: equivalent to {base} within {row.margin:g} and not cheaper"
    if row.verdict == "worse" and row.ci_low is not None and row.ci_high is not None:
        if cheaper:
            low, high = sorted((abs(row.ci_low), abs(row.ci_high)))
            return (
                f"only where the saving ({saved}) is worth {low:.3f} to {high:.3f} {metric_label(row.metric)}"
            )
        return f"not recommended: worse than {base} and not cheaper"
    found = "" if row.detectable is None else f" (80 % power for a difference of {row.detectable:.3f})"
    return f"no recommendation: undecided with {row.n} paired seeds{found}"


def _cautions(row: Verdict) -> list[str]:
    """Return the caveats of a recommendation."""
    found = []
    if row.verdict != "undecided":
        if row.scope == "this test set":
            found.append("on this test set only")
        if row.verdict != "equivalent" and abs(row.difference or 0.0) < row.margin:
            found.append(f"the difference is significant but within the margin of {row.margin:g}")
        if row.n < 3:
            found.append(f"weak evidence: {row.n} seeds")
        if row.added_seeds:
            found.append("seeds were added after results were seen")
        if not row.primary:
            found.append("not the planned comparison: confirm it in a new study")
    if row.diverged:
        found.append(f"{row.diverged} of its runs diverged")
    return found
