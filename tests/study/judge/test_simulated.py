"""Over thousands of simulated studies the judge has the error rates stated in docs/verdicts.md."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulated_studies import ARMS, SEEDS, Values, draw, judge, rates
from headtohead.study.judge.verdict import Verdict, study_verdicts
from headtohead.study.store.manifest import Contest, Entry, Manifest
from tests.results import run_result

DOCS = Path(__file__).parents[3] / "docs" / "verdicts.md"
STUDIES = 4000
CONTEST = Contest("c", "c", "nano", "as_is", "tokens")


def stated() -> dict[int, dict[str, float]]:
    """Return the table of docs/verdicts.md: by number of seeds, then by name."""
    text = DOCS.read_text(encoding="utf-8")
    table = text[text.index("| share of studies |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    counts = [int(re.fullmatch(r"n = (\d+)", cell)[1]) for cell in rows[0][1:]]  # type: ignore[index]
    return {n: {row[0]: float(row[column]) for row in rows[2:]} for column, n in enumerate(counts, 1)}


def judged(values: Values, margin: float) -> list[Verdict]:
    """Return the verdicts of one simulated study (1 + arms, n) from the code that judges real ones."""
    labels = [f"arm{index}" for index in range(len(values))]
    seeds = tuple(range(values.shape[1]))
    entries = tuple(Entry(f"{label}/{seed}", label, seed, CONTEST) for label in labels for seed in seeds)
    arms = tuple((label, label) for label in labels)
    manifest = Manifest("s", arms, labels[0], None, margin, seeds, entries)
    results = {
        f"{label}/{seed}": run_result(test={"bits_per_byte": float(value)})
        for label, row in zip(labels, values, strict=True)
        for seed, value in enumerate(row)
    }
    return study_verdicts(manifest, results)


def assert_near(found: dict[str, float], meant: dict[str, float], studies: int) -> None:
    assert found.keys() == meant.keys()
    for name, share in found.items():
        # Four standard errors, for eight numbers in three columns, plus rounding to three decimals.
        error = 4 * math.sqrt(meant[name] * (1 - meant[name]) / studies) + 0.0005
        assert share == pytest.approx(meant[name], abs=error), name


@pytest.mark.parametrize("n", SEEDS)
def test_simulated_studies_reproduce_the_table_in_the_docs(n: int) -> None:
    assert_near(rates(n, STUDIES, seed=1), stated()[n], STUDIES)


def test_the_stated_error_rates_are_within_their_limits() -> None:
    assert tuple(stated()) == SEEDS
    for row in stated().values():
        assert row["coverage"] == pytest.approx(0.95, abs=0.002)
        assert row["coverage, heavy tails"] >= 0.945
        assert row["false winner"] <= 0.05
        for law in ("heavy tails", "bimodal", "one run in ten diverges"):
            assert row[f"false winner, {law}"] <= 0.05
        assert row["coverage, bimodal"] >= 0.945
        assert row["false equivalence"] <= 0.05
        assert row["power"] == pytest.approx(0.8, abs=0.003)
        assert row["false winner, seeds added"] > 0.07, "this is why seeds added later are marked"


def test_the_simulation_draws_the_stated_distribution() -> None:
    values = draw(np.random.default_rng(0), 20_000, 4, (0.5, 0.0))
    differences = values[:, 1] - values[:, 0]
    assert differences.std() == pytest.approx(1.0, abs=0.01)
    assert differences.mean() == pytest.approx(0.5, abs=0.015)
    assert np.corrcoef(values[:, 0].ravel(), values[:, 2].ravel())[0, 1] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("n", SEEDS)
@pytest.mark.parametrize("law", ["normal", "heavy", "bimodal"])
def test_the_simulated_judge_is_the_judge(n: int, law: str) -> None:
    values = draw(np.random.default_rng(n), 60, n, (0.0, -1.2, 0.4), law)
    many = judge(values, margin=1.5)
    seen = set()
    for study in range(len(values)):
        for arm, row in enumerate(judged(values[study], 1.5)):
            assert row.verdict == many.verdict[study, arm]
            assert row.p_holm == pytest.approx(many.p_holm[study, arm])
            assert (row.ci_low, row.ci_high) == pytest.approx((many.low[study, arm], many.high[study, arm]))
            seen.add(row.verdict)
    assert {"better", "undecided", "equivalent"} <= seen


@pytest.mark.slow
@pytest.mark.parametrize("n", SEEDS)
def test_the_docs_to_a_tenth_of_a_percent(n: int) -> None:
    assert_near(rates(n, 400_000, seed=2), stated()[n], 200_000)


@pytest.mark.slow
@pytest.mark.parametrize("n", SEEDS)
def test_the_judge_itself_over_two_thousand_studies(n: int) -> None:
    studies = 2000
    values = draw(np.random.default_rng(100 + n), studies, n, (0.0,) * ARMS)
    named = covered = 0
    for study in values:
        rows = judged(study, 0.0)
        named += any(row.verdict in ("better", "worse") for row in rows)
        covered += rows[0].ci_low <= 0.0 <= rows[0].ci_high  # type: ignore[operator]
    for found, name in ((named, "false winner"), (covered, "coverage")):
        share = stated()[n][name]
        assert found / studies == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / studies))
