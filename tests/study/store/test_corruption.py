"""Every file of a study x every kind of damage x every command that reads it: each ends in time, without a traceback."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headtohead.cli.main import main
from headtohead.common.files import digest
from headtohead.study.store.run_store import Store
from tests.fuzz import JSON, fuzz, member_paths, mutated

pytest.importorskip("altair")

LIMIT = 60
"""Seconds after which a command counts as hanging."""
MEMORY, FILE_SIZE = 2**30, 2**28
"""Bytes that a command may take in addition, and write to one file: /dev/zero has no end."""


class Hang(BaseException):
    """A command that does not end. No `except Exception` catches it."""


# Kinds of damage: each takes the path of a file.


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def last_value(path: Path) -> Any:
    """Return a JSON document, or the last row of a JSONL file."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text.splitlines()[-1] if path.suffix == ".jsonl" else text)


def rewrite(path: Path, value: Any) -> None:
    """Replace a JSON document, or the last row of a JSONL file; a checksum is made to match."""
    if path.suffix == ".jsonl":
        rows = path.read_text(encoding="utf-8").splitlines()[:-1]
        path.write_text("\n".join([*rows, json.dumps(value)]) + "\n")
    elif isinstance(value, dict) and "checksum" in value:
        lines = [
            f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items() if key != "checksum"
        ]
        body = "{\n" + ",\n".join(lines)
        path.write_text(f'{body},\n "checksum": "{digest(body)[:16]}"\n}}\n')
    else:
        path.write_text(json.dumps(value))


def change_member(path: Path, change: Callable[[Any], Any]) -> None:
    """Replace one member, for which `change` does not return None."""
    value = last_value(path)
    places = []
    for *parents, key in member_paths(value):
        holder = value
        for parent in parents:
            holder = holder[parent]
        if key not in ("schema", "checksum") and change(holder[key]) is not None:
            places.append((holder, key))
    holder, key = random.Random(path.name).choice(places)
    holder[key] = change(holder[key])
    rewrite(path, value)


def another_type(value: Any) -> Any:
    return [{"x": 1}] if isinstance(value, str | int | float | dict) else "text"


def huge(value: Any) -> Any:
    return 10**400 if isinstance(value, int | float) else None


def not_a_number(value: Any) -> Any:
    return float("nan") if isinstance(value, int | float) else None


def duplicate_key(path: Path) -> None:
    """Repeat the first key of the first object, or of the last row, after its value; the last value counts."""
    text = path.read_text(encoding="utf-8")
    start = text.rstrip().rfind("\n") + 1 if path.suffix == ".jsonl" else 0
    key = re.compile(r'{\s*("[^"]+"):\s*').search(text, start)
    assert key is not None
    _, end = json.JSONDecoder().raw_decode(text, key.end())
    path.write_text(f"{text[:end]}, {key[1]}: null{text[end:]}")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def endless_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "bit-flip": flip_bit,
    "wrong-type": lambda path: change_member(path, another_type),
    "huge-number": lambda path: change_member(path, huge),
    "nan": lambda path: change_member(path, not_a_number),
    "duplicate-key": duplicate_key,
    "directory": directory,
    "dangling-link": dangling_link,
    "endless-link": endless_link,
    "fifo": fifo,
}
FILES = (
    *("study.json", "study.lock.json", "history.jsonl", "verdicts.json", "claims.json"),
    *("RUN/spec.json", "RUN/result.json", "RUN/metrics.jsonl", "RUN/environment.json", "RUN/cost.json"),
    "RUN/probes/positions.json",
)
STUDY = "--arms standard diagonal --corpus file:TEXT --tokens 512 --batch 256 --seeds 2 --lr 5e-3 --probes positions"
COMMANDS = {
    "report": "report DIR",
    "runs": "runs DIR",
    "doctor": "doctor DIR --dry-run",
    "race": f"race {STUDY} --workers 1 --quiet --out DIR",
    "forecast": f"forecast {STUDY} --workers 1 --out DIR",
    "export": "runs DIR --export DIR/../x.tar.gz",
    "evaluate": "evaluate DIR/RUN --corpus file:TEXT --split valid",
    "watch": "watch DIR --port 0",
}

