import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headtohead.common.errors import UserError
from headtohead.common.files import (
    canonical_json,
    digest,
    digest_file,
    open_to_append,
    read_json,
    write_atomic,
    write_json,
    write_output,
)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space") as found:
        write_atomic(path, "new")
    assert found.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_undefined_numbers_are_null(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"damaged file .*x\.json"):
        read_json(tmp_path / "x.json")
    with pytest.raises(UserError, match="no such file"):
        read_json(tmp_path / "y.json")


def test_the_canonical_text_does_not_depend_on_order() -> None:
    assert canonical_json({"b": 1, "a": [1, 2]}) == canonical_json({"a": [1, 2], "b": 1})


def test_digests_of_text_and_file_agree(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert digest_file(tmp_path / "x") == digest("abc")


def test_only_files_and_links_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match=name):
            write_atomic(tmp_path / name, "new")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "old").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "old", "pipe"]


def test_output_is_written_through_pipes_devices_and_links(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    write_output(tmp_path / "pipe", "through")
    reader.join(60)
    assert read == ["through"]
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as found:
        write_output(tmp_path / "full", "lost")
    assert found.value.filename == str(tmp_path / "full")
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    write_output(tmp_path / "link", "new")
    assert (tmp_path / "old").read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(UserError, match="it is a directory"):
        write_output(tmp_path, "new")


def test_output_to_a_redirected_standard_output_keeps_the_order(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from headtohead.common.files import write_output; "
        "print('before'); write_output(Path('/dev/stdout'), 'page\\n'); print('after')"
    )
    with open(tmp_path / "out", "wb") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, check=True, timeout=60)
    assert (tmp_path / "out").read_text().split() == ["before", "page", "after"]


def test_appending_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with open_to_append(tmp_path, "logs", "file") as stream:
            stream.write(line)
    assert (tmp_path / "logs/file").read_bytes() == b"one\ntwo\n"
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "logs/link").symlink_to(tmp_path / "mine")
    (tmp_path / "linked").symlink_to(tmp_path / "logs")
    os.mkfifo(tmp_path / "logs/pipe")
    for names in (("logs", "link"), ("linked", "file"), ("linked", "new"), ("logs", "pipe")):
        with pytest.raises(OSError, match=names[0]):
            open_to_append(tmp_path, *names)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "logs/new").exists()
