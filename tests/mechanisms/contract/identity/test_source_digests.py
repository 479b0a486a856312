"""A user's file is identified by its text and that of the user's modules that it imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headtohead.common.files import digest
from headtohead.mechanisms.contract.identity.source_digests import program_digest, source_digests

FILES = {
    "mine.py": "import math\nimport torch.nn\nimport headtohead as h2h\nfrom helpers_of_mine.inner import f\n",
    "helpers_of_mine/__init__.py": "",
    "helpers_of_mine/inner.py": "from . import deep\nimport plain_of_mine\n\ndef f():\n    return 1\n",
    "helpers_of_mine/deep.py": "VALUE = 1\n",
    "helpers_of_mine/other.py": "VALUE = 1\n",
    "plain_of_mine.py": "import mine\nVALUE = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, a package and a module that it imports, which is not in sys.path."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["mine.py", "helpers_of_mine/inner.py", "helpers_of_mine/deep.py", "plain_of_mine.py"]
)
def test_an_edit_of_an_imported_module_is_an_edit_of_the_file(folder: Path, name: str) -> None:
    source, program = source_digests(str(folder / "mine.py"))
    (folder / name).write_text(f"{FILES[name]}# a comment\n")
    commented = source_digests(str(folder / "mine.py"))
    assert commented[0] != source
    assert commented[1] == program
    (folder / name).write_text(f"{FILES[name]}MORE = 1\n")
    assert source_digests(str(folder / "mine.py"))[1] != program


def test_other_modules_are_no_part_of_it(folder: Path) -> None:
    before = source_digests(str(folder / "mine.py"))
    (folder / "helpers_of_mine" / "other.py").write_text("VALUE = 2\n")
    assert source_digests(str(folder / "mine.py")) == before


def test_it_is_equal_in_every_place_and_executes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = source_digests(str(folder / "mine.py"))
    monkeypatch.syspath_prepend(folder)  # as after the file has extended sys.path
    assert source_digests(str(folder / "mine.py")) == before
    assert not {"mine", "helpers_of_mine", "plain_of_mine"} & sys.modules.keys()


@pytest.mark.parametrize(
    "text", ["import torch.nn as nn\nfrom numpy import array\nimport os.path\n", "x = ("]
)
def test_a_file_alone_is_identified_by_its_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    content = text.encode()
    assert source_digests(str(tmp_path / "mine.py")) == (digest(content), program_digest(content))
