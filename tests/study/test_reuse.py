"""Finished runs of other studies are copied instead of trained again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import headtohead as h2h
from headtohead.api.reproduce import Reproduction
from headtohead.api.result import StudyResult
from headtohead.api.runner import StudyRunner
from headtohead.common.errors import UserError
from headtohead.common.schema import write_document
from headtohead.common.stop import Stop
from headtohead.study.plan.tuning import grid_spec
from headtohead.study.store.archive import check_run
from headtohead.study.store.copies import Source, Wanted, copy_finished_runs
from headtohead.study.store.history import MAX_BYTES, History
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import RunDirectory, Store

RESULT = "result.json"


@pytest.fixture(scope="module")
def first(story: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """A finished study of standard and gated."""
    return run(story, tmp_path_factory.mktemp("first"), "standard", "gated")


def run(
    story: Path,
    out: Path,
    *arms: str,
    probes: tuple[str, ...] = (),
    tune: dict[str, object] | None = None,
    seeds: int | list[int] = 2,
    branches: list[int] | None = None,
    quiet: bool = True,
    **how: object,
) -> StudyResult:
    length = {"tokens": 1024} if branches is None else {"branches": branches}
    settings = {**length, "batch": 256, "seeds": seeds, "probes": list(probes)}
    if tune is not None:
        settings["tune"] = tune
    study = h2h.Study(arms=list(arms), corpus=f"file:{story}", **settings)
    return study.run(out, device="cpu", workers=1, quiet=quiet, **how)


def test_shared_runs_are_copied_and_the_others_trained(
    story: Path, tmp_path: Path, first: StudyResult
) -> None:
    source = Store(first.path)
    again = run(story, tmp_path / "b", "standard", "sink", reuse=[first.path])
    assert again.summary.done == 2
    shared = [folder for folder in Store(again.path).runs() if source.run(folder.id).finished()]
    assert len(shared) == 2
    for folder in shared:
        assert (folder.path / RESULT).read_bytes() == (source.run(folder.id).path / RESULT).read_bytes()
    (verdict,) = again.verdicts
    assert (verdict.n, verdict.added_seeds) == (2, [])
    assert {folder.id for folder in Store(again.path).runs()} == {
        entry.run for entry in again.manifest.entries
    }


def test_missing_probes_are_taken_from_the_copied_weights(
    story: Path, tmp_path: Path, first: StudyResult
) -> None:
    again = run(story, tmp_path / "b", "standard", "gated", probes=("positions",), reuse=[first.path])
    assert again.summary.left == 0
    assert all(folder.probe("positions") is not None for folder in Store(again.path).runs())
    assert not any(folder.probe("positions") for folder in Store(first.path).runs())


def test_a_damaged_run_is_trained_and_not_copied(story: Path, tmp_path: Path, first: StudyResult) -> None:
    run(story, tmp_path / "a", "standard", "gated", reuse=[first.path])
    damaged = Store(tmp_path / "a").runs()[0].path / RESULT
    damaged.write_text(damaged.read_text()[:-20])
    again = run(story, tmp_path / "b", "standard", "gated", reuse=[tmp_path / "a"])
    assert again.summary.done == 1
    assert len(again.results) == 4


def paper(folder: Path, story: Path, rates: str = "lr = 1e-3", more: str = "lr = 1e-3") -> str:
    """Write a paper of two studies that share the runs of standard, with these rates, and return its path."""
    scales = "".join(f"[scale.{scale}]\n[also.more.{scale}]\n" for scale in ("smoke", "small", "paper"))
    settings = f"corpus = 'file:{story}'\ntokens = 1024\nbatch = 256\nseeds = 2\n"
    claim = "[[claim]]\nid = 'p.1'\nstatement = 's'\npublished = 'n'\ncriteria = [{kind = 'open', reason = 'r'}]\n"
    (folder / "p.toml").write_text(
        f"[study]\narms = ['standard', 'gated']\n{settings}{rates}\n"
        f"[also.more]\narms = ['standard', 'sink']\n{settings}{more}\n{scales}{claim}"
    )
    return str(folder / "p.toml")


def reproduced(file: str, **how: object) -> Reproduction:
    out = Path(file).parent / "o"
    return h2h.reproduce(file, out=out, device="cpu", workers=1, quiet=True, **how)


def test_studies_of_a_paper_train_a_shared_run_once(story: Path, tmp_path: Path) -> None:
    found = reproduced(paper(tmp_path, story))
    assert found.summary.done == 6
    assert all(len(study.results) == 4 for study in found.studies.values())
    assert not any(row.marks for study in found.studies.values() for row in study.verdicts)


def test_runs_of_a_paper_are_marked_if_its_studies_were_changed_after_results(
    story: Path, tmp_path: Path
) -> None:
    reproduced(paper(tmp_path, story, more="lr = 2e-3"), only="more")
    found = reproduced(paper(tmp_path, story, rates="lr = 2e-3", more="lr = 2e-3"))
    assert found.summary.done == 2
    (row,) = found.study.verdicts
    assert row.marks_about == {
        "standard": ["2 runs of standard copied from another study, whose results were known before: more"]
    }


def test_settings_that_were_changed_before_the_first_run_are_no_mark(story: Path, tmp_path: Path) -> None:
    file = paper(tmp_path, story, rates="lr = 2e-3", more="lr = 1e-3")
    with pytest.raises(UserError, match="nonsense"):
        h2h.reproduce(file, out=tmp_path / "o", device="nonsense", quiet=True)
    found = reproduced(paper(tmp_path, story))
    assert found.summary.done == 6, "the studies share the runs of standard"
    assert not any(row.marks for study in found.studies.values() for row in study.verdicts)


def test_trials_of_a_study_that_is_still_tuned_are_shared_without_a_mark(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = "tune = {lr = [1e-3, 2e-3, 4e-3], seeds = 2}"
    file = paper(tmp_path, story, rates=tune, more=tune)
    tuning = StudyRunner.tune
    monkeypatch.setattr(StudyRunner, "tune", stopped_before_it_is_frozen)
    with pytest.raises(KeyboardInterrupt):
        reproduced(file, only="more")
    monkeypatch.setattr(StudyRunner, "tune", tuning)
    found = reproduced(file, only="study")
    assert not (tmp_path / "o" / "more" / "study.json").exists()
    assert found.summary.done < 12, "the trials of standard were copied"
    assert not [mark for row in found.study.verdicts for mark in row.marks if "copied" in mark]


def stopped_before_it_is_frozen(runner: StudyRunner) -> None:
    """Run the trials of a tuning and stop."""
    assert runner.spec.tune is not None
    runner.store.make()
    runner.execute(runner.plan(grid_spec(runner.spec, runner.spec.tune.lr)))
    raise KeyboardInterrupt


def test_a_study_that_is_still_tuned_is_named(story: Path, tmp_path: Path) -> None:
    found = reproduced(paper(tmp_path, story, rates="tune = {lr = [1e-3, 2e-3, 4e-3]}"), time_limit=0)
    with pytest.raises(UserError, match=r"^study 'study' is still being tuned"):
        _ = found.study


def test_a_run_copied_within_a_paper_keeps_the_mark_of_an_earlier_copy(
    tmp_path: Path, first: StudyResult
) -> None:
    source = Store(first.path)
    copies(source, tmp_path / "a", same_plan=False)
    copies(Store(tmp_path / "a"), tmp_path / "b")
    assert History.read(tmp_path / "b").origins() == {folder.id: first.path.name for folder in source.runs()}


def test_a_study_stopped_while_tuning_is_not_run(story: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        f"[study]\narms = ['standard', 'gated']\ncorpus = 'file:{story}'\ntokens = 1024\nbatch = 256\nseeds = 2\n"
        "tune = {lr = [1e-3, 2e-3, 4e-3], tokens = 1024}\n[scale.smoke]\n[scale.small]\n[scale.paper]\n"
        "[[claim]]\nid = 'p.1'\nstatement = 's'\npublished = 'n'\n"
        "criteria = [{kind = 'difference', arm = 'gated', expect = 'better'}]\n"
    )
    settings = {"out": tmp_path / "o", "device": "cpu", "workers": 1, "quiet": True}
    (claim,) = h2h.reproduce(str(file), **settings, time_limit=0).claims
    assert (claim.direction, claim.scale) == ("open", "not run")
    assert "is still being tuned" in claim.reason
    (claim,) = h2h.reproduce(str(file), **settings).claims
    assert claim.scale != "not run"


def copied(first: StudyResult, folder: Path) -> Store:
    """Return a copy of the first study's directory, to be changed."""
    shutil.copytree(first.path, folder)
    return Store(folder)


