"""Runs with older NUMERICS stay readable and are judged separately; no comparison mixes two NUMERICS values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headtohead as h2h
from headtohead import Study, open_study
from headtohead.cli.main import main
from headtohead.common.schema import write_document
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.numerics import NUMERICS
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.manifest import manifest_from
from headtohead.study.store.run_store import Store

MARK = "computed with numerics 1"


def study(story: Path) -> Study:
    return Study(["standard", "diagonal"], corpus=f"file:{story}", tokens=1024, batch=256, seeds=2)


@pytest.fixture(scope="module")
def old(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study written by a version with NUMERICS 1."""
    folder = tmp_path_factory.mktemp("old")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("store.run_spec", "plan.planner", "store.manifest"):
            patch.setattr(f"headtohead.study.{module}.NUMERICS", 1)
        study(story).run(folder, workers=1, quiet=True)
    path = folder / "study.json"
    record = json.loads(path.read_text())
    for row in (*record["outline"]["entries"], *record["outline"]["solved"]):
        assert row["contest"].pop("numerics") == "1"
    write_document(path, record)
    return folder


@pytest.fixture(scope="module")
def new(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    study(story).run(folder, workers=1, quiet=True)
    return folder


def ids(folder: Path) -> set[str]:
    return {run.id for run in Store(folder).runs()}


@pytest.mark.page
def test_an_old_study_is_judged_separately_and_marked(old: Path, new: Path) -> None:
    found = open_study(old)
    (row,) = found.verdicts
    assert (row.n, row.numerics) == (2, "1")
    assert MARK in row.notes
    found.write(quiet=True)
    assert MARK in (old / "report.html").read_text()
    (other,) = open_study(new).verdicts
    assert (other.n, other.numerics) == (2, str(NUMERICS))
    assert MARK not in other.notes
    assert MARK not in (new / "report.html").read_text()


def test_a_merged_study_never_pairs_two_numerics(old: Path, new: Path) -> None:
    """The old baseline with the new arm, and both complete: a contest has runs of one NUMERICS value only."""
    manifests = [json.loads((folder / "study.json").read_text())["outline"] for folder in (old, new)]
    results = {run.id: run.result() for folder in (old, new) for run in Store(folder).runs()}
    both = manifests[1] | {"entries": manifests[0]["entries"] + manifests[1]["entries"]}
    rows = study_verdicts(manifest_from(both), results)
    assert [(row.numerics, row.n, MARK in row.notes) for row in rows] == [
        ("1", 2, True),
        (str(NUMERICS), 2, False),
    ]
    split = [
        row
        for label, manifest in zip(("standard", "diagonal"), manifests, strict=True)
        for row in manifest["entries"]
        if row["label"] == label
    ]
    assert len(split) == 4
    assert [row.n for row in study_verdicts(manifest_from(manifests[1] | {"entries": split}), results)] == [
        0,
        0,
    ]


def test_imported_old_runs_are_listed_and_marked_and_not_used_as_new_ones(
    old: Path, story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_runs(Store(old), tmp_path / "old.tar.gz")
    folder = tmp_path / "here"
    assert import_runs(Store(folder), tmp_path / "old.tar.gz") == (4, 0)
    with pytest.raises(SystemExit):
        main(["runs", str(folder)])
    assert capsys.readouterr().out.replace("\n", " ").count("numerics 1") == 4
    found = study(story).run(folder, workers=1)
    assert found.summary.done == 4, "every run is computed again"
    assert f"4 runs {MARK} are not used" in capsys.readouterr().out
    assert ids(old) < ids(folder)
    assert {entry.run for entry in found.manifest.entries}.isdisjoint(ids(old))


@pytest.mark.parametrize("given", [{}, {"by": ["corpus"]}], ids=["columns found", "columns named"])
def test_a_table_of_both_is_judged_separately(
    old: Path, new: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    open_study(old).write(quiet=True)
    lines = [(folder / "runs.csv").read_text().splitlines() for folder in (old, new)]
    assert lines[0][0] == lines[1][0]
    (tmp_path / "both.csv").write_text("\n".join([*lines[0], *lines[1][1:]]))
    found = h2h.judge(tmp_path / "both.csv", arm="label", seed="seed", metric="test_bits_per_byte", **given)
    assert [(row.numerics, row.n) for row in found.verdicts] == [("1", 2), (str(NUMERICS), 2)]
