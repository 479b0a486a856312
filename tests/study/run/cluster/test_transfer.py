"""What travels between driver and nodes: posts, run files in a safe order, inputs by hash."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headtohead.common.errors import UserError
from headtohead.study.run.cluster import mailbox as mailbox_module
from headtohead.study.run.cluster.mailbox import Mailbox
from headtohead.study.run.cluster.messages import Changes, Instructions, Post, Unit
from headtohead.study.run.cluster.run_files import SentFiles, apply_changes
from headtohead.study.run.cluster.shipping import shipped_file, unpack_inputs
from headtohead.study.run.events import Event
from headtohead.study.store.run_store import RunDirectory


def post(size: int = 0) -> Post:
    unit = Unit("metrics.jsonl", {"": b"x" * size})
    return Post("task", [Event("started", "run")], [Changes("run", [unit], [])])


def test_posts_are_taken_once_and_in_order() -> None:
    box = Mailbox()
    posts = [post(1), post(2)]
    assert all(box.post(one).accepted for one in posts)
    assert box.exchange(Instructions()) == posts
    assert box.exchange(Instructions()) == []


def test_a_full_mailbox_accepts_more_after_the_driver_took_the_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "_MAX_BYTES", 10)
    box = Mailbox()
    assert box.post(post(30)).accepted  # alone it is accepted, however large
    assert not box.post(post(1)).accepted
    assert box.post(Post("other", host="far")).accepted  # news without files always fit
    box.exchange(Instructions())
    assert box.post(post(1)).accepted


def test_instructions_reach_the_tasks() -> None:
    box = Mailbox()
    box.exchange(Instructions(frozenset({"other"}), 5.0, 2.0, {"a": "offer"}))
    reply = box.post(Post("task", wanted=["a", "b"]))
    assert (reply.stop, reply.seconds_left, reply.every, reply.offers) == (False, 5.0, 2.0, {"a": "offer"})
    assert box.post(Post("other")).stop
    box.exchange(Instructions(withdrawn=frozenset({"a"})))
    assert box.post(Post("task", wanted=["a"])).offers == {}


@pytest.fixture
def source(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "source" / "0123456789abcdef")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def target(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "target" / "0123456789abcdef")
    run.path.mkdir(parents=True)
    return run


def checkpoint(run: RunDirectory, step: int) -> Path:
    folder = run.checkpoints / f"step-{step:010d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(str(step))
    (folder / "tensors.safetensors").write_bytes(b"tensors" * step)
    return folder


def copied(sent: SentFiles, target: RunDirectory) -> Changes:
    changes = sent.changes()
    assert changes is not None
    apply_changes(target, changes)
    sent.sent()
    return changes


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {
        path.relative_to(run.path).as_posix(): path.read_bytes()
        for path in sorted(run.path.rglob("*"))
        if path.is_file()
    }


def test_changes_of_a_run_make_the_copy_equal(source: RunDirectory, target: RunDirectory) -> None:
    sent = SentFiles(source)
    assert sent.changes() is None
    (source.path / "metrics.jsonl").write_bytes(b"one\n")
    first = checkpoint(source, 1)
    copied(sent, target)
    assert contents(target) == contents(source)
    (source.path / "metrics.jsonl").write_bytes(b"one\ntwo\n")
    checkpoint(source, 2)
    shutil.rmtree(first)
    changes = copied(sent, target)
    assert changes.present == ["checkpoint/step-0000000002"]
    assert contents(target) == contents(source)
    assert sent.changes() is None


def test_changes_that_were_not_accepted_are_found_again(source: RunDirectory) -> None:
    sent = SentFiles(source)
    (source.path / "cost.json").write_bytes(b"{}")
    assert sent.changes() == sent.changes()
    sent.sent()
    assert sent.changes() is None


def test_the_result_is_written_last_and_the_rows_of_a_checkpoint_before_it(
    source: RunDirectory, target: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = SentFiles(source)
    for name in ("result.json", "metrics.jsonl", "cost.json"):
        (source.path / name).write_bytes(b"{}")
    checkpoint(source, 1)
    changes = sent.changes()
    assert changes is not None
    names = [unit.name for unit in changes.units]
    assert names[0] == "result.json"
    assert names[-1] == "metrics.jsonl"
    written: list[str] = []
    monkeypatch.setattr(
        "headtohead.study.run.cluster.run_files._write", lambda path, unit: written.append(unit.name)
    )
    apply_changes(target, changes)
    assert written == names[::-1]


def test_locks_specs_and_temporary_files_stay_where_they_are(source: RunDirectory) -> None:
    sent = SentFiles(source)
    for name in ("lock", "spec.json", ".metrics.jsonl.1.tmp", "other.txt"):
        (source.path / name).write_bytes(b"{}")
    (source.checkpoints / ".step-0000000001.7.tmp").mkdir(parents=True)
    assert sent.changes() is None


@pytest.mark.parametrize("name", ["../../escape", "spec.json", "checkpoint/../spec.json", "/etc/passwd"])
def test_a_name_that_no_run_has_is_rejected(target: RunDirectory, name: str) -> None:
    with pytest.raises(UserError, match="is not a file of a run"):
        apply_changes(target, Changes(target.id, [Unit(name, {"": b""})], []))
    unit = Unit("checkpoint/step-0000000001", {"../../../escape": b""})
    with pytest.raises(UserError, match="is not a file of a checkpoint"):
        apply_changes(target, Changes(target.id, [unit], []))
    assert contents(target) == {}


def test_the_last_checkpoint_is_deleted_only_with_the_result(
    source: RunDirectory, target: RunDirectory
) -> None:
    sent = SentFiles(source)
    folder = checkpoint(source, 1)
    (source.path / "metrics.jsonl").write_bytes(b"one\n")
    copied(sent, target)
    shutil.rmtree(folder)
    copied(sent, target)
    assert (target.checkpoints / "step-0000000001").is_dir()
    (source.path / "result.json").write_bytes(b"{}")
    copied(sent, target)
    assert contents(target) == contents(source)


def test_checkpoints_deleted_after_the_result_are_deleted_in_the_copy(
    source: RunDirectory, target: RunDirectory
) -> None:
    sent = SentFiles(source)
    folder = checkpoint(source, 1)
    (source.path / "result.json").write_bytes(b"{}")
    copied(sent, target)
    shutil.rmtree(folder)
    copied(sent, target)
    assert contents(target) == contents(source) == {"result.json": b"{}"}


def test_weights_deleted_after_the_last_probe_are_deleted_in_the_copy(
    source: RunDirectory, target: RunDirectory
) -> None:
    sent = SentFiles(source)
    source.keep_weights(b"weights")
    source.keep_weights_until_probed()
    (source.path / "result.json").write_bytes(b"{}")
    changes = copied(sent, target)
    assert {"checkpoint/final.safetensors", "checkpoint/final.sha256"} <= set(changes.present)
    assert target.weights_are_temporary
    assert contents(target) == contents(source)
    source.delete_weights()
    copied(sent, target)
    assert contents(target) == contents(source) == {"result.json": b"{}"}


def test_inputs_are_fetched_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H2H_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("H2H_SHARED", "off")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    files = tuple(shipped_file(f"data/{name}", tmp_path / name) for name in ("a.txt", "b.txt"))
    asked: list[list[str]] = []

    def fetch(wanted: dict[str, Path]) -> None:
        asked.append(list(wanted))
        for file in files:
            if file.sha256 in wanted:
                wanted[file.sha256].write_bytes(Path(file.path).read_bytes())

    folder = unpack_inputs(files, fetch)
    assert (folder / "data/b.txt").read_text() == "b.txt"
    assert unpack_inputs(files, fetch) == folder
    assert unpack_inputs(files[:1], fetch) != folder
    assert asked == [[file.sha256 for file in files]]
    changed = shipped_file("data/a.txt", tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("other")
    changed = type(changed)(changed.place, changed.path, "0" * 64, changed.size)

    def wrong(wanted: dict[str, Path]) -> None:
        for path in wanted.values():
            path.write_text("other")

    with pytest.raises(UserError, match="changed on the driver"):
        unpack_inputs((changed,), wrong)


def test_a_node_that_has_the_driver_s_files_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H2H_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("a")
    (file,) = (shipped_file("mechanisms/a.txt", tmp_path / "a.txt"),)
    folder = unpack_inputs((file,), lambda wanted: pytest.fail("nothing is lacking"))
    (tmp_path / "a.txt").write_text("changed in place")
    assert (folder / "mechanisms/a.txt").read_text() == "a"
