"""Panels of several corpora: the cross-corpus matrix and the corpus statistics."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair")

from headtohead.evaluation.loss import Score
from headtohead.report.gather import ArmFacts
from headtohead.report.panels import View
from headtohead.report.panels.datasets import corpora, matrix
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.transfer_matrix import Cell, corpus_matrix
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.probes.corpora import EvaluatedCorpus
from headtohead.study.store.manifest import Contest, Entry, Manifest
from tests.results import run_result

DIALS = ["coherence:0/64(stdlib)", "coherence:1/64(stdlib)"]
PROBE = "corpora:" + ",".join(DIALS)
ARMS = (("standard", "standard"), ("<b>mine</b>", "<b>mine</b>"))


def score(value: float) -> dict[str, Any]:
    blocks = [[value * 10 * 0.6931471805599453, 10.0] for _ in range(9)]
    return {
        "nats": value,
        "perplexity": 2.0,
        "bits_per_byte": value,
        "tokens": 9,
        "bytes": 90,
        "blocks": blocks,
    }


def views(corpora_given: list[str], gain: float, statistics: bool = True) -> list[View]:
    """Two arms, three seeds; the second is better by `gain`, and by twice as much on the other corpus."""
    contests = [Contest(name, name, "nano", "as_is", "tokens") for name in corpora_given]
    entries, results, probes = [], {}, {}
    for index, contest in enumerate(contests):
        for arm, (_, label) in enumerate(ARMS):
            for seed in (1, 2, 3):
                run = f"{index}{arm}{seed:014d}"
                entries.append(Entry(run, label, seed, contest))
                mine = 3.0 + 0.1 * seed - arm * (gain + 0.001 * seed)
                results[run] = run_result(test=score(mine))
                other = DIALS[1 - index]
                there = Score(**score(mine - arm * gain))
                probes[run] = {other: EvaluatedCorpus(other, "x", there)}
    numbers = dict.fromkeys(contests[i].corpus for i in range(len(contests))) if statistics else {}
    manifest = Manifest(
        "study",
        ARMS,
        "standard",
        "<b>mine</b>",
        0.005,
        (1, 2, 3),
        tuple(entries),
        probes=(PROBE,),
        statistics={name: {"bytes": 10.0, "near": 0.5, "domains": None} for name in numbers},
    )
    verdicts = study_verdicts(manifest, results)
    found = []
    for contest in contests:
        facts = []
        for text, label in ARMS:
            runs = manifest.runs(contest, label)
            arm = ArmFacts(label, text, None, 3, {seed: results[run] for seed, run in runs.items()}, [], {})
            arm.probes = {PROBE: {seed: probes[run] for seed, run in runs.items()}}
            facts.append(arm)
        rows = [row for row in verdicts if row.of(contest)]
        found.append(
            View(Path(), manifest, contest, facts, rows, Probed(manifest, verdicts, results, probes))
        )
    return found


class Probed(Analysis):
    """An analysis with the results of probes in place of a store."""

    @cached_property
    def matrix(self) -> list[Cell]:
        return corpus_matrix(self.manifest, self.results, self.store)  # type: ignore[arg-type]


def cells_of(found: list[View]) -> list[Cell]:
    analysis = found[0].analysis
    assert analysis is not None
    return analysis.matrix


def test_each_cell_is_the_difference_from_the_baseline_of_the_same_corpus() -> None:
    rows = matrix.matrix_rows(cells_of(views(DIALS, 0.1)))
    assert [row["arm"] for row in rows] == [
        "<b>mine</b> ← coherence:0/64",
        "<b>mine</b> ← coherence:0/64",
        "<b>mine</b> ← coherence:1/64",
        "<b>mine</b> ← coherence:1/64",
    ]
    table = {(row["arm"][-4:], row["evaluated"][-4:]): row["difference"] for row in rows}
    assert table["0/64", "0/64"] == pytest.approx(-0.102)
    assert table["0/64", "1/64"] == pytest.approx(-0.202)
    assert {row["verdict"] for row in rows} == {"better"}


def test_the_matrix_is_a_valid_chart_with_a_table() -> None:
    figure = matrix.figure(views(DIALS, 0.1))
    assert figure is not None
    assert figure.chart is not None
    assert figure.table is not None
    assert figure.chart.to_dict()["layer"]
    assert len(figure.table.rows) == 4
    assert figure.table.rows[0][:4] == ("<b>mine</b>", "coherence:0/64", "coherence:0/64", "better")


def test_runs_trained_on_one_corpus_and_tested_on_another_have_one_row() -> None:
    rows = matrix.matrix_rows(cells_of(views(DIALS[:1], 0.1)))
    assert [row["evaluated"] for row in rows] == ["coherence:0/64", "coherence:1/64"]


def test_without_other_corpora_there_is_no_panel() -> None:
    plain = views(DIALS[:1], 0.1, statistics=False)
    assert plain[0].analysis is not None
    plain[0].analysis.store.clear()  # type: ignore[union-attr]
    assert matrix.figure(plain) is None
    assert corpora.figure(plain) is None


def test_a_non_numeric_score_is_left_out() -> None:
    broken = views(DIALS, 0.1)
    for found in broken[0].arms[1].probes[PROBE].values():
        found[DIALS[1]].score.__dict__["bits_per_byte"] = math.nan
    rows = matrix.matrix_rows(cells_of(broken))
    assert [(row["arm"][-4:], row["evaluated"][-4:]) for row in rows] == [
        ("0/64", "0/64"),
        ("1/64", "0/64"),
        ("1/64", "1/64"),
    ]


def test_corpora_are_in_a_table_and_the_dial_in_a_chart() -> None:
    figure = corpora.figure(views(DIALS, 0.1))
    assert figure is not None
    assert figure.table is not None
    assert figure.chart is not None
    assert figure.chart.to_dict()["layer"]
    assert [row[0] for row in figure.table.rows] == DIALS
    assert len(figure.table.rows[0]) == len(figure.table.head)
    assert [(row["dial"], row["verdict"]) for row in corpora.dial_rows(views(DIALS, 0.1))] == [
        (0.0, "better"),
        (1.0, "better"),
    ]


def test_one_setting_of_the_dial_draws_no_line() -> None:
    assert corpora.dial_rows(views(DIALS[:1], 0.1)) == []


def test_cells_of_several_branches_and_contexts_are_distinct() -> None:
    cells = [
        dataclasses.replace(cell, contest=dataclasses.replace(cell.contest, branch=branch, context=context))
        for cell in cells_of(views(DIALS, 0.1))
        for branch in ("1M", "4M")
        for context in ("64", "128")
    ]
    rows = matrix.matrix_rows(cells)
    assert len({(row["arm"], row["evaluated"]) for row in rows}) == len(rows) == len(cells)
    assert rows[0]["arm"].endswith(", context 64, 1M tokens")


def test_the_dial_is_drawn_for_one_branch_and_names_it() -> None:
    several = [
        dataclasses.replace(view, contest=dataclasses.replace(view.contest, branch=branch))
        for branch in ("4M", "1M")
        for view in views(DIALS, 0.1)
    ]
    rows = corpora.dial_rows(several)
    assert len({(row["arm"], row["dial"]) for row in rows}) == len(rows)
    found = corpora.figure(several)
    assert found is not None
    assert "for training and testing (nano, 4M tokens, shape as_is, length tokens)." in found.words
