"""Branches: one trunk and a decayed model at each token count, equal to separately trained runs."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tests.study.run.test_faults as faults
from headtohead import Study, examine_study, open_study
from headtohead.common.errors import UserError
from headtohead.common.schema import write_document
from headtohead.common.stop import NEVER
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.plan.branches import drop_checkpoints, grow, kept_checkpoint
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan
from headtohead.study.plan.planner import plan_study
from headtohead.study.run.claim_loop import ClaimLoop
from headtohead.study.run.events import Event
from headtohead.study.store.history import Marks
from headtohead.study.store.run_store import RunDirectory, Store
from headtohead.training.settings import TrainSettings

COUNTS = (1280, 2560, 5120)
SMALL = {"arms": ["standard", "sharing:tie=kv"], "batch": 256, "seeds": 2, "lr": 5e-3}


def study(story: Path, **values: Any) -> Study:
    return Study(**(SMALL | {"corpus": f"file:{story}", "branches": list(COUNTS)} | values))


def planned(story: Path, **values: Any) -> Plan:
    return plan_study(study(story, **values).spec)


def family(plan: Plan, store: Path) -> tuple[RunDirectory, list[RunDirectory]]:
    """Return the directories of the first trunk and of its branches, shortest first."""
    trunk = plan.trunks[0].run
    branches = [run for run in plan.compared() if run.parent and run.parent.run == trunk]
    return Store(store).run(trunk), [Store(store).run(run.id) for run in reversed(branches)]


@pytest.fixture(scope="module")
def raced(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a finished study with branches."""
    folder = tmp_path_factory.mktemp("branches") / "raced"
    assert not study(story).run(folder, workers=1, quiet=True).summary.left
    return folder


def test_branches_of_a_copied_trunk_are_marked(story: Path) -> None:
    manifest = planned(story).manifest
    trunks = {entry.run: "before" for entry in manifest.trunks if entry.label == "standard, trunk"}
    longest = manifest.runs(manifest.contests()[0], "standard")
    verdicts = study_verdicts(manifest, {}, Marks(copied={longest[1]: "before", **trunks}))
    note = "2 runs of standard copied from another study, whose results were known before: before"
    assert [row.marks_about for row in verdicts] == [{"standard": [note]}] * len(COUNTS)


@pytest.mark.parametrize("warmup", [0.0, 0.02, 0.3])
def test_trunk_and_branch_have_the_rates_of_one_run(warmup: float) -> None:
    lengths = [TrainSettings(tokens=n * 64, batch=64, schedule="wsd", warmup=warmup) for n in (37, 100, 399)]
    trunk, branches, starts = grow(lengths, 64)
    assert trunk.steps(64) == starts[-1]
    for branch, start in zip(branches, starts, strict=True):
        steps = branch.steps(64)
        whole = [branch.learning_rate(step, steps) for step in range(steps)]
        assert whole[:start] == [trunk.learning_rate(step, trunk.steps(64)) for step in range(start)]
        assert whole[start] < whole[start - 1] or start <= round(warmup * 37)
        assert whole[-1] == pytest.approx(branch.lr * branch.floor)


def test_a_length_too_short_for_its_phases_is_rejected() -> None:
    lengths = [TrainSettings(tokens=n * 64, batch=64, schedule="wsd") for n in (2, 100)]
    with pytest.raises(UserError, match=r"2 steps .* are too few"):
        grow(lengths, 64)


def test_a_branch_equals_the_uninterrupted_run_bit_for_bit(story: Path, raced: Path, tmp_path: Path) -> None:
    plan = planned(story, arms=["standard"], seeds=1)
    for run in plan.compared():
        settings = run.training.as_dict()
        alone = Study(**(SMALL | {"corpus": f"file:{story}", "arms": ["standard"], "seeds": 1} | settings))
        alone.run(tmp_path / run.id, workers=1, quiet=True)
        (whole,) = Store(tmp_path / run.id).runs()
        branch = Store(raced).run(run.id)
        assert whole.result().as_dict() == branch.result().as_dict()
        assert whole.weights.read_bytes() == branch.weights.read_bytes()
        assert [row.step for row in branch.logged_rows()] == [row.step for row in whole.logged_rows()]


def test_a_branch_names_its_parent_and_is_another_run_than_the_one_alone(story: Path, raced: Path) -> None:
    plan = planned(story)
    assert len(plan.trunks) == 4
    assert len(plan.runs) == 4 + 12
    for run in plan.compared():
        assert run.parent is not None
        spec = Store(raced).run(run.id).spec()
        assert spec.parent == run.parent
        assert spec.identity["parent"] == {"run": run.parent.run, "step": run.parent.step}
        assert run.parent.step in Store(raced).run(run.parent.run).spec().branches
    assert sum(map(plan.tokens, plan.runs.values())) == 4 * (4096 + 256 + 512 + 1024)


def test_a_finished_study_keeps_no_checkpoints_of_its_trunks(raced: Path) -> None:
    assert not list(raced.glob("runs/*/branches"))
    assert not list(raced.glob("runs/*/checkpoint/step-*"))
    assert not examine_study(raced, quiet=True)


