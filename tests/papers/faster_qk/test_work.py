"""The toy end to end: a short smoke run, its files, resuming, and the claims about it."""

from __future__ import annotations

import json
import math
import os
import queue
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headtohead as h2h
from headtohead import UserError
from headtohead.papers.faster_qk.findings import run_findings
from headtohead.papers.faster_qk.measure import Mark
from headtohead.papers.faster_qk.processes import start
from headtohead.papers.faster_qk.runs import RATIOS, RUNS, SEEDS
from headtohead.papers.faster_qk.train import ToyResult
from headtohead.papers.faster_qk.work import Toy, ToyPlan, work_toy
from headtohead.study.claims import judge_claims
from headtohead.study.claims.paper import find_paper, read_paper
from headtohead.study.judge.analysis import Analysis
from headtohead.study.store.manifest import Contest, Entry, Manifest

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train FACO down to loss 1 and compute the theory; return the output directory."""
    out = tmp_path_factory.mktemp("toy")
    h2h.run_toy(ToyPlan(("FACO",), until=1.0, stepped=0.1), out, device="cpu", quiet=True)
    return out


@pytest.mark.slow
def test_a_short_smoke_run_gives_the_published_numbers(folder: Path) -> None:
    found = json.loads((folder / "toy.json").read_text())
    assert len(found["ode"]) == 25
    assert {"r", "loss", "alpha"} <= found["ode"][0].keys()
    (row,) = found["runs"]
    assert (row["form"], row["loss"]) == ("FACO", 1.0)
    assert abs(row["alpha"] - 0.350) < 0.01
    findings = {finding["what"]: finding for finding in found["findings"]}
    assert findings["mean loss of FACO, epochs 1 to 100"]["tolerance"] == 0.003
    assert all(finding["holds"] for finding in findings.values()), findings
    assert found["left"] == 0


def test_charts_and_page_exist_and_need_no_script(folder: Path) -> None:
    pytest.importorskip("vl_convert")
    names = {"heat", "alpha-at-loss", "alpha-over-time", "phases"}
    assert {path.name for path in (folder / "charts").iterdir()} == {
        f"toy-{name}{ending}" for name in names for ending in (".svg", ".png")
    }
    page = (folder / "toy.html").read_text()
    assert page.count("<svg") == len(names)
    assert "<script" not in page
    assert 'fill="var(--ink)"' in page, "charts follow the page's light or dark colors"
    assert "data-theme" not in page.partition("<style>")[0]


def test_finished_runs_are_not_trained_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_training(runs: list[Any], *rest: Any) -> list[ToyResult]:
        assert not runs
        return []

    monkeypatch.setattr("headtohead.papers.faster_qk.work.train", no_training)
    before = json.loads((folder / "toy.json").read_text())
    plan = ToyPlan(("FACO",), until=1.0, stepped=0.1)
    work_toy(plan, folder, CPU, quiet=True)
    assert json.loads((folder / "toy.json").read_text()) == before
    (kept,) = (folder / "toy").iterdir()
    content = kept.read_bytes()
    kept.write_bytes(content[:100])
    with pytest.raises(AssertionError):  # damaged: it would be trained again
        work_toy(plan, folder, CPU, quiet=True)
    kept.write_bytes(content)


@pytest.mark.slow
def test_processes_share_the_forms_and_stop_after_at_most_one_run(tmp_path: Path) -> None:
    plan = ToyPlan(("FACO", "FAFO"), until=1.0, stepped=1.0)
    toy = work_toy(plan, tmp_path, CPU, workers=2, seconds=0.0, quiet=True)
    assert toy.left < 2
    assert len(list((tmp_path / "toy").iterdir())) == 2 - toy.left
    assert toy.findings  # theory needs no training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runs": ("FACE",)}, "unknown toy run 'FACE'; did you mean 'FACO'"),
        ({"runs": ("FACO",), "seeds": 9}, "1 to 5 seeds, got 9"),
        ({"runs": ("FACO",), "until": 0.2}, "until takes one of 1, 0.1, 0.01, 0.001, got 0.2"),
        ({"runs": ("FACO",), "long": {"CACO": 1}}, "unknown toy run 'CACO'"),
    ],
)
def test_invalid_plans_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ToyPlan(**settings)
    assert message in str(caught.value)


def test_an_unknown_scale_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'small'"):
        h2h.run_toy("smal", tmp_path)


def made(alphas: dict[str, dict[float, float]]) -> Toy:
    """Return toy results of five seeds with the given alpha by run and loss."""
    results = []
    for name, row in alphas.items():
        for index, seed in enumerate(SEEDS):
            shift = 0.002 * math.sin(7 * index + sum(map(ord, name)))
            marks = {
                f"loss {loss:g}": Mark(1, loss, alpha + shift, 0.05, [[0.0] * 5] * 5, 1.0, 1.0, 1.0, None)
                for loss, alpha in row.items()
            }
            results.append(ToyResult(replace(RUNS[name], seed=seed), marks))
    return Toy(results, 0, [], {}, run_findings(results))


def answer(toy: Toy | None, claim: int, scale: str = "small") -> tuple[str, str]:
    paper = read_paper(find_paper("faster_qk"))
    manifest = Manifest("p", (("standard", "standard"),), "standard", "standard", 0.005, (1,), ())
    contest = Contest("enwik8", "enwik8", "1m", "as_is", "tokens")
    manifest = replace(manifest, entries=(Entry("r", "standard", 1, contest),))
    found = judge_claims(paper, scale, {"study": Analysis(manifest, [])}, toy=toy)[claim - 1]
    return found.direction, found.scale


def test_claims_about_the_toy_are_decided_by_its_results() -> None:
    at = {0.01: 0.0, 0.001: 0.0}
    rows = {"FAFO": (0.35, 0.35), "CAFO": (0.36, 0.365), "CACO": (0.525, 0.619), "FACO": (0.653, 0.882)}
    table = {name: dict(zip(at, values)) for name, values in rows.items()}
    assert answer(made(table), 1) == ("supported", "published scale")
    assert answer(made(table), 1, "smoke") == ("open", "reduced scale")
    assert answer(made(table | {"CACO": {0.01: 0.8, 0.001: 0.95}}), 1)[0] == "contradicted"
    assert answer(made({name: table[name] for name in ("FAFO", "FACO")}), 1)[0] == "open"
    assert answer(None, 1) == ("open", "not run")


def test_the_toy_is_at_published_scale_only_with_published_settings() -> None:
    rows = {"FAFO": (0.35, 0.35), "CAFO": (0.36, 0.365), "CACO": (0.525, 0.619), "FACO": (0.653, 0.882)}
    whole = made({name: dict(zip((0.01, 0.001), values)) for name, values in rows.items()})
    few = [result for result in whole.results if result.run.seed in SEEDS[:2]]
    assert answer(replace(whole, results=few), 1) == ("supported", "reduced scale")
    brief = [ToyResult(replace(result.run, brief=True), result.marks) for result in whole.results]
    assert answer(replace(whole, results=brief), 1) == ("supported", "reduced scale")
    sweep = {f"CACO sweep r={ratio:g}": {0.1: 0.3 + 0.1 * index} for index, ratio in enumerate(RATIOS)}
    assert answer(made(sweep), 13) == ("supported", "reduced scale")


def test_runs_under_adam_do_not_affect_findings_and_claims() -> None:
    table = {"FACO": {0.1: 0.377, 0.01: 0.653, 0.001: 0.882}}
    alone, both = made(table), made(table | {"Adam FACO": {0.1: 1.0, 0.01: 1.0, 0.001: 1.0}})
    assert alone.findings
    assert both.findings == alone.findings
    assert {(row["name"], row["optimiser"]) for row in both.as_dict()["runs"]} == {
        ("FACO", "sgd"),
        ("Adam FACO", "adam"),
    }
    disguised = [ToyResult(replace(result.run, name="FACO"), result.marks) for result in both.results[5:]]
    assert run_findings(disguised) == []
    paper = read_paper(find_paper("faster_qk"))
    adam = {scale: {run.name for run in plan.chosen() if run.adam} for scale, plan in paper.toy.items()}
    assert adam["smoke"] == set()
    assert adam["small"] == adam["paper"] == {name for name in RUNS if name.startswith("Adam ")}
    used = {
        name
        for claim in paper.claims
        for criterion in claim.criteria
        for name in getattr(criterion, "order", ())
    }
    assert not used & adam["small"]


def test_adam_has_its_own_chart() -> None:
    pytest.importorskip("altair")
    from headtohead.report.toy import draw_toy

    toy = made({"FACO": {0.1: 0.377}, "FACO emulated": {0.1: 0.38}, "Adam FACO": {0.1: 1.0}})
    for result in toy.results:
        result.path.append({"step": 1, "loss": 0.1, "alpha": 0.5})
    drawn = draw_toy(toy)

    def runs(name: str) -> set[tuple[str, str]]:
        return {(row["run"], row["optimiser"]) for row in drawn[name]["data"]["values"]}

    assert runs("adam") == {("FACO", "sgd"), ("FACO", "adam")}
    assert runs("alpha-at-loss") == {("FACO", "sgd"), ("FACO emulated", "sgd")}
    assert "Adam" not in str(drawn["heat"])
    assert "adam" not in draw_toy(made({"FACO": {0.1: 0.377}}))


def test_a_wrong_number_contradicts_and_a_missing_one_leaves_open() -> None:
    table = {"FACO": {0.1: 0.377, 0.01: 0.653, 0.001: 0.882}, "CACO": {0.1: 0.436, 0.01: 0.525, 0.001: 0.619}}
    emulated = {"FACO emulated": {0.1: 0.377, 0.01: 0.607, 0.001: 0.832}}
    toy = made(table | emulated)
    assert [finding.holds for finding in toy.findings if finding.check == "emulated"] == [True] * 6
    assert answer(toy, 5)[0] == "open"  # the findings of the factors are missing
    far = made(table | {"FACO emulated": {0.1: 0.377, 0.01: 0.5, 0.001: 0.832}})
    assert answer(far, 5)[0] == "contradicted"


def test_settings_of_toy_claims_are_checked(tmp_path: Path) -> None:
    text = find_paper("faster_qk").read_text()
    path = tmp_path / "p.toml"
    for old, new, message in (
        ('order = ["FAFO", "CAFO"', 'order = ["FAFO", "CAFE"', "did you mean 'CAFO'"),
        (
            "losses = [0.01, 0.001], margins",
            "losses = [0.02, 0.001], margins",
            "unknown loss of the toy '0.02'",
        ),
        ('checks = ["factors"]', 'checks = ["factor"]', "did you mean 'factors'"),
        ("until = 0.01", "untill = 0.01", "did you mean 'until'"),
    ):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UserError) as caught:
            read_paper(path)
        assert message in str(caught.value)


def test_workers_have_their_own_process_group() -> None:
    """Ctrl-C must not reach workers, which would print a traceback; they end when their input is closed."""
    (run,) = ToyPlan(("FACO",), until=1.0).chosen()
    process = start([[run]], queue.Queue()).process
    try:
        assert os.getpgid(process.pid) == process.pid
    finally:
        process.kill()
        process.wait()


def test_a_toy_that_was_stopped_after_a_run_of_the_sweep_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    from headtohead.report.toy import draw_toy, write_toy

    toy = made({"CACO sweep r=100": {0.1: 0.9}})
    toy.results = toy.results[:1]
    assert "alpha-at-loss" not in draw_toy(toy), "the runs of the sweep are not part of that chart"
    assert write_toy(tmp_path, toy, lambda text, share: None).is_file()