# In `make test`; the others are slow together.
SAMPLE = {
    ("study.json", "truncated", "report"),
    ("study.json", "wrong-type", "watch"),
    ("study.json", "fifo", "report"),
    ("study.lock.json", "nan", "forecast"),
    ("history.jsonl", "huge-number", "report"),
    ("verdicts.json", "dangling-link", "report"),
    ("RUN/spec.json", "duplicate-key", "export"),
    ("RUN/result.json", "bit-flip", "race"),
    ("RUN/spec.json", "endless-link", "report"),
    ("RUN/metrics.jsonl", "wrong-type", "watch"),
    ("RUN/cost.json", "directory", "doctor"),
    ("RUN/environment.json", "huge-number", "evaluate"),
    ("RUN/probes/positions.json", "nan", "report"),
}


def cases() -> Iterator[Any]:
    for case in itertools.product(FILES, DAMAGE, COMMANDS):
        marks = [] if case in SAMPLE else [pytest.mark.slow]
        if case[2] == "report" and case not in SAMPLE:
            marks.append(pytest.mark.page)
        yield pytest.param(*case, marks=marks, id=" ".join(case))


@pytest.fixture(scope="module")
def whole(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished study with a probe."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    assert exit_code(COMMANDS["race"], folder, story) == 0
    (folder / "claims.json").write_text('{"schema": 1, "scale": "smoke", "claims": [{"id": "a", "p": 0.5}]}')
    return folder


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """A copy of it; the weights are links to one file."""
    shutil.copytree(whole, tmp_path / "study", copy_function=_copied)
    return tmp_path / "study"


def _copied(source: str, target: str) -> None:
    (os.link if source.endswith(".safetensors") else shutil.copy)(source, target)


def first_run(folder: Path) -> str:
    return Store(folder).runs()[0].id


@contextmanager
def limits() -> Iterator[None]:
    """Raise Hang after LIMIT seconds, and MemoryError or OSError where a command reads or copies without end."""

    def hang(number: int, frame: Any) -> None:
        raise Hang(f"the command did not end within {LIMIT} s")

    size = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    bounds = {resource.RLIMIT_DATA: size + MEMORY, resource.RLIMIT_FSIZE: FILE_SIZE}
    old = {kind: resource.getrlimit(kind) for kind in bounds}
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT)
    try:
        for kind, bound in bounds.items():
            resource.setrlimit(kind, (bound, old[kind][1]))
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for kind, bound in old.items():
            resource.setrlimit(kind, bound)


def exit_code(words: str, folder: Path, story: Path, run: str = "") -> int:
    """Run a command on a study in this process; return its exit code."""
    filled = [
        word.replace("DIR", str(folder)).replace("TEXT", str(story)).replace("RUN", run)
        for word in words.split()
    ]
    with pytest.raises(SystemExit) as ended:
        main(filled)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def check_ends(
    command: str,
    folder: Path,
    story: Path,
    run: str,
    patch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Run a command on a study; it ends with code 0, 1 or 2 and without a traceback."""
    patch.setattr(ThreadingHTTPServer, "serve_forever", lambda server: None)
    with limits():
        code = exit_code(COMMANDS[command], folder, story, run)
    found = capfd.readouterr()
    assert code in (0, 1, 2)
    assert "Traceback" not in found.out + found.err
    if code == 2:
        assert found.err.splitlines()[-1].startswith("h2h: ")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited as on Linux")
@pytest.mark.parametrize(("file", "damage", "command"), [*cases()])
def test_a_damaged_file_ends_no_command_with_a_traceback(
    file: str,
    damage: str,
    command: str,
    damaged: Path,
    story: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = first_run(damaged)
    DAMAGE[damage](damaged / file.replace("RUN", f"runs/{run}"))
    check_ends(command, damaged, story, run, monkeypatch, capfd)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited as on Linux")
@given(data=st.data())
@fuzz(5)
def test_no_values_in_a_file_end_a_command_with_a_traceback(
    data: st.DataObject, whole: Path, story: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = data.draw(st.sampled_from(FILES))
    command = data.draw(st.sampled_from([*COMMANDS]))
    with TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        folder = Path(scratch) / "study"
        shutil.copytree(whole, folder, copy_function=_copied)
        run = first_run(folder)
        path = folder / file.replace("RUN", f"runs/{run}")
        rewrite(path, data.draw(mutated(last_value(path)) | JSON))
        check_ends(command, folder, story, run, patch, capfd)


def test_every_case_of_the_sample_exists() -> None:
    assert set(itertools.product(FILES, DAMAGE, COMMANDS)) >= SAMPLE
