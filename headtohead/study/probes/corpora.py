"""Probe `corpora`: the score of a trained model on other corpora."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from headtohead.common.choices import split_outside
from headtohead.common.files import digest
from headtohead.common.progress import part_of
from headtohead.data.corpora import check_known, stable_name
from headtohead.data.shards import Split, prepare, tokens_of
from headtohead.data.tokenizers import Tokenizer
from headtohead.evaluation.loss import Score, score_split
from headtohead.study.probes.base import Found, Probe, Subject

NAME = "corpora"
_KEPT = 8
_SPLITS: dict[tuple[str, str, str], tuple[Split, str, str]] = {}
"""The last few test splits, by corpus, tokenizer and data directory."""


class EvaluatedCorpus(Struct, frozen=True):
    """The result on one corpus."""

    label: str
    content: str
    """Hash of the text."""
    score: Score


def argument(corpora: tuple[str, ...]) -> str:
    """Return corpora as the probe's argument."""
    return ",".join(dict.fromkeys(map(stable_name, corpora)))


def evaluated(probes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the corpora named in a study's probes."""
    found = [part for name in probes if name.startswith(f"{NAME}:") for part in split_outside(name[8:], ",")]
    return tuple(dict.fromkeys(found))


def _check(given: str) -> str:
    """Return the names in canonical form; empty means all corpora of the study, which are filled in later."""
    names = split_outside(given, ",") if given else []
    for name in names:
        check_known(name)
    return argument(tuple(names))


def _measure(subject: Subject, given: str) -> Found:
    names = split_outside(given, ",")
    others = [name for name in names if name != subject.source]
    found: dict[str, EvaluatedCorpus] = {}
    for index, name in enumerate(others):
        shown = part_of(subject.progress, index, index + 1, len(others))
        split, label, content = _test_split(name, subject.tokenizer, subject.data_dir, shown)
        score = score_split(
            subject.model,
            split,
            subject.tokenizer.token_bytes(),
            precision=subject.precision,
            progress=shown,
        )
        # Nats are per token of the run's own tokenizer; bits per byte can be compared between runs.
        found[name] = EvaluatedCorpus(label, content, score)
    return found


def _test_split(
    name: str, tokenizer: Tokenizer, data_dir: str, progress: Callable[[float], None]
) -> tuple[Split, str, str]:
    """Return a tokenized test split, the corpus label and a hash of the content; cached for the runs of a process."""
    key = (name, tokenizer.digest, data_dir)
    if key not in _SPLITS:
        shown = lambda message, share: progress(0.0)  # noqa: E731
        label = prepare(name, data_dir=data_dir or None, progress=shown).label
        split = tokens_of(name, "test", tokenizer, data_dir=data_dir or None, progress=shown)
        while len(_SPLITS) >= _KEPT:
            del _SPLITS[next(iter(_SPLITS))]
        _SPLITS[key] = split, label, digest(split.tokens.tobytes())[:16]
    return _SPLITS[key]


PROBE = Probe(
    "bits per byte on the test splits of other corpora, with the run's own tokenizer",
    _measure,
    dict[str, EvaluatedCorpus],
    _check,
    "CORPUS,...; default: all corpora of the study",
    needs=lambda given: split_outside(given, ","),
)
