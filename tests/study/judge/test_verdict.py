from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from headtohead.study.judge.verdict import headlines, sentence, study_verdicts
from headtohead.study.store.history import Marks
from headtohead.study.store.manifest import Contest, Entry, Manifest, manifest_from
from headtohead.study.store.result import RunResult
from tests.results import run_result

CONTEST = Contest("c", "c@1", "nano", "as_is", "tokens")
NEEDED = [
    "arm",
    "baseline",
    "corpus",
    "size",
    "shape",
    "length",
    "metric",
    "n",
    "mean",
    "baseline_mean",
    "difference",
    "ci_low",
    "ci_high",
    "p",
    "p_holm",
    "margin",
    "detectable",
    "primary",
    "verdict",
]


def manifest(
    labels: list[str], seeds: int = 5, primary: str | None = None, contests: tuple[Contest, ...] = (CONTEST,)
) -> Manifest:
    entries = tuple(
        Entry(f"{contest.size}/{label}/{seed}", label, seed, contest)
        for contest in contests
        for label in labels
        for seed in range(1, seeds + 1)
    )
    return Manifest(
        "s",
        tuple((f"text:{x}", x) for x in labels),
        labels[0],
        primary or labels[1],
        0.005,
        tuple(range(1, seeds + 1)),
        entries,
    )


def done(value: float, blocks: int = 10, tilt: float = 0.0) -> RunResult:
    rows = [[value * 100 * (1 + tilt * (-1) ** i), 100] for i in range(blocks)]
    return run_result(test={"bits_per_byte": value, "blocks": rows})


def results(values: dict[str, list[float]], size: str = "nano") -> dict[str, RunResult]:
    return {
        f"{size}/{label}/{seed}": done(value)
        for label, row in values.items()
        for seed, value in enumerate(row, 1)
    }


BASE = [2.50, 2.52, 2.48, 2.51, 2.49]
BETTER = [x - 0.02 - 0.001 * i for i, x in enumerate(BASE)]
WORSE = [x + 0.1 + 0.003 * i for i, x in enumerate(BASE)]
SAME = [x + 0.0005 * (-1) ** i for i, x in enumerate(BASE)]
NOISY = [x + 0.05 * (-1) ** i for i, x in enumerate(BASE)]


def test_each_arm_gets_its_verdict_and_every_field() -> None:
    values = {"base": BASE, "up": BETTER, "down": WORSE, "same": SAME, "noisy": NOISY}
    rows = study_verdicts(manifest(list(values)), results(values))
    assert [row.verdict for row in rows] == ["better", "worse", "equivalent", "undecided"]
    for row in rows:
        assert set(NEEDED) <= set(row.as_dict())
        assert row.baseline == "text:base"
        assert row.metric == "bits_per_byte"
        assert row.n == 5
    assert rows[0].difference == pytest.approx(-0.022)
    assert [row.primary for row in rows] == [True, False, False, False]
    assert "exploratory" in rows[1].notes
    assert "exploratory" not in rows[0].notes


def test_holm_counts_the_arms_of_a_contest() -> None:
    values = {"base": BASE, "up": BETTER} | {f"n{i}": NOISY for i in range(4)}
    rows = study_verdicts(manifest(list(values)), results(values))
    assert rows[0].p is not None
    assert rows[0].p_holm == pytest.approx(5 * rows[0].p)


def test_a_p_that_holm_raises_above_5_percent_is_explained() -> None:
    near = [x + 0.02 + 0.012 * (-1) ** i for i, x in enumerate(BASE)]
    values = {"base": BASE, "near": near} | {f"n{i}": NOISY for i in range(3)}
    row = study_verdicts(manifest(list(values)), results(values))[0]
    assert row.p is not None
    assert row.p < 0.05 < (row.p_holm or 0)
    assert row.verdict == "undecided"
    assert any("Holm's correction" in note for note in row.notes)


def test_only_paired_seeds_count() -> None:
    found = results({"base": BASE, "up": BETTER})
    del found["nano/up/2"], found["nano/base/5"]
    row = study_verdicts(manifest(["base", "up"]), found)[0]
    assert row.seeds == [1, 3, 4]
    assert row.missing == 1
    assert any("not finished" in note for note in row.notes)


def test_a_diverged_run_is_counted_and_withholds_a_win() -> None:
    found = results({"base": BASE, "up": BETTER})
    found["nano/up/3"] = run_result("diverged")
    row = study_verdicts(manifest(["base", "up"]), found)[0]
    assert (row.n, row.diverged, row.verdict) == (4, 1, "undecided")
    assert any("diverged" in note for note in row.notes)