@pytest.mark.page
def test_each_branch_is_a_contest(raced: Path) -> None:
    verdicts = open_study(raced).verdicts
    assert [row.branch for row in verdicts] == ["5120", "2560", "1280"]
    assert [row.primary for row in verdicts] == [True, False, False]
    assert [row.n for row in verdicts] == [2, 2, 2]
    result = open_study(raced)
    result.write(quiet=True)
    rows = list(csv.DictReader((raced / "runs.csv").open()))
    assert {row["branch"] for row in rows} == {"1280", "2560", "5120"}
    assert "2560 tokens" in result.headlines()[0]
    page = (raced / "report.html").read_text()
    # The verdicts are listed above the contests, each with a link to its own.
    for index, title in enumerate(("5120 tokens", "2560 tokens", "1280 tokens"), start=1):
        assert f'<a href="#contest{index}">{title}</a>' in page
        assert f'<h2 id="contest{index}">' in page


def test_seeds_added_later_are_marked_in_a_study_with_branches(
    story: Path, raced: Path, tmp_path: Path
) -> None:
    shutil.copytree(raced, tmp_path / "more")
    result = study(story, seeds=3).run(tmp_path / "more", workers=1, quiet=True)
    assert result.added_seeds == {3}
    assert [row.added_seeds for row in result.verdicts] == [[3]] * 3


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_branch_without_its_trunks_checkpoint_repeats_those_steps_itself(
    story: Path, raced: Path, tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "harmed"
    shutil.copytree(raced, folder)
    _, branches = family(planned(story), folder)
    before = (branches[1].path / "result.json").read_text()
    trunk, _ = family(planned(story), folder)
    for path in (branches[1].path / "result.json", branches[1].weights):
        path.unlink()
    if harm == "damaged":
        step = branches[1].spec().parent.step
        kept_checkpoint(trunk, step).mkdir(parents=True)
        (kept_checkpoint(trunk, step) / "state.json").write_text("{")
    study(story).run(folder, workers=1)
    assert (branches[1].path / "result.json").read_text() == before
    assert "the trunk's steps are repeated in this run" in capsys.readouterr().out
    assert not list(folder.glob("runs/*/branches"))


def test_the_doctor_names_a_damaged_checkpoint_that_a_branch_still_needs(
    story: Path, raced: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(raced, folder)
    trunk, branches = family(planned(story), folder)
    (branches[0].path / "result.json").unlink()
    kept = kept_checkpoint(trunk, branches[0].spec().parent.step)
    kept.mkdir(parents=True)
    (finding,) = examine_study(folder, repair=True, quiet=True)
    assert "its branch repeats the trunk's steps" in str(finding)
    assert not kept.exists()
    shutil.copy(raced / "runs" / branches[0].id / "result.json", branches[0].path)
    (finding,) = examine_study(folder, repair=True, quiet=True)
    assert "the branches of this trunk are done" in str(finding)
    assert not trunk.branches.exists()


def test_checkpoints_are_dropped_after_the_last_branch_and_not_before(
    story: Path, raced: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(raced, folder)
    plan = planned(story)
    trunk, branches = family(plan, folder)
    trunk.branches.mkdir()
    result = branches[2].path / "result.json"
    result.rename(tmp_path / "aside")
    drop_checkpoints(Store(folder), plan.compared())
    assert trunk.branches.is_dir()
    shutil.move(tmp_path / "aside", result)
    drop_checkpoints(Store(folder), plan.compared())
    assert not trunk.branches.is_dir()


def test_a_trunk_whose_branches_are_done_is_not_run_again(story: Path, raced: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(raced, folder)
    trunk, _ = family(planned(story), folder)
    (trunk.path / "result.json").unlink()
    assert study(story).run(folder, workers=1, quiet=True).summary.done == 0


@pytest.mark.slow
def test_killed_at_any_moment_a_study_with_branches_ends_with_the_same_results(
    story: Path, tmp_path: Path
) -> None:
    settings = faults.SMALL | {"corpus": f"file:{story}", "branches": [2560, 5120], "seeds": 1}
    faults.same_after_deaths(tmp_path, settings, seed=1, deaths=6)
    assert not list((tmp_path / "killed").glob("runs/*/branches"))


@pytest.mark.slow
def test_several_workers_do_each_run_once_and_branches_wait(story: Path, raced: Path, tmp_path: Path) -> None:
    result = study(story).run(tmp_path / "pool", workers=2, quiet=True)
    assert result.summary.done == 16
    assert not result.summary.trouble
    assert faults.results(tmp_path / "pool") == faults.results(raced)
    for run in Store(tmp_path / "pool").runs():
        assert len(run.environments()) == (2 if run.spec().parent else 1)  # the trunk's and its own


def test_branches_of_a_deferred_trunk_do_not_run(story: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(story, text)
    first = Study(**(SMALL | {"corpus": f"file:{text}", "branches": list(COUNTS), "seeds": 1}))
    plan = plan_study(first.spec)
    assert plan.runs[plan.trunks[0].run].label == "standard, trunk"
    events: list[Event] = []
    text.write_text("another text altogether\n" * 500)
    store = Store(tmp_path / "study")
    store.make()
    ClaimLoop(store, list(plan.runs.values()), ExecutionSettings(), NEVER, events.append).work()
    assert {event.kind for event in events} == {"started", "deferred", "ended"}
    assert {event.run for event in events} == {entry.run for entry in plan.trunks}


def test_every_length_rule_gives_a_branch_its_own_tokens(story: Path) -> None:
    counts = (2560, 5120, 10_240)
    arms, lengths = ["standard", "coupled"], ["tokens", "flops"]
    plan = planned(story, arms=arms, length=lengths, branches=list(counts), seeds=1)
    solved = [row for row in plan.entries if row.label != "standard" and row.contest.length == "flops"]
    assert [entry.contest.branch for entry in solved] == ["10240", "5120", "2560"]
    for entry, tokens in zip(solved, counts[::-1], strict=True):
        same = (row for row in plan.entries if row.contest == entry.contest and row.label == "standard")
        run, base = plan.runs[entry.run], plan.runs[next(same).run]
        assert base.training.tokens == tokens
        assert run.training.tokens < tokens
        assert run.training.tokens * run.flops_per_token == pytest.approx(
            tokens * base.flops_per_token, rel=0.06
        )
    # The baseline is the same under both rules: its runs and its trunk run once.
    assert len({entry.run for entry in plan.trunks}) == 3


def test_settings_that_contradict_branches_are_rejected(story: Path) -> None:
    for message, values in {
        "leave tokens out": {"tokens": 5000},
        "branches need wsd": {"schedule": "cosine"},
        "two token counts or more": {"branches": ["4k"]},
        "tokens of its own": {"arms": ["standard", {"arm": "diagonal", "tokens": "9k"}]},
    }.items():
        with pytest.raises(UserError, match=message):
            study(story, **values)


@pytest.mark.slow
def test_a_tuned_study_tunes_plain_runs_and_branches_at_the_chosen_rate(story: Path, tmp_path: Path) -> None:
    values = {key: value for key, value in SMALL.items() if key != "lr"} | {
        "seeds": 1,
        "arms": ["standard", "diagonal"],
    }
    tuned = Study(
        **values,
        corpus=f"file:{story}",
        branches=[1280, 2560],
        tune={"lr": [1e-4, 1e-2, 1.0], "tokens": 1024},
    ).run(tmp_path / "tuned", workers=1, quiet=True)
    chosen = {row.label: row.lr for row in tuned.manifest.tuning if row.chosen}
    for entry in tuned.manifest.entries:
        spec = Store(tmp_path / "tuned").run(entry.run).spec()
        assert spec.training.lr == chosen[entry.label]
        assert spec.parent is not None


def test_a_spec_with_a_false_parent_is_rejected(raced: Path, tmp_path: Path, story: Path) -> None:
    shutil.copytree(raced, tmp_path / "false")
    _, branches = family(planned(story), tmp_path / "false")
    path = branches[0].path / "spec.json"
    record = json.loads(path.read_text())
    record["parent"]["run"] = "../../../elsewhere"
    write_document(path, record)
    with pytest.raises(UserError, match="do not match its identity"):
        branches[0].spec()


def test_a_watched_study_counts_its_trunks_and_a_branchs_own_steps(
    story: Path, raced: Path, tmp_path: Path
) -> None:
    pytest.importorskip("altair")
    from headtohead.report.dashboard.status import StatusReader

    assert StatusReader(raced).look().facts["counts"]["all"] == 16
    folder = tmp_path / "watched"
    shutil.copytree(raced, folder)
    trunk, branches = family(planned(story), folder)
    for run in (trunk, branches[2]):
        (run.path / "result.json").unlink()
    shutil.rmtree(branches[2].checkpoints)
    (branches[2].path / "metrics.jsonl").unlink()
    facts = StatusReader(folder).look().facts
    assert facts["counts"]["done"] == 14
    # A branch with 1024 tokens of its own has not started; the trunk's curve is complete.
    assert facts["share"] == pytest.approx(1 - 1024 / (4 * (4096 + 256 + 512 + 1024)))


def test_a_study_written_before_branches_existed_can_be_read(raced: Path, tmp_path: Path) -> None:
    record = json.loads((raced / "study.json").read_text())
    assert len(record["outline"]["trunks"]) == 4
    del record["outline"]["trunks"]
    for row in record["outline"]["entries"]:
        for name in ("context", "branch"):
            del row["contest"][name]
    record["outline"]["entries"] = record["outline"]["entries"][:4]
    write_document(tmp_path / "study.json", record)
    (contest,) = open_study(tmp_path).manifest.contests()
    assert (contest.context, contest.branch) == ("", "")
    assert contest.title == "story.txt, nano, shape as_is, length tokens"
