"""Arm x training corpus x evaluation corpus."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from headtohead import Study, UserError, evaluate, open_study
from headtohead.cli.shared.results import show_verdicts
from headtohead.data.shards import prepare
from headtohead.study.claims import judge_claims
from headtohead.study.claims.paper import find_paper, read_paper
from headtohead.study.config.spec import build_study
from headtohead.study.judge.transfer_matrix import corpus_matrix, read_probes
from headtohead.study.plan.planner import plan_study
from headtohead.study.store.manifest import Rate, manifest_from
from headtohead.study.store.run_store import Store

ARMS = ["standard", "coupled", "sharing:tie=kv"]
TINY = {"size": "nano", "bytes": "4k", "batch": 1024, "seeds": 3, "lr": 5e-3}
NAMED = ["coherence:0/32(stdlib)", "coherence:1/32(stdlib)"]
WORDS = {
    "beasts": ["elephant", "mouse", "crocodile", "cow"],
    "weather": ["thunder", "fog", "drizzle", "hail"],
}


@pytest.fixture(scope="module")
def dials(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two settings of the coherence dial over two domains of a few pages each."""
    place = tmp_path_factory.mktemp("domains")
    for name, words in WORDS.items():
        choose = random.Random(name)
        rows = [" ".join(choose.choice(words) for _ in range(60)) for _ in range(120)]
        (place / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    sources = ",".join(f"file:{place / name}.jsonl" for name in WORDS)
    return [f"coherence:{setting}/32({sources})" for setting in (0, 1)]


@pytest.fixture(scope="module")
def folder(dials: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("matrix") / "out"
    Study(ARMS, corpus=dials, probes="corpora", **TINY).run(place, quiet=True, workers=1)
    return place


def test_every_arm_is_judged_on_every_corpus(folder: Path) -> None:
    cells = open_study(folder).matrix()
    assert len(cells) == 2 * 2 * 2
    places = {(cell.verdict.arm, cell.trained[:12], cell.evaluated[:12]) for cell in cells}
    assert len(places) == 8
    assert all(cell.verdict.n == 3 and cell.verdict.ci_low is not None for cell in cells)
    assert all(cell.verdict.documents_low is not None for cell in cells)
    assert all("exploratory" in cell.verdict.notes for cell in cells)


def test_the_training_corpus_gives_the_studys_verdict(folder: Path) -> None:
    result = open_study(folder)
    own = {
        (cell.trained, cell.verdict.label): cell.verdict
        for cell in result.matrix()
        if cell.trained == cell.evaluated
    }
    for row in result.verdicts:
        cell = own[row.corpus, row.label]
        assert (cell.difference, cell.p_holm, cell.verdict) == (row.difference, row.p_holm, row.verdict)


def test_the_lead_of_a_rate_is_compared_with_scores_on_the_corpus_of_its_trials_only(folder: Path) -> None:
    result = open_study(folder)
    trials = [
        Rate(contest.corpus, contest.size, contest.shape, "standard", lr, score, lr == 1e-3, edge=True)
        for contest in result.manifest.contests()
        for lr, score in ((1e-3, 2.0), (2e-3, 2.0 + 1e-9))
    ]
    manifest = dataclasses.replace(result.manifest, tuning=tuple(trials))
    cells = corpus_matrix(manifest, result.results, read_probes(Store(folder), manifest, result.results))
    assert {cell.trained == cell.evaluated for cell in cells} == {True, False}
    for cell in cells:
        edge, *lead = cell.verdict.marks
        assert edge == "the best learning rate of standard is at the edge of the grid"
        assert len(lead) == (cell.trained == cell.evaluated)


def test_another_corpus_gives_the_score_of_evaluate(folder: Path, dials: list[str]) -> None:
    result = open_study(folder)
    cell = next(cell for cell in result.matrix() if cell.trained != cell.evaluated)
    run = result.manifest.runs(cell.contest, cell.verdict.label)[2]
    other = next(name for name in dials if name != cell.contest.corpus)
    score = evaluate(folder / "runs" / run, other, device="cpu", quiet=True)
    assert cell.verdict.values[cell.verdict.seeds.index(2)] == pytest.approx(score.bits_per_byte, rel=1e-6)


@pytest.mark.page
def test_matrix_json_and_page_are_rebuilt_from_the_store_alone(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("altair")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = (copy / "matrix.json").read_bytes()
    for name in ("matrix.json", "report.html"):
        (copy / name).unlink()
    open_study(copy).write(quiet=True)
    assert (copy / "matrix.json").read_bytes() == before
    rows = json.loads(before)
    assert {"trained", "evaluated", "difference", "ci_low", "verdict"} <= rows[0].keys()
    page = (copy / "report.html").read_text()
    assert "Cross-corpus evaluation" in page
    assert "Corpus statistics" in page


def test_the_terminal_shows_a_row_per_arm_and_training_corpus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_verdicts(open_study(folder))
    shown = capsys.readouterr().out
    _, _, table = shown.partition("difference from standard in bits per byte")
    assert table.count("coherence:1/32") == 1 + 2
    assert "(beasts" not in table.partition("solved budgets")[0]


def test_a_damaged_probe_is_left_out_and_taken_again(folder: Path, dials: list[str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    store = Store(copy)
    manifest = open_study(copy).manifest
    run = store.run(manifest.runs(manifest.contests()[0], "standard")[1])
    (path,) = (run.path / "probes").glob("corpora-*.json")
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"bytes": ', b'"bytes": 1', 1))
    cells = [cell for cell in open_study(copy).matrix() if cell.trained != cell.evaluated]
    assert sorted({cell.verdict.n for cell in cells}) == [2, 3]
    Study(ARMS, corpus=dials, probes="corpora", **TINY).run(copy, quiet=True, workers=1)
    assert path.read_bytes() == good


def test_scores_on_another_text_of_the_same_name_are_left_out(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    store = Store(copy)
    manifest = open_study(copy).manifest
    run = store.run(manifest.runs(manifest.contests()[0], "standard")[1])
    name = manifest.probes[0]
    found = run.probe(name)
    assert isinstance(found, dict)
    ((corpus, row),) = found.items()
    run.keep_probe(name, {corpus: replace(row, content="another text")})
    cells = [cell for cell in open_study(copy).matrix() if cell.trained != cell.evaluated]
    assert sorted({cell.verdict.n for cell in cells}) == [2, 3]


def test_one_corpus_has_no_matrix(dials: list[str], tmp_path: Path) -> None:
    result = Study(["standard", "coupled"], corpus=dials[0], probes="corpora", **(TINY | {"seeds": 1})).run(
        tmp_path, quiet=True, workers=1
    )
    assert result.matrix() == []
    assert not (tmp_path / "matrix.json").exists()
    assert result.manifest.statistics == {}


def test_statistics_of_several_corpora_are_in_the_manifest(folder: Path) -> None:
    manifest = open_study(folder).manifest
    assert manifest_from(manifest.as_dict()) == manifest
    low, high = manifest.statistics.values()
    assert (low["domain_bits"] or 0) < (high["domain_bits"] or 0)


def test_the_probe_covers_all_corpora_of_the_study_by_default(tmp_path: Path) -> None:
    assert build_study({"arms": ["standard"], "corpus": NAMED, "probes": "corpora"}).probes == (
        "corpora:" + ",".join(NAMED),
    )
    named = build_study({"arms": ["standard"], "probes": ["corpora:coherence:0(stdlib), stdlib"]})
    assert named.probes == ("corpora:coherence:0/64(stdlib),stdlib",)
    with pytest.raises(UserError, match="unknown corpus 'stdlip'"):
        build_study({"arms": ["standard"], "probes": ["corpora:stdlip"]})


def test_a_probe_with_a_missing_corpus_is_rejected_before_training() -> None:
    spec = build_study({"arms": ["standard"], "probes": ["corpora:enwik8"]})
    with pytest.raises(UserError, match=r"enwik8.* not found"):
        plan_study(spec)


def test_bytes_are_the_same_text_under_every_tokenizer(story: Path) -> None:
    corpus = f"file:{story}"
    study = {"arms": ["standard", "coupled"], "corpus": corpus, "bytes": "40k", "batch": 1024, "seeds": 1}
    plain = plan_study(build_study(study))
    assert {run.training.tokens for run in plain.compared()} == {40_000}
    assert plain.solved == ()
    same = plan_study(build_study({**{k: v for k, v in study.items() if k != "bytes"}, "tokens": "40k"}))
    assert [run.id for run in same.compared()] == [run.id for run in plain.compared()]
    coded = plan_study(build_study(study | {"tokenizer": "bpe:300"}))
    train = prepare(corpus, "bpe:300").splits["train"]
    (tokens,) = {run.training.tokens for run in coded.compared()}
    assert tokens * train.bytes / len(train.tokens) == pytest.approx(40_000, rel=1e-3)
    (row,) = coded.solved
    assert (row.label, row.rule, row.what, row.after, row.baseline) == (
        "standard",
        "bytes",
        "tokens",
        tokens,
        40_000,
    )
    assert "bytes per token" in row.note


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": "1M"},
        {"arms": ["standard", {"arm": "coupled", "tokens": "1M"}]},
        {"tune": {"lr": [1e-3, 2e-3, 4e-3]}},
    ],
)
def test_a_length_in_bytes_excludes_other_lengths(changes: dict[str, object]) -> None:
    with pytest.raises(UserError, match="bytes"):
        build_study({"arms": ["standard", "coupled"], "bytes": "1M"} | changes)


def test_a_flag_overrides_the_length_in_the_file() -> None:
    assert Study.from_file("coherence").spec.bytes == 1_000_000
    changed = Study.from_file("coherence", tokens=4096).spec
    assert changed.bytes == 0
    assert changed.train_settings(changed.arms[0]).tokens == 4096


def test_pieces_longer_than_half_a_window_are_rejected() -> None:
    spec = build_study({"arms": ["standard"], "corpus": "coherence:0/128(stdlib)"})
    with pytest.raises(UserError, match=r"longer than half a window .* DIAL/32"):
        plan_study(spec)


def test_a_claim_can_compare_two_settings_of_the_dial(folder: Path, dials: list[str]) -> None:
    """coupled.14 is about the change of the difference between two settings of the coherence dial."""
    paper = read_paper(find_paper("coupled"))
    claim = next(claim for claim in paper.claims if claim.id == "coupled.14")
    (criterion,) = claim.criteria
    for scale in ("tiny", "small"):
        corpora = paper.studies(scale)[criterion.study]["corpus"]
        assert [len(set(names) & set(corpora)) for names in criterion.values] == [1, 1]
    assert criterion.expect == "lower"
    result = open_study(folder)
    changed = dataclasses.replace(
        claim,
        criteria=(dataclasses.replace(criterion, arm="coupled", values=tuple((dial,) for dial in dials)),),
    )
    paper = dataclasses.replace(paper, claims=(claim, changed))
    there, here = judge_claims(paper, "small", {criterion.study: result.analysis})
    assert there.scale == "not tested"
    assert here.scale == "reduced scale"
    low, high = (row.difference or 0 for row in result.verdicts if row.arm == "coupled")
    assert here.measured[0]["difference"] == pytest.approx(high - low)
