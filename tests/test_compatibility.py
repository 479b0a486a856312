"""Files of older versions are readable, and a change of format is detected; docs/compatibility.md states the policy."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import DamagedFile, NewerFile
from headtohead.common.files import finite, with_checksum
from headtohead.common.schema import SCHEMA, check_schema, with_schema
from headtohead.study.store.archive import import_runs
from headtohead.study.store.run_store import Store
from headtohead.training.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from tests.golden.make import DATA, EXPORTED, STUDIES, make_studies

GOLDEN = Path(__file__).parent / "golden"
NEWEST = GOLDEN / f"schema-{SCHEMA}"
SCHEMAS = sorted(path.name.partition(".")[0] for path in GOLDEN.glob("schema-*"))
RESULTS = Path(__file__).parents[1] / "results"
TIMED = "timed"
"""The golden study whose lengths, and therefore run ids, depend on measured times."""
REPORTED = ("corpus", "tuned", "task")
"""The golden studies whose pages are written; a page takes half a second."""
ID = re.compile(r"[0-9a-f]{16}")
CHANGED = "a format or an identity has changed; if that is intended, follow 'Changing a format' in docs/compatibility.md"


def run(*arguments: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == code


# --- formats -------------------------------------------------------------------------------------------------------


def structure(value: Any) -> Any:
    """Return the keys and types of a JSON value; a list becomes its distinct elements, an id in a key becomes ID."""
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
    if path.name == "tokenizer.json":  # defined by the tokenizers library
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
        patch.setitem(sys.modules, "headtohead.report.page", None)  # simulate a missing chart library
        make_studies(folder)
    return folder


@pytest.mark.parametrize("name", STUDIES)
def test_written_files_have_the_structure_of_the_golden_files(fresh: Path, name: str) -> None:
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
        json.loads((folder / name / "study.lock.json").read_text()) for folder in (NEWEST, fresh)
    )
    for part in ("plans", "tuning"):
        assert list(found.get(part, {})) == list(expected.get(part, {})), CHANGED


def documents(folder: Path) -> dict[Path, Any]:
    """Return the JSON objects in a folder; lists have no schema, and tokenizer.json belongs to another library."""
    paths = [path for path in folder.rglob("*.json") if path.name != "tokenizer.json"]
    found = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    return {path: value for path, value in found.items() if isinstance(value, dict)}


def assert_schema(folder: Path, schema: int | None) -> None:
    found = {path: value.get("schema") for path, value in documents(folder).items()}
    assert {path.name for path in found} >= {"spec.json", "study.json", "study.lock.json", "cost.json"}
    assert [path for path, number in found.items() if number != schema] == []


def test_every_document_has_the_schema_of_this_version(fresh: Path) -> None:
    assert_schema(fresh, SCHEMA)


def test_the_structure_of_a_value_shows_a_new_key_and_another_type() -> None:
    value = {"a": 1, "0123456789abcdef": [{"b": 1.0}, {"b": 2.0}]}
    assert structure(value) == {"a": "int", "ID": [[{"b": "float"}]]}
    for other in (value | {"c": None}, value | {"a": 1.0}, value | {"0123456789abcdef": [{"b": "x"}]}):
        assert structure(other) != structure(value)


# --- stores and exports of this and older versions -----------------------------------------------------------------


@pytest.fixture(params=SCHEMAS)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the golden studies of one schema; older ones are packed."""
    packed = GOLDEN / f"{request.param}.tar.xz"
    if not packed.is_file():
        return shutil.copytree(GOLDEN / request.param, tmp_path / request.param)
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / str(request.param)


def test_golden_documents_have_their_schema_and_no_machine_paths(stores: Path) -> None:
    number = int(stores.name.split("-")[1])  # schema-1-unchecked: before documents had checksums
    assert_schema(stores, number or None)
    for path in (*stores.rglob("*.json*"), *stores.rglob("*.csv")):
        assert not re.search(r"/(tmp|home|root|work|Users)/", path.read_text(encoding="utf-8")), path


def test_golden_stores_open_with_the_verdicts_they_were_written_with(stores: Path) -> None:
    for name in STUDIES:
        result = h2h.open_study(stores / name)
        assert len(result.results) == len({entry.run for entry in result.manifest.entries})
        assert not result.damage
        expected = json.loads((stores / name / "verdicts.json").read_text())
        assert_same_verdicts(result, expected)


_INTERVAL = (
    *("ci_low", "ci_high", "equivalence_low", "equivalence_high"),
    *("p", "p_holm", "detectable", "correlation"),
)


