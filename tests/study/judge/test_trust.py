"""Verdicts after a failed check, and notes that do not come from statistics."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from headtohead.model.check.gate import GateResult
from headtohead.study.judge.verdict import Verdict, headlines, sentence, study_verdicts
from headtohead.study.store.manifest import Check, Contest, Entry, Manifest, manifest_from
from headtohead.study.store.result import RunResult
from tests.results import run_result

BASE = [2.50, 2.52, 2.48, 2.51, 2.49]
ARMS = {
    "base": BASE,
    "up": [x - 0.02 - 0.001 * i for i, x in enumerate(BASE)],
    "down": [x + 0.1 + 0.003 * i for i, x in enumerate(BASE)],
    "same": [x + 0.0005 * (-1) ** i for i, x in enumerate(BASE)],
}
LEAK = "it sees the future"


def contest(length: str = "tokens") -> Contest:
    return Contest("c", "c@1", "nano", "as_is", length)


def manifest(failed: tuple[str, ...] = (), length: str = "tokens", **values: Any) -> Manifest:
    place, labels = contest(length), list(ARMS)
    entries = tuple(Entry(f"{label}/{seed}", label, seed, place) for label in labels for seed in range(1, 6))
    whole = Manifest(
        "s", tuple((x, x) for x in labels), "base", "up", 0.005, tuple(range(1, 6)), entries, **values
    )
    return dataclasses.replace(whole, checks=tuple(Check(label, place, (LEAK,)) for label in failed))


def results(checked: dict[str, GateResult] | None = None) -> dict[str, RunResult]:
    return {
        f"{label}/{seed}": run_result(test={"bits_per_byte": value}, check=(checked or {}).get(label))
        for label, row in ARMS.items()
        for seed, value in enumerate(row, 1)
    }


def verdicts(known: Manifest, checked: dict[str, GateResult] | None = None) -> dict[str, Verdict]:
    return {row.label: row for row in study_verdicts(known, results(checked))}


def found(rows: dict[str, Verdict]) -> list[str]:
    return [rows[label].verdict for label in ("up", "down", "same")]


def test_without_failed_checks_verdicts_are_unchanged() -> None:
    assert found(verdicts(manifest())) == ["better", "worse", "equivalent"]


def test_an_arm_that_failed_its_check_can_only_be_worse() -> None:
    rows = verdicts(manifest(("up", "down", "same")))
    assert found(rows) == ["undecided", "worse", "undecided"]
    assert f"up failed its check: {LEAK}" in rows["up"].notes
    assert "after a failed check it cannot be called better" in rows["up"].notes
    assert all(row.failed_check == [LEAK] for row in rows.values())


def test_against_a_baseline_that_failed_an_arm_can_only_be_better() -> None:
    rows = verdicts(manifest(("base",)))
    assert found(rows) == ["better", "undecided", "undecided"]
    assert rows["down"].baseline_failed_check == [LEAK]
    assert "and base failed the causality check" in sentence(rows["up"])


def test_a_check_that_failed_after_training_has_the_same_consequence() -> None:
    failed = GateResult(failed=(LEAK,))
    rows = verdicts(manifest(), {"up": failed})
    assert found(rows) == ["undecided", "worse", "equivalent"]
    assert rows["up"].failed_check == [f"after training, in 5 of 5 runs: {LEAK}"]


def test_every_sentence_states_that_a_check_failed() -> None:
    rows = list(verdicts(manifest(("up", "down"))).values())
    lines = [sentence(row) for row in rows] + [line for _, line in headlines(rows)]
    assert ["failed the causality check" in line for line in lines] == [True, True, False] * 2


def test_marks_of_either_arm_are_noted() -> None:
    place = contest()
    known = dataclasses.replace(manifest(), checks=(Check("base", place, marks=("rolls dice",)),))
    row = verdicts(known, {"up": GateResult(marks=("is random",))})["up"]
    assert row.verdict == "better"
    assert {"base: rolls dice", "up: is random"} <= set(row.notes)


@pytest.mark.parametrize(("line", "count"), [(4.9, 0), (4.975, 4), (6.0, 5)])
def test_a_score_below_half_of_the_compressor_is_flagged(line: float, count: int) -> None:
    row = verdicts(manifest(references={"c@1": {"xz": line}}))["up"]
    flagged = [note for note in row.notes if "up's runs score below half of xz" in note]
    assert [note.split()[0] for note in flagged] == ([str(count)] if count else [])


def test_verdicts_state_where_flops_come_from() -> None:
    sources = {"base": "declared", "up": "counted", "down": "declared", "same": "declared"}
    rows = verdicts(manifest(length="flops", flops=sources))
    assert (rows["up"].flops_source, rows["up"].baseline_flops_source) == ("counted", "declared")
    note = next(note for note in rows["up"].notes if "FLOPs" in note)
    assert "counted for up, declared for base" in note
    assert "upper bound" in note
    assert not any("FLOPs" in note for note in rows["down"].notes)
    assert not any("FLOPs" in note for note in verdicts(manifest(flops=sources))["up"].notes)


def test_checks_are_read_back_as_they_were_written() -> None:
    known = manifest(("up",), flops={"up": "counted"})
    assert manifest_from(json.loads(json.dumps(known.as_dict()))) == known