@pytest.mark.parametrize("values", [BETTER, WORSE, SAME], ids=("better", "worse", "equivalent"))
@pytest.mark.parametrize("side", ["up", "base"])
def test_a_diverged_run_on_either_side_withholds_every_verdict(values: list[float], side: str) -> None:
    found = results({"base": BASE, "up": values})
    assert study_verdicts(manifest(["base", "up"]), found)[0].verdict != "undecided"
    found[f"nano/{side}/3"] = run_result("diverged")
    row = study_verdicts(manifest(["base", "up"]), found)[0]
    assert row.verdict == "undecided"
    assert any("is withheld: the runs that did not diverge" in note for note in row.notes)
    assert (row.diverged, row.baseline_diverged) == ((1, 0) if side == "up" else (0, 1))


@pytest.mark.parametrize(
    ("base", "arm"),
    [
        ([2.5, 2.6], [2.25, 2.35]),
        ([2.50, 2.52, 2.48], [2.40, 2.42, 2.38]),
        (BASE, BASE),
        ([1e-320, 3e-320, 2e-320], [2e-320, 5e-320, 3e-320]),
    ],
    ids=("two seeds", "rounded", "the same runs", "denormal"),
)
def test_zero_spread_decides_nothing(base: list[float], arm: list[float]) -> None:
    one = manifest(["base", "up"], seeds=len(base))
    row = study_verdicts(one, results({"base": base, "up": arm}))[0]
    assert (row.verdict, row.p, row.ci_low) == ("undecided", None, None)
    assert any("zero spread" in note for note in row.notes)


def lined(arms: list[str], **lines: float) -> Manifest:
    one = manifest(arms)
    return dataclasses.replace(one, references={one.contests()[0].corpus_label: lines})


@pytest.mark.parametrize(
    ("line", "values", "verdict"),
    [
        (3.0, BETTER, "better"),
        (3.0, WORSE, "worse"),
        (3.0, SAME, "equivalent"),
        (2.3, BETTER, "undecided"),  # both are untrained
        (2.3, WORSE, "undecided"),
        (2.3, SAME, "undecided"),
        (2.55, WORSE, "worse"),  # only the arm is untrained: it may be worse than a trained baseline
        (2.475, [value - 0.1 for value in BETTER], "better"),  # only the baseline is untrained
    ],
)
def test_no_winner_among_untrained_models(line: float, values: list[float], verdict: str) -> None:
    """Better needs an arm that beats the bigram line, worse a baseline that does, equivalent both."""
    found = results({"base": BASE, "up": values})
    row = study_verdicts(lined(["base", "up"], unigram=4.9, bigram=line), found)[0]
    assert row.verdict == verdict
    if verdict == "undecided":
        assert any("is withheld" in note and "untrained" in note for note in row.notes)
        assert "is withheld: " in sentence(row)
        assert "train longer" in sentence(row)


def test_a_loss_that_still_falls_is_a_warning() -> None:
    found = results({"base": BASE, "up": BETTER})
    for seed, fall in ((1, 0.2), (2, 0.02)):
        found[f"nano/up/{seed}"] = replace(found[f"nano/up/{seed}"], late_fall=fall)
    row = study_verdicts(manifest(["base", "up"]), found)[0]
    assert row.falling == 1
    assert any("1 of the compared runs was still falling steeply" in note for note in row.notes)


def test_a_failed_run_is_counted_separately() -> None:
    found = results({"base": BASE, "up": BETTER})
    found["nano/up/3"] = run_result("out of memory", error="x")
    row = study_verdicts(manifest(["base", "up"]), found)[0]
    assert (row.failed, row.diverged, row.n) == (1, 0, 4)


def test_no_pair_gives_nulls_and_no_winner() -> None:
    row = study_verdicts(manifest(["base", "up"]), {})[0]
    assert row.verdict == "undecided"
    assert row.mean is row.difference is row.p is row.p_holm is row.detectable is None
    assert "no finished pair" in sentence(row)
    single = study_verdicts(manifest(["base", "up"], seeds=1), results({"base": [2.0], "up": [1.0]}))[0]
    assert (single.verdict, single.ci_low) == ("undecided", None)
    assert any("no interval" in note for note in single.notes)


def test_where_documents_disagree_the_verdict_says_on_this_test_set() -> None:
    values = {"base": BASE, "up": [x - 0.02 for x in BASE]}
    found = results(values)
    for seed in range(1, 6):
        found[f"nano/up/{seed}"] = done(BASE[seed - 1] - 0.02 - 0.0001 * seed, tilt=0.2)
    row = study_verdicts(manifest(["base", "up"]), found)[0]
    assert row.verdict == "better"
    assert row.scope == "this test set"
    assert "on this test set" in sentence(row)


