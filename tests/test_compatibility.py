"""What older versions wrote is read, and a change of format is noticed: docs/compatibility.md states the policy."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.files import finite
from headtohead.study.store import Store
from headtohead.study.transfer import import_runs
from tests.golden.make import DATA, EXPORTED, STUDIES, make_studies

GOLDEN = Path(__file__).parent / "golden"
NEWEST = GOLDEN / "schema-0"
SCHEMAS = sorted(path.name for path in GOLDEN.glob("schema-*"))
RESULTS = Path(__file__).parents[1] / "results"
TIMED = "timed"
"""The golden study whose lengths, and so whose run ids, depend on the clock."""
ID = re.compile(r"[0-9a-f]{16}")
CHANGED = "a format or an identity has changed; if that was meant, follow 'Changing a format' in docs/compatibility.md"


def run(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code


# --- formats -------------------------------------------------------------------------------------------------------


def structure(value: Any) -> Any:
    """Return the keys and types of a JSON value; a list as its distinct elements, ids in keys as ID."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, item in value.items():
            if ID.fullmatch(key):
                found["ID"] = distinct([*found.get("ID", []), structure(item)])
            else:
                found[key] = structure(item)
        return found
    if isinstance(value, list):
        return distinct([structure(item) for item in value])
    return type(value).__name__


def distinct(values: list[Any]) -> list[Any]:
    return [json.loads(text) for text in sorted({json.dumps(value, sort_keys=True) for value in values})]


