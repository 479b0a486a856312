"""How training here differs from the published setting of a claim; any difference makes the scale a reduced one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headtohead.common.numbers import parse_count
from headtohead.study.claims.criteria import At
from headtohead.study.config.spec import Arm
from headtohead.study.store.manifest import Contest
from headtohead.training.settings import TrainSettings

if TYPE_CHECKING:
    from headtohead.study.claims.evidence import Evidence

UNKNOWN = "unknown"
_ROUNDING = 1.05
"""Passes over the text count as more than the published ones above this ratio: steps are whole batches."""


def other_scale(evidence: Evidence, at: At, contests: Sequence[Contest], arm: str) -> str:
    """Return how an arm's training in some contests differs from the published one, or an empty string."""
    if at == At():
        return "the published scale is unknown"
    spec, label = evidence.spec, evidence.label(arm)
    named = [one for one in spec.arms if one.label == label]
    settings = [_settings(evidence, one, contest) for one in named for contest in contests]
    sizes = [spec.size(contest.size, one) for one in named for contest in contests]
    tokenizers = [_tokenizer_name(spec.tokenizer_for(size)) for size in sizes]
    notes = [
        _names("corpus", [contest.corpus for contest in contests], at.corpus),
        _names("size", [contest.size for contest in contests], at.size),
        _length(contests, settings, at.tokens),
        _repetition(evidence, contests, label or "", at.epochs),
        _choice("tokenizer", tokenizers, at.tokenizer),
        _choice("optimizer", [_optimizer_name(one, at.optimizer) for one in settings], at.optimizer),
    ]
    return "; ".join(filter(None, notes))


def _settings(evidence: Evidence, arm: Arm, contest: Contest) -> TrainSettings:
    return evidence.spec.train_settings(arm, evidence.spec.size(contest.size, arm))


def _names(what: str, here: Sequence[str], published: Sequence[str]) -> str:
    if not published or set(here) <= set(published):
        return ""
    return f"{what} {', '.join(dict.fromkeys(here))} here, {', '.join(published)} published"


def _length(contests: Sequence[Contest], settings: Sequence[TrainSettings], published: int) -> str:
    if not published:
        return "the published length is unknown"
    branches = [parse_count(contest.branch) for contest in contests if contest.branch]
    tokens = max(branches or [one.tokens for one in settings], default=0)
    return "" if tokens >= published else f"{tokens:,} tokens here, {published:,} published"


def _repetition(evidence: Evidence, contests: Sequence[Contest], label: str, published: float) -> str:
    """Return a note if the text is seen more often than published; tasks are repeated as a rule."""
    if evidence.spec.tasks and not published:
        return ""
    runs = [run for contest in contests for run in evidence.manifest.runs(contest, label).values()]
    found = [evidence.results[run].epochs for run in runs if run in evidence.results]
    seen = max((epochs for epochs in found if epochs is not None), default=0)
    if seen <= (published or 1) * _ROUNDING:
        return ""
    then = f"{published:g} times published" if published else "how often in the published runs is unknown"
    return f"the text is seen {seen:.3g} times here, {then}"


def _choice(what: str, here: Sequence[str], published: str) -> str:
    if published == UNKNOWN:
        return f"the published {what} is unknown"
    return _names(what, here, [published] if published else [])


def _tokenizer_name(tokenizer: str) -> str:
    """Return the name of a tokenizer: that of a file is its stem, so gpt2.json counts as gpt2."""
    return Path(tokenizer[5:]).stem if tokenizer.startswith("file:") else tokenizer


def _optimizer_name(settings: TrainSettings, published: str) -> str:
    """Return the optimizer, with its betas if the published one has them."""
    betas = f":{settings.beta1:g}/{settings.beta2:g}" if ":" in published else ""
    return f"adamw{betas}"
