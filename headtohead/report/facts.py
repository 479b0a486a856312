"""What a study compared, in a line of facts for its page and its card, and the costs beside its verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headtohead.common.numbers import short_count
from headtohead.report.gather import ArmFacts, Row
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import Manifest
from headtohead.study.store.run_spec import RunSpec

_LISTED = 4
"""A fact lists up to this many values; with more, it gives the first and counts the others."""


def study_facts(
    manifest: Manifest, specs: Iterable[RunSpec], environments: Sequence[Row]
) -> list[tuple[str, str]]:
    """Return dataset, size, tokens, seeds, rules and date of a study as (name, value); unknown ones are left out."""
    contests = manifest.contests()
    tokens = sorted({spec.training.tokens for spec in specs})
    days = sorted({day for row in environments for day in row["dates"].split(", ") if day})
    facts = {
        "dataset": [contest.corpus_label for contest in contests],
        "size": [contest.size for contest in contests],
        "context": [contest.context for contest in contests],
        "tokens per run": [_span(tokens)],
        "seeds": [f"{len(manifest.seeds)} paired"],
        "rules": [_rules(contest.length, contest.shape) for contest in contests],
        "date": [" to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""],
    }
    return [(name, text) for name, values in facts.items() if (text := listed(values))]


def _rules(length: str, shape: str) -> str:
    """Return what the rules of a contest hold equal; a table of runs trained elsewhere may name none."""
    names = {"time_plain": "plain-path time", "as_is": "", "params": "parameters"}
    held = " and ".join(name for rule in (length, shape) if (name := names.get(rule, rule)))
    return f"equal {held}" if held else ""


def _span(counts: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys(short_count(count) for count in (*counts[:1], *counts[-1:])))


def listed(values: Sequence[str]) -> str:
    """Return the distinct values as text: the first four, and the number of the others."""
    found = [value for value in dict.fromkeys(values) if value]
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return "; ".join(found[:_LISTED]) + more


@dataclass(frozen=True)
class ShownCost:
    """One cost of an arm: the number, and its text beside a verdict."""

    name: str
    value: float | None
    words: str


COSTS = {"cache": "cache", "flops": "FLOPs", "rate": "tokens/s"}
"""The costs beside a verdict, by name, with their headings."""


def shown_costs(arms: Sequence[ArmFacts], baseline: str) -> dict[str, list[ShownCost]]:
    """Return the costs of every arm by its label: the baseline's as numbers, those of the others as multiples of them."""
    numbers = {arm.label: _numbers(arm) for arm in arms}
    base = numbers.get(baseline, {})
    return {
        arm.label: [
            ShownCost(
                name, value, _words(name, value, None if arm.label == baseline else base.get(name), arm)
            )
            for name, value in numbers[arm.label].items()
        ]
        for arm in arms
    }


def _numbers(arm: ArmFacts) -> dict[str, float | None]:
    spec = arm.spec
    return {
        "cache": spec.cache_bytes_per_token if spec else None,
        "flops": spec.flops_per_token if spec else None,
        "rate": arm.mean_cost("tokens_per_second"),
    }


def _words(name: str, value: float | None, base: float | None, arm: ArmFacts) -> str:
    if value is None:
        return "no cache" if name == "cache" and arm.spec else "–"
    if name == "cache" and not value:
        return "fixed size"
    return f"{value / base:.2f}x" if base and value else short_count(value)


def common_remarks(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the remarks that all verdicts of a contest share, if there are several."""
    if len(verdicts) < 2:
        return []
    first, *others = ([note for note in row.notes if note != "exploratory"] for row in verdicts)
    return [note for note in first if all(note in notes for notes in others)]