def assert_same_verdicts(result: h2h.StudyResult, expected: list[dict[str, Any]]) -> None:
    """Check that all numbers are unchanged; fields may have been added since.

    The rules of the verdict have become stricter since some of these were written: `better`, `worse` and `equivalent` may
    now be `undecided`, and notes may be reworded.
    """
    rows = [finite(row.as_dict()) for row in result.verdicts]
    assert len(rows) == len(expected)
    for row, old in zip(rows, expected, strict=True):
        assert row["verdict"] in (old["verdict"], "undecided")
        for key in old.keys() - {"notes", "verdict", "primary", "unlearnt"}:
            if row["p"] is None and key in _INTERVAL:
                continue  # zero spread no longer has an interval
            wanted = pytest.approx(old[key]) if isinstance(old[key], float) else old[key]
            assert row[key] == wanted, f"{row.get('label', row)}: {key}"


def test_golden_stores_can_be_listed_and_reported_and_need_no_repair(
    stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in STUDIES:
        folder = stores / name
        runs = Store(folder).runs()
        before = {path: path.read_bytes() for path in folder.rglob("runs/ID/*.json")}
        run("runs", str(folder))
        listed = capsys.readouterr().out
        assert all(one.id in listed for one in runs)
        assert "damaged" not in listed
        if name in REPORTED:
            run("report", str(folder))
            assert (folder / "report.html").is_file()
            capsys.readouterr()
        run("doctor", str(folder))
        assert f"{len(runs)} runs checked: 0 findings" in capsys.readouterr().out
        assert {path: path.read_bytes() for path in folder.rglob("runs/ID/*.json")} == before


def test_golden_exports_can_be_imported_into_an_empty_store(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in EXPORTED:
        runs = Store(stores / name).runs()
        run("runs", str(tmp_path / name), "--import", str(stores / f"{name}.tar.xz"))
        assert f"{len(runs)} runs added, 0 already present" in capsys.readouterr().out
        imported = Store(tmp_path / name)
        for one in runs:
            assert imported.run(one.id).result() == one.result()
            assert imported.run(one.id).logged_rows() == one.logged_rows()
            probes = [path.name for path in sorted((one.path / "probes").glob("*"))]
            assert [path.name for path in sorted((imported.run(one.id).path / "probes").glob("*"))] == probes


def test_a_golden_study_is_resumed_and_no_run_is_repeated(stores: Path) -> None:
    """Runs of older numerics (schema 0) are kept unchanged and trained again under new ids."""
    settings = STUDIES["corpus"] | {"name": "corpus", "probes": ()}
    before = {path: path.read_bytes() for path in stores.glob("corpus/runs/*/*.json*")}
    again = h2h.Study(**settings).run(
        stores / "corpus", device="cpu", workers=1, stack=False, data_dir=DATA, quiet=True
    )
    assert (again.summary.done, again.summary.left) == (4 if stores.name == "schema-0" else 0, 0)
    after = {path: path.read_bytes() for path in stores.glob("corpus/runs/*/*.json*")}
    assert before.items() <= after.items()


# --- documents of a newer version ----------------------------------------------------------------------------------


def make_newer(path: Path) -> str:
    """Give a document the next schema; return the expected error message."""
    value = json.loads(path.read_text(encoding="utf-8")) | {"schema": SCHEMA + 1}
    checksum = value.pop("checksum", None)
    path.write_text(with_checksum(value) if checksum else json.dumps(value), encoding="utf-8")
    return (
        f"{path} was written by a newer headtohead (schema {SCHEMA + 1}, this version reads up to {SCHEMA}); "
        "upgrade headtohead"
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A copy of the newest golden study of a corpus."""
    return Store(shutil.copytree(NEWEST / "corpus", tmp_path / "corpus"))


RACE = ("race", "{}/study.toml", "--out", "{}", "--workers", "1", "--data-dir", str(DATA))
COMMANDS = {
    "study.json": [("report", "{}"), RACE],
    "study.lock.json": [RACE],
    "runs/ID/spec.json": [("runs", "{}"), ("report", "{}"), ("runs", "{}", "--export", "{}/x.tar.gz")],
    "runs/ID/result.json": [("runs", "{}"), ("report", "{}"), RACE],
    "runs/ID/environment.json": [("report", "{}")],
    "runs/ID/cost.json": [("report", "{}")],
    "runs/ID/probes/positions.json": [("report", "{}"), ("runs", "{}", "--export", "{}/x.tar.gz")],
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_newer_document_is_rejected_in_one_line_and_left_unchanged(
    kind: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.path / "study.toml").write_text(
        'name = "corpus"\narms = ["standard", "sharing:tie=kv"]\ncorpus = "tinyshakespeare"\ncontext = 32\n'
        'batch = 256\nseeds = 2\ntokens = 1024\nshape = "params"\nevaluations = 2\n'
    )
    first = h2h.open_study(store.path).manifest.entries[0].run
    path = store.path / kind.replace("ID", first)
    line = make_newer(path)
    content = path.read_bytes()
    for command in (*COMMANDS[kind], ("doctor", "{}")):
        run(*(argument.replace("{}", str(store.path)) for argument in command), code=2)
        assert capsys.readouterr().err == f"h2h: {line}\n", command
        assert path.read_bytes() == content
    assert not list(store.path.rglob("*.damaged*"))


@pytest.mark.parametrize("name", ["spec.json", "result.json", "cost.json", "probes/positions.json"])
def test_an_export_of_a_newer_version_is_rejected(name: str, store: Store, tmp_path: Path) -> None:
    def newer(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.name = f"{store.runs()[0].id}/{Path(entry.name).relative_to('run')}"
        return entry

    folder = store.runs()[0].path
    make_newer(folder / name)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        for path in (path for path in sorted(folder.rglob("*")) if path.is_file()):
            archive.add(path, f"run/{path.relative_to(folder)}", filter=newer)
    with pytest.raises(NewerFile, match=f"x.tar.gz: {folder.name}/{name} was written by a newer headtohead"):
        import_runs(Store(tmp_path / "empty"), tmp_path / "x.tar.gz")
    assert not Store(tmp_path / "empty").runs()


def test_a_newer_checkpoint_is_rejected_and_not_skipped(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, Checkpoint(step, {"x": torch.zeros(1)}, {}))
    assert latest_checkpoint(tmp_path)[0].step == 2  # type: ignore[union-attr]
    make_newer(tmp_path / "step-0000000002" / "state.json")
    with pytest.raises(NewerFile, match="upgrade headtohead"):
        latest_checkpoint(tmp_path)


def test_a_run_with_a_newer_checkpoint_is_deferred_and_not_recorded_as_failed(store: Store) -> None:
    one = store.runs()[0]
    (one.path / "result.json").unlink()
    state = save_checkpoint(one.checkpoints, Checkpoint(1, {"x": torch.zeros(1)}, {})) / "state.json"
    make_newer(state)
    content = state.read_bytes()
    settings = STUDIES["corpus"] | {"name": "corpus", "probes": ()}
    result = h2h.Study(**settings).run(
        store.path, device="cpu", workers=1, stack=False, data_dir=DATA, quiet=True
    )
    assert (result.summary.done, result.summary.left) == (0, 1)
    assert not one.finished()
    assert state.read_bytes() == content
    assert any("upgrade headtohead" in message for message in result.summary.trouble)


def test_the_schema_of_a_document_is_a_whole_number() -> None:
    assert with_schema({"schema": 0, "a": 1}) == {"schema": SCHEMA, "a": 1}
    for known in ({}, {"schema": 0}, {"schema": SCHEMA}, [1]):
        check_schema(known, "x.json")
    for wrong in (-1, "1", 1.0, True, None):
        with pytest.raises(DamagedFile, match=r"damaged file x.json: schema"):
            check_schema({"schema": wrong}, "x.json")


# --- results/ ------------------------------------------------------------------------------------------------------


SMALL = ("faster_qk/reading/runs.tar.xz", "faster_qk/epochs/runs.tar.xz", "kuramoto-1m/runs-450m.tar.gz")
EXPORTS = sorted(
    path.relative_to(RESULTS).as_posix() for end in ("gz", "xz") for path in RESULTS.rglob(f"*.tar.{end}")
)


def slow_unless(quick: bool, value: str) -> Any:
    return pytest.param(value, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("export", [slow_unless(name in SMALL, name) for name in EXPORTS])
def test_exports_in_results_can_be_imported_and_listed(
    export: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("runs", str(tmp_path / "store"), "--import", str(RESULTS / export))
    listed = capsys.readouterr().out
    runs = Store(tmp_path / "store").runs()
    assert f"{len(runs)} runs added, 0 already present" in listed
    assert runs
    assert all(one.id in listed and one.state() in ("done", "diverged") for one in runs)
    assert "damaged" not in listed


STUDIED = sorted(
    str(path.parent.relative_to(RESULTS))
    for path in (*RESULTS.glob("*/study.json"), *RESULTS.glob("*/*/study.json"))
)


@pytest.mark.parametrize("name", [slow_unless(name == "sharing-1m", name) for name in STUDIED])
def test_studies_in_results_have_their_committed_verdicts(name: str, tmp_path: Path) -> None:
    (archive,) = (RESULTS / name).glob("runs.tar.*")
    import_runs(Store(tmp_path), archive)
    shutil.copy(RESULTS / name / "study.json", tmp_path)
    result = h2h.open_study(tmp_path)
    assert {entry.run for entry in result.manifest.entries} == set(result.results)
    assert_same_verdicts(result, json.loads((RESULTS / name / "verdicts.json").read_text()))
    run("report", str(tmp_path))
    assert (tmp_path / "report.html").is_file()


def test_the_results_named_in_these_tests_exist() -> None:
    assert set(SMALL) <= set(EXPORTS)
    assert {"coupled", "kuramoto", "kuramoto-1m", "sharing-1m"} <= set(STUDIED)
