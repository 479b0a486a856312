import json
import math
from pathlib import Path

import pytest

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json, digest, digest_file, read_json, write_atomic, write_json


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
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