def copies(source: Store, target: Path, probes: tuple[str, ...] = (), same_plan: bool = True) -> int:
    store = Store(target)
    store.make()
    wanted = [Wanted(folder.id, probes) for folder in source.runs()]
    return len(copy_finished_runs(store, [Source(source, same_plan)], wanted))


def test_failures_depend_on_the_machine_and_are_not_copied(tmp_path: Path, first: StudyResult) -> None:
    source = copied(first, tmp_path / "a")
    one, two, *_ = source.runs()
    for run, status in ((one, "failed"), (two, "out of memory")):
        run.finish(RunResult(status=status, error="its process was killed"))
    assert copies(source, tmp_path / "b") == 2
    assert not Store(tmp_path / "b").run(one.id).path.exists()


def test_probes_that_measure_time_are_not_copied(tmp_path: Path, first: StudyResult) -> None:
    source = copied(first, tmp_path / "a")
    for run in source.runs():
        run.path.joinpath("probes").mkdir()
        for name in ("decode", "positions"):
            (run.path / f"probes/{name}.json").write_bytes(probe_document(run, name))
    assert copies(source, tmp_path / "b", ("decode",)) == 4
    for run in Store(tmp_path / "b").runs():
        assert [path.name for path in (run.path / "probes").iterdir()] == ["positions.json"]


