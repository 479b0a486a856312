"""The files that several processes write are changed by one process at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from headtohead import Study, examine_study
from headtohead.common import schema
from headtohead.common.errors import UserError
from headtohead.common.files import write_atomic
from headtohead.study.plan.freeze import planned_seeds
from headtohead.study.store import shared
from headtohead.study.store.frozen import NAME, changing_lock, read_lock
from headtohead.study.store.history import History
from headtohead.study.store.lease import owner_of
from headtohead.study.store.shared import exclusive
from tests import processes


def test_two_processes_that_add_seeds_lose_none(tmp_path: Path) -> None:
    plan: Any = processes.empty_plan(0)
    planned_seeds(tmp_path, plan, started=False)
    parts = [range(1, 16), range(16, 31)]
    children = [processes.start(processes.plan_seeds, tmp_path, list(part)) for part in parts]
    (tmp_path / "go").touch()
    assert [processes.ended(child) for child in children] == [0, 0]
    (entry,) = read_lock(tmp_path).plans.values()
    assert (entry.seeds, sorted(entry.added)) == ([0], list(range(1, 31)))
    assert not (tmp_path / shared.NAME).exists()


def test_every_write_of_a_shared_file_holds_the_lock(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def held(path: Path) -> None:
        owner = owner_of(tmp_path / shared.NAME)
        assert owner is not None, path
        assert owner.pid == os.getpid()
        written.append(path.name)

    def write(path: Path, content: bytes | str) -> None:
        if path.parent == tmp_path:
            held(path)
        write_atomic(path, content)

    append = History._append

    def appended(history: History, row: dict[str, Any]) -> None:
        held(history.path)
        append(history, row)

    monkeypatch.setattr(schema, "write_atomic", write)
    monkeypatch.setattr(History, "_append", appended)
    settings = {"tune": {"lr": [1e-4, 1e-2, 1.0], "tokens": 256}, "length": "time", "seeds": 2}
    Study(["standard", "diagonal"], corpus=f"file:{story}", tokens=512, batch=256, **settings).run(
        tmp_path, workers=1, quiet=True, keep_weights=False
    )
    assert {name: written.count(name) for name in written} == {
        NAME: 3,  # tuning, seconds per step, seeds
        "history.jsonl": 2,
        "study.json": 1,
    }
    (tmp_path / NAME).write_text("{")
    examine_study(tmp_path, repair=True, quiet=True)
    assert written.count(NAME) == 4


def test_a_change_that_fails_writes_nothing_and_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyError), changing_lock(tmp_path) as lock:
        lock.plans["x"] = lock.plans["missing"]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_may_be_nested_and_excludes_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_PATIENCE_SECONDS", 0.1)
    failed = []

    def other() -> None:
        try:
            with exclusive(tmp_path):
                pass
        except UserError as error:
            failed.append(str(error))

    with exclusive(tmp_path), exclusive(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(processes.PATIENCE)
    assert [f"held by process {os.getpid()}" in message for message in failed] == [True]
    other()
    assert len(failed) == 1


def test_the_lock_of_a_dead_process_is_taken_over_or_removed(tmp_path: Path) -> None:
    lock = tmp_path / shared.NAME
    for repair in (False, True):
        child = os.fork()
        if child == 0:
            with exclusive(tmp_path):
                os._exit(0)
        os.waitpid(child, 0)
        assert lock.is_file()
        if repair:
            (finding,) = examine_study(tmp_path, repair=True, quiet=True)
            assert (finding.path, finding.repaired) == (lock, True)
        else:
            with exclusive(tmp_path):
                pass
        assert not lock.exists()
