"""The result of a contest, or of all contests of a study, in one sentence: who beat the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from headtohead.study.judge.verdict import Verdict

_NAMED = 3
"""Winners named in the sentence; more are counted."""


def headline(verdicts: Sequence[Verdict]) -> str:
    """Return who beat the baseline and how many arms did not, such as `Nobody beat standard: 2 worse, 3 undecided.`"""
    judged = [row for row in verdicts if row.difference is not None]
    if not judged:
        return "No result yet: no arm has a finished pair of runs."
    winners = [row for row in judged if row.verdict == "better"]
    counts = {
        word: sum(row.verdict == word for row in judged) for word in ("worse", "equivalent", "undecided")
    }
    counts["unfinished"] = len(verdicts) - len(judged)
    others = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    won = f"{_winners(winners)} beat {judged[0].baseline_label}{_where(winners, verdicts)}"
    return f"{won}: {others}." if others else f"{won}."


def _winners(winners: Sequence[Verdict]) -> str:
    labels = list(dict.fromkeys(row.label for row in winners))
    if len(labels) > _NAMED:
        return f"{len(labels)} arms"
    return " and ".join(filter(None, [", ".join(labels[:-1]), *labels[-1:]])) or "Nobody"


def _where(winners: Sequence[Verdict], verdicts: Sequence[Verdict]) -> str:
    """Return in how many of several contests an arm won, and whether that holds on the test set alone."""
    total, won = (len({_contest(row) for row in rows}) for rows in (verdicts, winners))
    among = "" if total == 1 else f" in {won} of {total} contests" if won else f" in any of {total} contests"
    alone = bool(winners) and all(row.scope == "this test set" for row in winners)
    return among + (" on this test set" if alone else "")


def _contest(row: Verdict) -> tuple[str, ...]:
    return (row.corpus, row.size, row.context, row.branch, row.shape, row.length, row.numerics)