def probe_document(run: RunDirectory, name: str) -> bytes:
    path = run.path / "any.json"
    write_document(path, {"run": run.id, "probe": name, "found": {"none": "nothing to measure"}})
    content = path.read_bytes()
    path.unlink()
    return content


def test_a_run_without_weights_is_copied_if_no_probe_is_missing(tmp_path: Path, first: StudyResult) -> None:
    source = copied(first, tmp_path / "a")
    for run in source.runs():
        run.weights.unlink()
    assert copies(source, tmp_path / "b", ("positions",)) == 0
    assert copies(source, tmp_path / "c") == 4


@pytest.mark.parametrize("file", ["metrics.jsonl", "checkpoint/final.safetensors", "spec.json"])
def test_a_changed_file_is_not_copied(tmp_path: Path, first: StudyResult, file: str) -> None:
    source = copied(first, tmp_path / "a")
    path = source.runs()[0].path / file
    path.write_bytes(path.read_bytes()[:-40] + b"0" * 40)
    assert copies(source, tmp_path / "b") == 3


def test_links_are_not_followed(tmp_path: Path, first: StudyResult) -> None:
    source = copied(first, tmp_path / "a")
    run = source.runs()[0]
    run.weights.rename(tmp_path / "secret")
    run.weights.symlink_to(tmp_path / "secret")
    assert copies(source, tmp_path / "b") == 4
    assert not Store(tmp_path / "b").run(run.id).weights.exists()
    assert not Store(tmp_path / "b").run(run.id).weights.is_symlink()


def test_directories_behind_links_are_not_copied(tmp_path: Path, first: StudyResult) -> None:
    source = copied(first, tmp_path / "a")
    run = source.runs()[0]
    run.weights.parent.rename(tmp_path / "secret")
    run.weights.parent.symlink_to(tmp_path / "secret")
    assert copies(source, tmp_path / "b") == 4
    assert not Store(tmp_path / "b").run(run.id).weights.exists()


