"""Statistics of a corpus."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headtohead import corpus_stats
from headtohead.common.errors import UserError
from headtohead.data.shards import prepare
from headtohead.evaluation.corpus_stats import COLUMNS, corpus_statistics, statistics_row


def test_simple_texts_have_known_statistics(tmp_path: Path) -> None:
    path = tmp_path / "ab.txt"
    path.write_text("ab" * 40_000 + "c")  # the end makes valid and test differ
    (found,) = corpus_stats(f"file:{path}", quiet=True).values()
    assert found["unigram"] == pytest.approx(1.0, abs=1e-3)
    assert found["bigram"] == pytest.approx(0.0, abs=2e-3)
    assert found["xz"] is not None
    assert found["xz"] < 0.2
    assert found["bytes"] == 72_001
    assert found["documents"] == 1
    assert found["types"] is None, "there are fewer than a thousand words"
    assert found["domain_bits"] is None


def test_repetition_and_overlap_count_words_of_a_window(tmp_path: Path) -> None:
    same, fresh = tmp_path / "same.txt", tmp_path / "fresh.txt"
    same.write_text("a b " * 20_000 + "end")
    fresh.write_text(" ".join(f"{number:07d}" for number in range(10_000)))
    found = corpus_stats([f"file:{same}", f"file:{fresh}"], window=32, quiet=True)
    # A window has sixteen words of two kinds, each kind in both halves.
    assert found["same.txt"]["repetition"] == pytest.approx(14 / 16, abs=1e-3)
    assert found["same.txt"]["near"] == found["same.txt"]["far"] == 1.0
    # No word occurs twice, but parts of words cut at a window's edge may.
    for name in ("repetition", "near", "far"):
        value = found["fresh.txt"][name]
        assert value is not None
        assert value < 0.2


@pytest.mark.slow
def test_the_dial_changes_only_statistics_that_depend_on_order() -> None:
    low, middle, high = (
        corpus_statistics(prepare(f"coherence:{dial}/64(stdlib)"), 256) for dial in (0, 0.5, 1)
    )
    for name in ("bytes", "documents", "domains"):
        assert low[name] == middle[name] == high[name]
    assert low["unigram"] == pytest.approx(high["unigram"], abs=0.02)
    for name, sign in (("repetition", 1), ("near", 1), ("domain_bits", 1), ("xz", -1), ("types", -1)):
        values = [sign * (row[name] or math.nan) for row in (low, middle, high)]
        assert values == sorted(values), name
        assert values[0] < values[2] - 0.05, name
    assert high["domain_bits"] == pytest.approx(high["domains"], abs=0.01)
    assert high["domains"] == pytest.approx(math.log2(3), abs=0.01)


def test_statistics_under_a_bpe_are_those_of_the_text(story: Path) -> None:
    plain = corpus_statistics(prepare(f"file:{story}"), 256)
    coded = corpus_statistics(prepare(f"file:{story}", "bpe:300"), 256)
    assert coded["bytes"] == plain["bytes"]
    for name in ("unigram", "bigram", "repetition", "near"):
        assert coded[name] == pytest.approx(plain[name], rel=0.05)


def test_statistics_are_cached_and_recomputed_when_damaged(story: Path) -> None:
    corpus = prepare(f"file:{story}")
    first = corpus_statistics(corpus, 512)
    path = corpus.folder / "statistics-512.json"
    before = path.stat().st_mtime_ns
    assert corpus_statistics(corpus, 512) == first
    assert path.stat().st_mtime_ns == before
    path.write_text("{")
    assert corpus_statistics(corpus, 512) == first
    assert len(statistics_row(first)) == len(COLUMNS)


def test_a_window_that_is_too_small_is_rejected(story: Path) -> None:
    with pytest.raises(UserError, match="window=8"):
        corpus_statistics(prepare(f"file:{story}"), 8)
