"""The result of a contest, or of all contests of a study, in one sentence: who beat the baseline."""

from __future__ import annotations

from collections import Counter
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
    contests = len({_contest(row) for row in verdicts})
    alone = " on this test set" if winners and all(row.scope == "this test set" for row in winners) else ""
    won = _won(winners, judged[0].baseline_label, contests) + alone
    if not others:
        return f"{won}."
    return f"{won}; other comparisons: {others}." if winners and contests > 1 else f"{won}: {others}."


def _won(winners: Sequence[Verdict], baseline: str, contests: int) -> str:
    """Return which arms beat the baseline, and in how many of several contests each of them did."""
    wins = Counter(row.label for row in winners)
    if not wins:
        return f"Nobody beat {baseline}" + (f" in any of {contests} contests" if contests > 1 else "")
    if contests == 1:
        return f"{_names(list(wins))} beat {baseline}"
    every = [label for label, number in wins.items() if number == contests]
    some = {label: number for label, number in wins.items() if number < contests}
    parts = []
    if every:
        parts.append(
            f"{_names(every)} beat {baseline} in {'both' if contests == 2 else f'all {contests}'} contests"
        )
    if some:
        often = " to ".join(dict.fromkeys([str(min(some.values())), str(max(some.values()))]))
        where = f"in {often} of " + ("them" if every else f"{contests} contests")
        parts.append(f"{_names(list(some))}{'' if every else f' beat {baseline}'} {where}")
        parts[-1] += " each" if len(some) > 1 else ""
    return ", ".join(parts)


def _names(labels: Sequence[str]) -> str:
    if len(labels) > _NAMED:
        return f"{len(labels)} arms"
    return " and ".join(filter(None, [", ".join(labels[:-1]), *labels[-1:]]))


def _contest(row: Verdict) -> tuple[str, ...]:
    return (row.corpus, row.size, row.context, row.branch, row.shape, row.length, row.numerics)