def test_a_run_that_another_process_copied_first_is_kept(
    tmp_path: Path, first: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copied(first, tmp_path / "a")
    rename = Path.rename

    def late(staged: Path, target: Path) -> Path:
        shutil.copytree(staged, target)
        return rename(staged, target)

    monkeypatch.setattr(Path, "rename", late)
    assert copies(source, tmp_path / "b") == 0
    assert all(run.finished() for run in Store(tmp_path / "b").runs())
    assert len(list((tmp_path / "b" / "runs").iterdir())) == 4


def test_a_run_that_another_process_trains_meanwhile_is_not_marked(
    tmp_path: Path, first: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Store(tmp_path / "b")

    def slowly(staged: Path) -> None:
        for run in staged.parent.iterdir():
            target.run(run.name).path.mkdir()

    monkeypatch.setattr("headtohead.study.store.copies._sync", slowly)
    assert copies(Store(first.path), target.path, same_plan=False) == 0
    assert History.read(target.path).rows == []


def test_runs_copied_before_an_interruption_are_kept(
    tmp_path: Path, first: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Store(first.path), Store(tmp_path / "b")
    last = source.runs()[-1].id

    def interrupted(run: RunDirectory) -> None:
        if run.id == last:
            raise KeyboardInterrupt
        check_run(run)

    monkeypatch.setattr("headtohead.study.store.copies.check_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copies(source, target.path, same_plan=False)
    kept = [run.id for run in source.runs()[:-1]]
    assert [path.name for path in sorted((target.path / "runs").iterdir())] == kept
    assert list(History.read(target.path).origins()) == kept


def test_copying_ends_at_the_time_limit_after_one_run(tmp_path: Path, first: StudyResult) -> None:
    source, store = Store(first.path), Store(tmp_path / "b")
    store.make()
    wanted = [Wanted(run.id) for run in source.runs()]
    assert len(copy_finished_runs(store, [Source(source)], wanted, stop=Stop(deadline=0.0))) == 1


def test_a_study_with_a_damaged_history_does_not_stop_another(tmp_path: Path, first: StudyResult) -> None:
    damaged, store = copied(first, tmp_path / "a"), Store(tmp_path / "b")
    (damaged.path / "history.jsonl").write_bytes(b" " * (MAX_BYTES + 1))
    store.make()
    wanted, notes = [Wanted(run.id) for run in damaged.runs()], list[str]()
    sources = [Source(damaged, same_plan=True), Source(Store(first.path))]
    assert len(copy_finished_runs(store, sources, wanted, note=notes.append)) == 4
    (note,) = notes
    assert note.startswith(f"no runs of {damaged.path} are copied: ")


def test_verdicts_say_that_runs_were_copied(story: Path, tmp_path: Path, first: StudyResult) -> None:
    again = run(story, tmp_path / "b", "standard", "gated", reuse=first.path)
    assert again.summary.done == 0
    for label in ("gated", "standard"):
        assert f"2 runs of {label} copied from another study" in " ".join(again.sentences())
    source = copied(first, tmp_path / "a")
    for same_plan, recorded in ((False, 4), (True, 0)):
        target = tmp_path / f"c{recorded}"
        copies(source, target, same_plan=same_plan)
        assert len(History.read(target).origins()) == recorded


def test_a_run_that_was_a_trial_of_the_tuning_too_is_marked_as_copied(story: Path, tmp_path: Path) -> None:
    tuned = {"tune": {"lr": [1e-3, 2e-3, 4e-3], "tokens": 1024}}
    source = run(story, tmp_path / "a", "standard", "gated", **tuned)
    again = run(story, tmp_path / "b", "standard", "gated", reuse=source.path, **tuned)
    assert again.summary.done == 0
    assert "2 runs of gated copied from another study" in " ".join(again.sentences())


def test_a_verdict_without_copied_runs_does_not_say_that_runs_were_copied(
    story: Path, tmp_path: Path, first: StudyResult
) -> None:
    again = run(story, tmp_path / "b", "standard", "gated", "sink", seeds=[1, 3], reuse=first.path)
    gated, sink = again.verdicts
    assert gated.marks_about == {label: [COPIED.format(label)] for label in ("gated", "standard")}
    assert sink.marks == [COPIED.format("standard")]


COPIED = "1 run of {} copied from another study, whose results were known before: first0"


def test_copied_weights_are_kept_on_request_only(story: Path, tmp_path: Path, first: StudyResult) -> None:
    again = run(story, tmp_path / "b", "standard", "gated", reuse=first.path, keep_weights=False)
    assert again.summary.done == 0
    assert not list(again.path.rglob("*.safetensors"))
    probed = run(
        story,
        tmp_path / "c",
        "standard",
        "gated",
        probes=("positions",),
        reuse=first.path,
        keep_weights=False,
    )
    assert probed.summary.left == 0
    assert all(folder.probe("positions") is not None for folder in Store(probed.path).runs())


def test_trials_that_are_runs_of_the_study_keep_their_weights_for_its_probes(
    story: Path, tmp_path: Path
) -> None:
    tune = {"lr": [1e-3, 2e-3, 4e-3], "seeds": 2}
    found = run(story, tmp_path, "standard", probes=("positions",), tune=tune, keep_weights=False)
    store = Store(tmp_path)
    assert len(store.runs()) > len(found.manifest.entries) == 2
    assert all(store.run(entry.run).probe("positions") is not None for entry in found.manifest.entries)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_trials_are_copied_without_the_probes_of_the_study(story: Path, tmp_path: Path) -> None:
    tune = {"lr": [1e-3, 2e-3, 4e-3], "seeds": 2}
    how = {"probes": ("positions",), "tune": tune, "keep_weights": False}
    first = run(story, tmp_path / "a", "standard", **how)
    again = run(story, tmp_path / "b", "standard", reuse=first.path, **how)
    assert again.summary.done == 0
    assert History.read(again.path).origins().keys() == {folder.id for folder in Store(first.path).runs()}
    for folder in (Store(first.path).run(entry.run) for entry in first.manifest.entries):
        shutil.rmtree(folder.path / "probes")
    third = run(story, tmp_path / "c", "standard", reuse=first.path, **how)
    assert third.summary.done == 2, "the runs of the study, for their probes"
    store = Store(third.path)
    assert all(store.run(entry.run).probe("positions") is not None for entry in third.manifest.entries)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_copied_trunks_need_no_probes_and_keep_no_weights(story: Path, tmp_path: Path) -> None:
    how = {"probes": ("positions",), "branches": [1280, 2560], "keep_weights": False}
    first = run(story, tmp_path / "a", "standard", **how)
    again = run(story, tmp_path / "b", "standard", reuse=first.path, **how)
    assert len(History.read(again.path).origins()) == len(Store(first.path).runs()) == 6
    assert not list(tmp_path.rglob("*.safetensors"))


def test_weights_that_were_kept_on_purpose_are_never_deleted(story: Path, tmp_path: Path) -> None:
    tune = {"lr": [1e-3, 2e-3, 4e-3], "seeds": 2}
    run(story, tmp_path, "standard", tune=tune)
    kept = list(tmp_path.rglob("*.safetensors"))
    found = run(story, tmp_path, "standard", tune=tune, probes=("positions",), keep_weights=False)
    store = Store(tmp_path)
    assert all(store.run(entry.run).probe("positions") is not None for entry in found.manifest.entries)
    assert list(tmp_path.rglob("*.safetensors")) == kept != []


def test_weights_that_a_killed_process_left_for_probes_are_deleted(story: Path, tmp_path: Path) -> None:
    how = {"probes": ("positions",), "keep_weights": False}
    run(story, tmp_path, "standard", "gated", **how)
    for folder in Store(tmp_path).runs():
        folder.keep_weights(b"weights")
        folder.keep_weights_until_probed()
    run(story, tmp_path, "standard", **how)
    assert not list(tmp_path.rglob("final.*"))


def test_a_study_that_was_partly_copied_by_an_earlier_start_says_nothing(
    story: Path, tmp_path: Path, first: StudyResult, capsys: pytest.CaptureFixture[str]
) -> None:
    run(story, tmp_path / "b", "standard", seeds=[1], reuse=first.path)
    run(story, tmp_path / "b", "standard", "sink", seeds=[1], reuse=first.path, quiet=False)
    assert "is a run of this study" not in capsys.readouterr().out


def test_a_study_without_matching_runs_says_so(
    story: Path, tmp_path: Path, first: StudyResult, capsys: pytest.CaptureFixture[str]
) -> None:
    run(story, tmp_path / "b", "standard", "gated", seeds=[7, 8], reuse=first.path, quiet=False)
    assert f"no finished run of {first.path} is a run of this study" in capsys.readouterr().out


def test_runs_are_marked_before_they_are_copied(
    tmp_path: Path, first: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(staged: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(UserError, match="No space left on device"):
        copies(Store(first.path), tmp_path / "b", same_plan=False)
    assert list(History.read(tmp_path / "b").origins()) == [Store(first.path).runs()[0].id]
    assert list((tmp_path / "b" / "runs").iterdir()) == []


def test_times_of_another_study_are_not_copied(tmp_path: Path, first: StudyResult) -> None:
    source = Store(first.path)
    for same_plan in (False, True):
        target = tmp_path / f"b{same_plan}"
        copies(source, target, same_plan=same_plan)
        for folder in Store(target).runs():
            cost, before = folder.costs(), source.run(folder.id).costs()
            assert cost.metrics_sha256 == before.metrics_sha256
            assert before.tokens_per_second
            assert cost.tokens_per_second == (before.tokens_per_second if same_plan else None)


@pytest.mark.parametrize("reuse", [5, None, [None]])
def test_reuse_takes_directories(story: Path, tmp_path: Path, reuse: object) -> None:
    with pytest.raises(UserError, match="reuse takes a path or a list of paths"):
        run(story, tmp_path / "b", "standard", "gated", reuse=reuse)


@pytest.mark.parametrize("reuse", ["", [""], "a\0b", "a\udcff"])
def test_a_name_that_no_directory_has_is_rejected(story: Path, tmp_path: Path, reuse: object) -> None:
    with pytest.raises(UserError, match=r"^reuse"):
        run(story, tmp_path / "b", "standard", "gated", reuse=reuse)


def test_a_directory_without_runs_is_named(story: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reuse: .*nowhere is not the directory of a study"):
        run(story, tmp_path / "b", "standard", "gated", reuse=[tmp_path / "nowhere"])
    assert not (tmp_path / "b").exists()
