"""Qualify verdicts by more than statistics: failed checks, implausibly good scores, counted FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headtohead.model.check.gate import GateResult
from headtohead.study.store.manifest import METRIC, Contest, Manifest, flops_label
from headtohead.study.store.result import RunResult

if TYPE_CHECKING:
    from headtohead.study.judge.verdict import Verdict

COMPRESSOR = "xz"
_TOO_GOOD = 0.5
"""A score below this share of the compressor's is flagged: small models do not reach it without a leak."""


def failed_checks(
    manifest: Manifest, contest: Contest, label: str, results: Mapping[str, RunResult]
) -> list[str]:
    """Return the gate's findings for an arm before training and for its trained runs."""
    found = list(manifest.check(contest, label).failed)
    runs = manifest.runs(contest, label).values()
    after = [failed for run in runs if (failed := _after(results.get(run)).failed)]
    if after:
        found.append(f"after training, in {len(after)} of {len(runs)} runs: {after[0][0]}")
    return found


def _after(result: RunResult | None) -> GateResult:
    return GateResult() if result is None or result.check is None else result.check


def weaken(row: Verdict, manifest: Manifest, contest: Contest, results: Mapping[str, RunResult]) -> None:
    """Withhold verdicts that a failed check of the arm or the baseline does not allow, and note the reason.

    A leak lowers the loss. So an arm that failed its check can only be called worse, and an arm compared with a baseline
    that failed its check can only be called better.
    """
    row.failed_check = failed_checks(manifest, contest, row.label, results)
    row.baseline_failed_check = failed_checks(manifest, contest, manifest.baseline, results)
    for label, failed, withheld in (
        (row.label, row.failed_check, ("better", "equivalent")),
        (row.baseline_label, row.baseline_failed_check, ("worse", "equivalent")),
    ):
        if not failed:
            continue
        row.notes.append(f"{label} failed its check: {'; '.join(failed)}")
        if row.verdict in withheld:
            row.notes.append(f"after a failed check it cannot be called {row.verdict}")
            row.verdict = "undecided"
    for label in (row.label, row.baseline_label):
        after = [_after(results.get(run)).marks for run in manifest.runs(contest, label).values()]
        marks = dict.fromkeys(
            [*manifest.check(contest, label).marks, *(mark for part in after for mark in part)]
        )
        row.notes += [f"{label}: {mark}" for mark in marks]
    _too_good(row, manifest, contest)
    row.flops_source = manifest.flops.get(row.label, "")
    row.baseline_flops_source = manifest.flops.get(row.baseline_label, "")
    sources = {row.label: row.flops_source, row.baseline_label: row.baseline_flops_source}
    if row.length == "flops" and "counted" in sources.values():
        row.notes.append(flops_label(sources))


def _too_good(row: Verdict, manifest: Manifest, contest: Contest) -> None:
    line = manifest.references.get(contest.corpus_label, {}).get(COMPRESSOR)
    if row.metric != METRIC or not line:
        return
    for label, values in ((row.label, row.values), (row.baseline_label, row.baseline_values)):
        if count := sum(value < _TOO_GOOD * line for value in values):
            row.notes.append(
                f"{count} of {label}'s runs score below half of {COMPRESSOR} ({line:.3f} bits per byte): look for a leak "
                "or for test text in the training data"
            )


def failed_check_label(row: Verdict) -> str:
    """Return a clause for a verdict's sentence if the arm or the baseline failed its check, else an empty string."""
    both = ((row.label, row.failed_check), (row.baseline_label, row.baseline_failed_check))
    labels = [label for label, failed in both if failed]
    return f", and {' and '.join(labels)} failed the causality check" if labels else ""