def test_seeds_added_after_results_existed_are_marked() -> None:
    row = study_verdicts(
        manifest(["base", "up"]), results({"base": BASE, "up": BETTER}), Marks(frozenset({4, 5}))
    )[0]
    assert row.added_seeds == [4, 5]
    assert any("added after results existed" in note for note in row.notes)


def test_contests_are_judged_separately_and_one_row_is_primary() -> None:
    other = Contest("c", "c@1", "1m", "params", "tokens")
    both = manifest(["base", "up"], contests=(CONTEST, other))
    found = results({"base": BASE, "up": BETTER}) | results({"base": BASE, "up": WORSE}, "1m")
    rows = study_verdicts(both, found)
    assert [(row.size, row.shape, row.verdict) for row in rows] == [
        ("nano", "as_is", "better"),
        ("1m", "params", "worse"),
    ]
    assert [row.primary for row in rows] == [True, False]


def test_a_significant_difference_within_the_margin_is_noted() -> None:
    values = {"base": BASE, "up": [x - 0.001 - 0.00001 * i for i, x in enumerate(BASE)]}
    row = study_verdicts(manifest(list(values)), results(values))[0]
    assert row.verdict == "better"
    assert any("within the margin" in note for note in row.notes)


def test_sentences_name_arms_margin_and_rule() -> None:
    values = {"base": BASE, "up": BETTER, "same": SAME, "noisy": NOISY}
    sentences = [sentence(row) for row in study_verdicts(manifest(list(values)), results(values))]
    assert sentences[0].startswith("up is better than base by 0.02")
    assert sentences[1] == "same is equivalent to base within 0.005 bits per byte at equal tokens."
    assert "undecided" in sentences[2]


def test_a_headline_covers_all_contests_of_an_arm_and_names_what_differs() -> None:
    contests = tuple(
        Contest("c", "c@1", size, "as_is", length) for size, length in (("a", "tokens"), ("b", "time"))
    )
    values = {"base": BASE, "up": BETTER, "same": SAME}
    noisy = {"base": BASE, "up": NOISY, "same": SAME}
    known = results(values, "a") | results(noisy, "b")
    rows = study_verdicts(manifest(list(values), contests=contests), known)
    (first, up), (second, same) = headlines(rows)
    assert (first, second) == ("mixed", "equivalent")
    assert up.startswith("up is better than base by 0.02")
    assert "bits per byte at equal tokens (a); undecided at equal time (b) (between -0.0" in up
    assert same == (
        "same is equivalent to base within 0.005 bits per byte at equal tokens (a); "
        "equivalent within 0.005 at equal time (b)."
    )
    assert sentence(rows[0], rows).endswith("at equal tokens (a).")
    one = [row for row in rows if row.size == "a"]
    assert [text for _, text in headlines(one)] == [sentence(row) for row in one]
    plain = dataclasses.replace(rows[3], length="time_plain", shape="cache")
    assert sentence(plain).endswith("at equal plain-path time and cache.")


def test_a_headline_over_many_contests_gives_the_first_and_counts_all() -> None:
    contests = tuple(Contest("c", "c@1", size, "as_is", "tokens") for size in "abcdef")
    known = {}
    for size, values in zip("abcdef", (BETTER, NOISY, SAME, BETTER, NOISY), strict=False):
        known |= results({"base": BASE, "up": values}, size)
    ((verdict, text),) = headlines(study_verdicts(manifest(["base", "up"], contests=contests), known))
    assert verdict == "mixed"
    assert text.startswith("up is better than base by 0.02")
    assert text.endswith(
        "(a); of all 6 contests, better in 2, equivalent in 1, undecided in 2, no finished pair of runs yet in 1."
    )


def test_a_manifest_survives_its_file() -> None:
    one = manifest(["base", "up"])
    assert manifest_from(one.as_dict()) == one
    with pytest.raises(ValueError, match="missing required field"):
        manifest_from({"name": "x"})


def test_an_untrained_arm_is_noted() -> None:
    values = {"base": [2.0, 2.1, 2.2], "stuck": [5.01, 4.99, 2.3]}
    (row,) = study_verdicts(lined(["base", "stuck"], unigram=6.0, bigram=4.0), results(values))
    assert (row.unlearnt, row.baseline_unlearnt) == (2, 0)
    assert any("2 of its runs are untrained" in note for note in row.notes)
