"""h2h doctor finds every kind of damage, repairs what is safe, and changes nothing on a dry run."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headtohead import Study, examine_study
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.common.schema import write_document
from headtohead.study.store.lease import Owner
from headtohead.study.store.run_store import RunDirectory, Store
from tests.study.run.test_faults import foreign_lock


def study(story: Path) -> Study:
    return Study(["standard", "diagonal"], corpus=f"file:{story}", tokens=2560, batch=256, seeds=1, lr=5e-3)


@pytest.fixture(scope="module")
def whole(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor") / "study"
    study(story).run(folder, workers=1, quiet=True)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "study"
    shutil.copytree(whole, folder)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def old(path: Path) -> None:
    before = time.time() - 10_000
    os.utime(path, (before, before))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def half_a_line(run: RunDirectory) -> None:
    with open(run.path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 12, "to')


def leftover(run: RunDirectory) -> None:
    path = run.path / ".result.json.4711.0a1b2c3d.tmp"
    path.write_text("{")
    old(path)


def dead_lock(run: RunDirectory) -> None:
    lock = foreign_lock(run.path)
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    text = lock.read_text().replace("elsewhere", os.uname().nodename)
    lock.write_text(text.replace(str(os.getpid()), str(process)))


def unfinished(run: RunDirectory) -> Path:
    """Turn a finished run into an unfinished one with two checkpoints."""
    import torch

    from headtohead.training.checkpoint import Checkpoint, save_checkpoint

    (run.path / "result.json").unlink()
    for step in (1, 2):
        last = save_checkpoint(
            run.checkpoints, Checkpoint(step, {"model/x": torch.zeros(3)}, {"seconds": 1.0})
        )
    return last


DAMAGE: dict[str, tuple[Callable[[RunDirectory], object], str, bool]] = {
    "result cut": (lambda run: cut(run.path / "result.json"), "result.json", True),
    "result flipped": (lambda run: flip(run.path / "result.json"), "result.json", True),
    "spec flipped": (
        lambda run: (run.path / "spec.json").write_text(
            (run.path / "spec.json").read_text().replace('"context": 128', '"context": 64')
        ),
        "spec.json",
        True,
    ),
    "spec missing": (lambda run: (run.path / "spec.json").unlink(), "spec.json", False),
    "cost cut": (lambda run: cut(run.path / "cost.json"), "cost.json", True),
    "environment cut": (lambda run: cut(run.path / "environment.json"), "environment.json", True),
    "weights flipped": (lambda run: flip(run.weights), "final.safetensors", True),
    "half a line": (half_a_line, "metrics.jsonl", True),
    "leftover": (leftover, ".tmp", True),
    "dead lock": (dead_lock, "lock", True),
    "checkpoint flipped": (
        lambda run: flip(unfinished(run) / "tensors.safetensors"),
        "step-0000000002",
        True,
    ),
    "checkpoint state flipped": (
        lambda run: flip(unfinished(run) / "state.json"),
        "step-0000000002",
        True,
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_repaired_and_the_study_continues(
    copy: Path, story: Path, whole: Path, kind: str
) -> None:
    run = Store(copy).runs()[0]
    harm, name, repairable = DAMAGE[kind]
    harm(run)
    before = tree(copy)
    findings = examine_study(copy, quiet=True)
    assert tree(copy) == before, "an examination changes nothing"
    assert any(name in finding.path.name for finding in findings), findings
    repaired = examine_study(copy, repair=True, quiet=True)
    assert any(finding.repaired for finding in repaired) == repairable
    again = [finding for finding in examine_study(copy, quiet=True) if finding.repair]
    assert not again, "a repair is permanent"
    kept = set(tree(copy).values())
    lost = [name for name, content in before.items() if content not in kept]
    assert all(name.endswith((".tmp", "/lock", "metrics.jsonl")) for name in lost), "no content is lost"
    study(story).run(copy, workers=1, quiet=True)
    for ours, theirs in zip(Store(copy).runs(), Store(whole).runs(), strict=True):
        assert ours.result() == theirs.result()


def test_a_damaged_probe_is_set_aside(copy: Path) -> None:
    run = Store(copy).runs()[0]
    run.keep_probe("skip", {"none": "nothing to skip"})
    assert examine_study(copy, quiet=True) == []
    path = run.path / "probes" / "skip.json"
    flip(path)
    (finding,) = examine_study(copy, repair=True, quiet=True)
    assert finding.path == path
    assert finding.repaired
    assert run.probe("skip") is None
    assert examine_study(copy, quiet=True) == []


def test_an_undamaged_study_has_no_findings(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [str(finding) for finding in examine_study(copy, quiet=True)] == []
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(copy)])
    assert ended.value.code == 0
    assert "2 runs checked: 0 findings" in capsys.readouterr().out


def test_the_command_lists_every_repair_and_a_dry_run_makes_none(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Store(copy).runs()[0]
    cut(run.path / "result.json")
    before = tree(copy)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(copy), "--dry-run"])
    assert ended.value.code == 1
    assert tree(copy) == before
    assert f"can be repaired: {run.path / 'result.json'}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(copy)])
    assert ended.value.code == 0
    assert f"repaired: {run.path / 'result.json'}" in capsys.readouterr().out
    assert (run.path / "result.json.damaged").is_file()


def test_damaged_study_files_are_named_and_restored(copy: Path, story: Path) -> None:
    (copy / "study.json").write_text("{")
    (copy / "study.lock.json").write_text('{"plans": 3}')
    (copy / "runs" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"damaged file .*study\.lock\.json.*h2h doctor"):
        study(story).run(copy, workers=1, quiet=True)
    findings = {finding.path.name: finding for finding in examine_study(copy, repair=True, quiet=True)}
    assert findings["study.json"].repaired
    assert findings["study.lock.json"].repaired
    assert not findings["notes.txt"].repaired
    assert (copy / "runs" / "notes.txt").read_text() == "mine"
    done = study(story).run(copy, workers=1, quiet=True)
    assert done.summary.done == 0
    assert done.verdicts[0].added_seeds == [1], "the plan is no longer known"


def test_a_lost_lock_is_recovered_from_an_undamaged_study(copy: Path, story: Path) -> None:
    (copy / "study.lock.json").write_text("")
    examine_study(copy, repair=True, quiet=True)
    assert json.loads((copy / "study.lock.json").read_text())["recovered"] == [1]
    assert study(story).run(copy, workers=1, quiet=True).verdicts[0].added_seeds == []


def test_a_lock_of_another_host_is_not_changed(copy: Path) -> None:
    lock = foreign_lock(Store(copy).runs()[0].path)
    assert examine_study(copy, quiet=True) == []
    old(lock)
    findings = examine_study(copy, repair=True, quiet=True)
    assert [finding.repaired for finding in findings] == [False]
    assert lock.is_file()
    assert "elsewhere" in str(findings[0])


def container_lock(run: RunDirectory) -> Path:
    """Create the lock of another container on this host, in which a process has the number of a dead one here."""
    dead_lock(run)
    lock = run.path / "lock"
    text = re.sub(r"(?m)^host=.*$", f"host={os.uname().nodename}?pidns-1234abcd", lock.read_text())
    lock.write_text(text)
    return lock


def test_a_lock_of_another_container_on_this_host_is_not_changed(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Store(copy).runs()[0]
    unfinished(run)
    lock = container_lock(run)
    assert examine_study(copy, repair=True, quiet=True) == []
    assert run.state() == "running"
    with pytest.raises(SystemExit):
        main(["runs", str(copy)])
    assert "running" in capsys.readouterr().out
    old(lock)
    (finding,) = examine_study(copy, repair=True, quiet=True)
    assert not finding.repaired
    assert f"in another container on {os.uname().nodename} has not updated it" in str(finding)
    assert "takes it over" in str(finding)
    assert lock.is_file()


def test_a_lock_that_cannot_be_removed_is_not_reported_as_removed(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = container_lock(Store(copy).runs()[0])
    monkeypatch.setattr(Owner, "dead", True)
    (finding,) = examine_study(copy, repair=True, quiet=True)
    assert str(finding).startswith("not repaired")
    assert "takes it over" in str(finding)
    assert lock.is_file()


def test_little_disk_space_is_a_finding(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(copy)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 * 2**20))
    assert "5 MiB of disk space left" in str(examine_study(copy, quiet=True)[0])


def test_a_missing_study_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        examine_study(tmp_path / "nowhere", quiet=True)


def test_metrics_with_their_checksum_are_not_parsed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(run: RunDirectory, every: int = 1) -> None:
        raise AssertionError(f"parsed {run.id}")

    monkeypatch.setattr(RunDirectory, "logged_rows", parsed)
    assert examine_study(copy, quiet=True) == []


def test_metrics_of_an_older_run_without_a_checksum_are_parsed(copy: Path) -> None:
    run = Store(copy).runs()[0]
    costs = json.loads((run.path / "cost.json").read_text())
    del costs["metrics_sha256"]
    write_document(run.path / "cost.json", costs)
    assert examine_study(copy, quiet=True) == []
    half_a_line(run)
    (finding,) = examine_study(copy, quiet=True)
    assert "rows are truncated" in finding.problem
