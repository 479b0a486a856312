"""Corpus statistics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headtohead.common.progress import progress_bar
from headtohead.data.shards import prepare
from headtohead.evaluation.corpus_stats import WINDOW, Statistics, corpus_statistics


def corpus_stats(
    corpora: str | Sequence[str],
    *,
    window: int = WINDOW,
    data_dir: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Statistics]:
    """Return the statistics of corpora by label, over windows of `window` bytes (see evaluation/corpus_stats.py)."""
    found = {}
    with progress_bar("statistics", quiet) as progress:
        for name in [corpora] if isinstance(corpora, str) else corpora:
            corpus = prepare(name, data_dir=data_dir, progress=progress)
            found[corpus.label] = corpus_statistics(corpus, window, progress)
    return found
