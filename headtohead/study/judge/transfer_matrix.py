"""Transfer matrix: arm x training corpus x evaluation corpus, judged by the rules of a contest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from headtohead.common.errors import DamagedFile
from headtohead.study.judge.verdict import Verdict, study_verdicts
from headtohead.study.probes.corpora import NAME, EvaluatedCorpus
from headtohead.study.store.manifest import Contest, Manifest
from headtohead.study.store.result import RunResult, Score, read_score
from headtohead.study.store.run_store import Store

Probes = Mapping[str, Mapping[str, EvaluatedCorpus]]
"""Results of the probe by run and corpus."""


@dataclass(frozen=True)
class Cell:
    """An arm trained on one corpus and evaluated on another or the same, against the baseline trained on that corpus."""

    contest: Contest
    """Contest of the training corpus."""
    trained: str
    evaluated: str
    """Labels of the corpora."""
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """Return the cell, JSON-ready."""
        return {"trained": self.trained, "evaluated": self.evaluated, **self.verdict.as_dict()}


def places(cells: Iterable[Cell]) -> dict[Contest, str]:
    """Return a title for each contest that distinguishes cells of the same corpora, empty if there is only one of each."""
    bare = {cell.contest: dataclasses.replace(cell.contest, corpus="", corpus_label="") for cell in cells}
    several = len(set(bare.values())) > 1
    return {contest: one.title_among(list(bare.values())) if several else "" for contest, one in bare.items()}


def read_probes(store: Store, manifest: Manifest, results: Mapping[str, RunResult]) -> Probes:
    """Return the scores of a study's runs on other corpora; runs with a damaged file are left out."""
    names = [name for name in manifest.probes if name.startswith(f"{NAME}:")]
    found: dict[str, dict[str, EvaluatedCorpus]] = {}
    for run_id in results if names else ():
        for name in names:
            with suppress(DamagedFile):
                if isinstance(probe := store.run(run_id).probe(name), dict):
                    found.setdefault(run_id, {}).update(probe)
    return found


def corpus_matrix(manifest: Manifest, results: Mapping[str, RunResult], probes: Probes) -> list[Cell]:
    """Return every cell that has a score, by contest, evaluation corpus and arm; Holm's correction is over arms.

    A study that is evaluated on no other corpus has no cells.
    """
    scores = {run: _scores(found) for run, found in probes.items()}
    labels = dict.fromkeys(contest.corpus_label for contest in manifest.contests())
    labels |= dict.fromkeys(label for found in scores.values() for label in found)
    if len(labels) < 2 or not any(scores.values()):
        return []
    cells = []
    for contest in manifest.contests():
        entries = tuple(entry for entry in manifest.entries if entry.contest == contest)
        for label in labels:
            own = label == contest.corpus_label
            moved = results if own else _moved(results, scores, label, {entry.run for entry in entries})
            if not any(entry.run in moved for entry in entries):
                continue
            # Whether a model is untrained is judged by the token frequencies of the text it is evaluated on.
            lines = {contest.corpus_label: manifest.references[label]} if label in manifest.references else {}
            part = dataclasses.replace(manifest, entries=entries, references=lines, primary=None)
            if not own:
                # The trials of the tuning were scored on the training corpus: on another one their leads say nothing.
                unscored = tuple(dataclasses.replace(rate, score=None) for rate in manifest.tuning)
                part = dataclasses.replace(part, tuning=unscored)
            cells += [Cell(contest, contest.corpus_label, label, row) for row in study_verdicts(part, moved)]
    return cells


def short_labels(cells: Iterable[Cell]) -> dict[str, str]:
    """Return a short name for each corpus label, without the part in parentheses if the names stay distinct."""
    labels = dict.fromkeys(label for cell in cells for label in (cell.trained, cell.evaluated))
    short = {label: label.partition("(")[0] or label for label in labels}
    return short if len(set(short.values())) == len(labels) else {label: label for label in labels}


@dataclass(frozen=True)
class _Evaluated:
    """The score of a run on the test split of another corpus."""

    content: str
    """Hash of the text."""
    score: Score


def _scores(found: Mapping[str, EvaluatedCorpus]) -> dict[str, _Evaluated]:
    """Return the valid scores of a run by corpus label."""
    scores = {}
    for name, row in found.items():
        with suppress(ValueError):
            scores[row.label] = _Evaluated(row.content, read_score(vars(row.score), name))
    return scores


def _moved(
    results: Mapping[str, RunResult],
    scores: Mapping[str, Mapping[str, _Evaluated]],
    corpus: str,
    runs: set[str],
) -> dict[str, RunResult]:
    """Return the results of runs with the scores on another corpus' test split in place of their own.

    Runs scored on a different text of the same name than most (an edited file, another Python) are left out.
    """
    known = {run: scores[run][corpus] for run in sorted(runs) if corpus in scores.get(run, {})}
    contents = [row.content for row in known.values()]
    usual = max(sorted(set(contents)), key=contents.count, default="")
    moved = {}
    for run in runs:
        result = results.get(run)
        if result is None:
            continue
        if result.status != "done":
            moved[run] = result
        elif run in known and known[run].content == usual:
            moved[run] = replace(result, test=known[run].score)
    return moved