def content(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    if path.name == "tokenizer.json":  # a format of the tokenizers library
        return ["tokenizer"]
    if path.suffix == ".jsonl":
        return [structure(json.loads(line)) for line in text.splitlines()]
    return [text.splitlines()[0]] if path.suffix == ".csv" else [structure(json.loads(text))]


def formats(folder: Path) -> dict[str, list[Any]]:
    """Return the distinct structures of every kind of file in a study's directory."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.suffix in (".json", ".jsonl", ".csv") and "checkpoint" not in inside.parts:
            kind = "/".join("ID" if ID.fullmatch(part) else part for part in inside.parts)
            found[kind] = distinct([*found.get(kind, []), *content(path)])
    return found


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden studies, run by this version, without their pages."""
    folder = tmp_path_factory.mktemp("fresh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "headtohead.report.page", None)  # as if the chart library were missing
        make_studies(folder)
    return folder


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_written_has_the_structure_of_the_golden_files(fresh: Path, name: str) -> None:
    expected, found = formats(NEWEST / name), formats(fresh / name)
    assert list(found) == list(expected), CHANGED
    for kind, structures in expected.items():
        assert found[kind] == structures, f"{kind}: {CHANGED}"


@pytest.mark.parametrize("name", [name for name in STUDIES if name != TIMED])
def test_the_golden_studies_have_the_run_ids_and_lock_keys_of_the_golden_files(
    fresh: Path, name: str
) -> None:
    ids = [run.id for run in Store(NEWEST / name).runs()]
    assert [run.id for run in Store(fresh / name).runs()] == ids, CHANGED
    expected, found = (
        json.loads((place / name / "study.lock.json").read_text()) for place in (NEWEST, fresh)
    )
    for part in ("plans", "tuning"):
        assert list(found.get(part, {})) == list(expected.get(part, {})), CHANGED


def test_the_structure_of_a_value_shows_a_new_key_and_another_type() -> None:
    value = {"a": 1, "0123456789abcdef": [{"b": 1.0}, {"b": 2.0}]}
    assert structure(value) == {"a": "int", "ID": [[{"b": "float"}]]}
    for other in (value | {"c": None}, value | {"a": 1.0}, value | {"0123456789abcdef": [{"b": "x"}]}):
        assert structure(other) != structure(value)


def test_golden_files_name_no_place_of_a_machine() -> None:
    for path in (path for path in GOLDEN.rglob("*.json*") if path.is_file()):
        assert not re.search(r"/(tmp|home|root|work|Users)/", path.read_text(encoding="utf-8")), path


# --- stores and exports of this and older versions -----------------------------------------------------------------


@pytest.fixture(params=SCHEMAS)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the golden studies of one schema."""
    return shutil.copytree(GOLDEN / request.param, tmp_path / "stores")


def test_golden_stores_open_with_the_verdicts_they_were_written_with(stores: Path) -> None:
    for name in STUDIES:
        result = h2h.open_study(stores / name)
        assert len(result.results) == len({entry.run for entry in result.outline.entries})
        assert not result.damage
        expected = json.loads((stores / name / "verdicts.json").read_text())
        assert_same_verdicts(result, expected)


def assert_same_verdicts(result: h2h.StudyResult, expected: list[dict[str, Any]]) -> None:
    """Fields and notes may have been added since; none may be lost or say something else."""
    rows = [finite(row.as_dict()) for row in result.verdicts]
    assert len(rows) == len(expected)
    for row, old in zip(rows, expected, strict=True):
        assert set(old.get("notes", [])) <= set(row["notes"])
        for key in old.keys() - {"notes"}:
            wanted = pytest.approx(old[key]) if isinstance(old[key], float) else old[key]
            assert row[key] == wanted, f"{row.get('label', row)}: {key}"


def test_golden_stores_list_report_and_have_nothing_to_mend(
    stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in STUDIES:
        folder = stores / name
        runs = Store(folder).runs()
        before = {path: path.read_bytes() for path in folder.rglob("runs/*/*.json")}
        run("runs", str(folder))
        listed = capsys.readouterr().out
        assert all(one.id in listed for one in runs)
        assert "damaged" not in listed
        run("report", str(folder))
        assert (folder / "report.html").is_file()
        run("doctor", str(folder))
        assert f"{len(runs)} runs examined: 0 findings" in capsys.readouterr().out
        assert {path: path.read_bytes() for path in folder.rglob("runs/*/*.json")} == before


def test_golden_exports_arrive_in_an_empty_store(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in EXPORTED:
        runs = Store(stores / name).runs()
        run("runs", str(tmp_path / name), "--import", str(stores / f"{name}.tar.xz"))
        assert f"{len(runs)} runs added, 0 were here already" in capsys.readouterr().out
        arrived = Store(tmp_path / name)
        for one in runs:
            assert arrived.run(one.id).result() == one.result()
            assert arrived.run(one.id).metrics() == one.metrics()
            probes = [path.name for path in sorted((one.path / "probes").glob("*"))]
            assert [path.name for path in sorted((arrived.run(one.id).path / "probes").glob("*"))] == probes


def test_a_golden_study_is_resumed_and_nothing_is_done_again(stores: Path) -> None:
    settings = STUDIES["corpus"] | {"name": "corpus", "probes": ()}
    again = h2h.Study(**settings).run(
        stores / "corpus", device="cpu", workers=1, stack=False, data_dir=DATA, quiet=True
    )
    assert (again.summary.done, again.summary.left) == (0, 0)


SMALL = ("faster_qk/reading.tar.xz", "faster_qk/epochs.tar.xz", "kuramoto-1m/runs-450m.tar.gz")
EXPORTS = sorted(
    path.relative_to(RESULTS).as_posix() for end in ("gz", "xz") for path in RESULTS.rglob(f"*.tar.{end}")
)


def slow_unless(quick: bool, value: str) -> Any:
    return pytest.param(value, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("export", [slow_unless(name in SMALL, name) for name in EXPORTS])
def test_exports_in_results_arrive_and_list(
    export: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("runs", str(tmp_path / "store"), "--import", str(RESULTS / export))
    listed = capsys.readouterr().out
    runs = Store(tmp_path / "store").runs()
    assert f"{len(runs)} runs added, 0 were here already" in listed
    assert runs
    assert all(one.id in listed and one.state() in ("done", "diverged") for one in runs)
    assert "damaged" not in listed


STUDIED = sorted(path.parent.name for path in RESULTS.glob("*/study.json"))


@pytest.mark.parametrize("name", [slow_unless(name == "sharing-1m", name) for name in STUDIED])
def test_studies_in_results_give_their_committed_verdicts(name: str, tmp_path: Path) -> None:
    import_runs(Store(tmp_path), RESULTS / name / "runs.tar.gz")
    shutil.copy(RESULTS / name / "study.json", tmp_path)
    result = h2h.open_study(tmp_path)
    assert {entry.run for entry in result.outline.entries} == set(result.results)
    assert_same_verdicts(result, json.loads((RESULTS / name / "verdicts.json").read_text()))
    run("report", str(tmp_path))
    assert (tmp_path / "report.html").is_file()


def test_the_results_that_these_tests_are_about_are_there() -> None:
    assert set(SMALL) <= set(EXPORTS)
    assert STUDIED == ["kuramoto-1m", "sharing-1m"]
