"""The wheel and the source distribution, used outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import headtohead

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def call(*words: str | Path, cwd: Path, **environment: str) -> str:
    """Run Python with these arguments and return its output; fail with its messages."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a build reads, so that it writes nothing into the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "headtohead", folder / "headtohead", ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """Return the wheel, built without a network."""
    call("-c", "from setuptools import build_meta; build_meta.build_wheel('dist')", cwd=source)
    (found,) = (source / "dist").glob("*.whl")
    return found


def data_files() -> set[str]:
    """Return the files of the package that are not Python."""
    paths = (ROOT / "headtohead").rglob("*")
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "headtohead").rglob("*.py")}
    assert names >= modules | data_files()
    assert not [name for name in names if not name.startswith(("headtohead/", "headtohead-"))]


def test_the_source_distribution_has_every_file_of_the_package(source: Path) -> None:
    call("-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", cwd=source)
    (found,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= data_files() | {"pyproject.toml", "README.md", "LICENSE"}


COMMANDS = """
import sys, headtohead
from pathlib import Path
from headtohead.cli.main import main
assert Path(headtohead.__file__).is_relative_to(sys.argv[1]), headtohead.__file__
small = "--tokens 4096 --seeds 2 --arms standard sharing:tie=kv --workers 1 --out races/quick"
for words in ("list", f"race quick {small}", "report races/quick --table latex"):
    try:
        main(words.split())
    except SystemExit as ended:
        assert not ended.code, words
"""


@pytest.mark.slow
def test_the_wheel_races_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    given = {"PYTHONPATH": str(site), "H2H_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    printed = call("-c", COMMANDS, site, cwd=tmp_path, **given)
    assert "sharing" in printed
    assert "\\toprule" in printed
    assert (tmp_path / "races" / "quick" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_wheel_reproduces_a_paper_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    given = {"PYTHONPATH": str(site), "H2H_CACHE": str(tmp_path / "cache")}
    call("-m", "headtohead", "reproduce", "deconstructed", "--scale", "smoke", cwd=tmp_path, **given)
    assert (tmp_path / "races" / "deconstructed-smoke" / "claims.json").is_file()


def test_the_files_about_the_package_agree_with_it() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {headtohead.__version__}\n" in citation
    assert "license: Apache-2.0\n" in citation
    assert f"## {headtohead.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    tested = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for line in PROJECT["classifiers"]:
        version = line.removeprefix("Programming Language :: Python :: ")
        assert version == line or f'"{version}"' in tested, version
