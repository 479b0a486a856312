"""Every file of a study is bound to its study or run: changed, swapped and foreign files are noticed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headtohead import Study, examine_study, open_study
from headtohead.common.errors import DamagedFile, UserError
from headtohead.report.gather import gather
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.frozen import read_lock
from headtohead.study.store.run_store import RunDirectory, Store
from tests.study.store.test_archive import archive

ADDED = ("run", "checksum", "formulas")
"""The fields that files of older versions do not have."""


@pytest.fixture(scope="module")
def whole(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("integrity") / "study"
    settings = {"corpus": f"file:{story}", "tokens": 1024, "batch": 256, "seeds": 2, "probes": ["positions"]}
    Study(["standard", "diagonal"], **settings).run(folder, workers=1, quiet=True, keep_weights=False)
    return folder


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "study")


@pytest.fixture
def older(mine: Path) -> Path:
    """The study as a version without run ids and checksums would have written it."""
    for path in mine.rglob("*.json"):
        value = json.loads(path.read_text())
        if isinstance(value, dict):
            kept = {key: item for key, item in value.items() if key not in ADDED}
            if path.name == "cost.json":
                del kept["metrics_sha256"]
            path.write_text(json.dumps(kept, indent=1) + "\n")
    return mine


def pair(folder: Path) -> list[RunDirectory]:
    """Return the runs of both arms with the first seed."""
    manifest = open_study(folder).manifest
    return [
        Store(folder).run(manifest.runs(manifest.contests()[0], label)[1])
        for label in ("standard", "diagonal")
    ]


FILES = ("result.json", "cost.json", "environment.json", "metrics.jsonl", "probes/positions.json")


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_run_is_found_and_not_used(mine: Path, name: str) -> None:
    source, target = pair(mine)
    shutil.copy(source.path / name, target.path / name)
    (finding,) = examine_study(mine, quiet=True)
    assert finding.path == target.path / name
    found = open_study(mine)
    damage = list(found.damage)
    (_, facts) = gather(mine, found.manifest, found.manifest.contests()[0], found.results, damage)
    shown: dict[str, Callable[[], Any]] = {
        "result.json": lambda: facts.results.get(1),
        "cost.json": lambda: len(facts.costs) == 2,
        "environment.json": target.environments,
        "metrics.jsonl": lambda: facts.curves.get(1),
        "probes/positions.json": lambda: facts.probes["positions"].get(1),
    }
    assert not shown[name]()
    if name not in ("cost.json", "environment.json"):
        assert any(str(target.path / name) in message for message in damage)
    if name == "result.json":
        assert target.state() == "damaged"
        assert found.verdicts[0].n == 1
        with pytest.raises(DamagedFile, match=f"it belongs to run {source.id}"):
            target.result()


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_run_is_not_imported(mine: Path, tmp_path: Path, name: str) -> None:
    source, target = pair(mine)
    names = ["spec.json", *FILES]
    files = {f"{target.id}/{one}": (target.path / one).read_bytes() for one in names}
    import_runs(Store(tmp_path / "whole"), archive(tmp_path / "whole.tar.gz", files))
    files[f"{target.id}/{name}"] = (source.path / name).read_bytes()
    with pytest.raises(UserError, match=f"{target.id}.*(belongs to run {source.id}|changed since)"):
        import_runs(Store(tmp_path / "s"), archive(tmp_path / "x.tar.gz", files))
    assert not Store(tmp_path / "s").runs()


@pytest.mark.parametrize("name", FILES)
def test_an_export_leaves_out_a_file_of_another_run(mine: Path, tmp_path: Path, name: str) -> None:
    source, target = pair(mine)
    shutil.copy(source.path / name, target.path / name)
    export_runs(Store(mine), tmp_path / "x.tar.gz")
    count = 3 if name == "result.json" else 4
    assert import_runs(Store(tmp_path / "s"), tmp_path / "x.tar.gz") == (count, 0)
    assert not (Store(tmp_path / "s").run(target.id).path / name).exists()


def test_files_of_an_older_version_are_accepted(older: Path, whole: Path, tmp_path: Path) -> None:
    assert examine_study(older, quiet=True) == []
    assert [row.as_dict() for row in open_study(older).verdicts] == [
        row.as_dict() for row in open_study(whole).verdicts
    ]
    export_runs(Store(older), tmp_path / "x.tar.gz")
    assert import_runs(Store(tmp_path / "s"), tmp_path / "x.tar.gz") == (4, 0)


def test_a_result_of_an_older_version_is_compared_with_the_spec(older: Path, tmp_path: Path) -> None:
    source, target = pair(older)
    shutil.copy(source.path / "result.json", target.path / "result.json")
    with pytest.raises(DamagedFile, match=r"it has [0-9,]+ parameters, the spec of its run [0-9,]+"):
        target.result()
    assert examine_study(older, quiet=True)
    files = {f"{target.id}/{one}": (target.path / one).read_bytes() for one in ("spec.json", "result.json")}
    with pytest.raises(UserError, match="parameters, the spec of its run"):
        import_runs(Store(tmp_path / "s"), archive(tmp_path / "x.tar.gz", files))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("result.json", '"step": 4', '"step": 3'),
        ("result.json", '"tokens": 1024', '"tokens": 1023'),
        ("cost.json", '"tokens_per_second": ', '"tokens_per_second": 9'),
        ("metrics.jsonl", '"step": 4', '"step": 5'),
        ("metrics.jsonl", '"step": 4, "tokens": 1024', '"step": 4, "tokens": 1025'),
    ],
)
def test_files_of_an_older_version_agree_with_each_other(older: Path, name: str, old: str, new: str) -> None:
    path = pair(older)[0].path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert path in [finding.path for finding in examine_study(older, quiet=True)]


def test_an_entry_that_names_a_run_of_another_arm_or_seed_is_found(older: Path) -> None:
    path = older / "study.json"
    record = json.loads(path.read_text())
    entries = record["outline"]["entries"]
    for other in (1, 2):
        changed = json.loads(json.dumps(record))
        changed["outline"]["entries"][0]["run"] = entries[other]["run"]
        path.write_text(json.dumps(changed))
        (finding,) = examine_study(older, quiet=True)
        assert finding.path == path
        assert "is not a run of" in finding.problem


def changes_a_value(before: bytes, after: bytes) -> bool:
    known = json.loads(before)
    try:
        value = json.loads(after)
    except ValueError:
        return True
    return any(value.get(key) != item for key, item in known.items() if key != "checksum")


@pytest.mark.parametrize("name", ["spec.json", "study.json", "study.lock.json"])
def test_every_flipped_bit_that_changes_a_value_is_noticed(mine: Path, name: str) -> None:
    path = pair(mine)[0].path / name if name == "spec.json" else mine / name
    content = path.read_bytes()
    choose, missed, changed = random.Random(17), [], 0
    for _ in range(60):
        place, bit = choose.randrange(len(content)), choose.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        if not changes_a_value(content, bytes(flipped)):
            continue
        changed += 1
        path.write_bytes(flipped)
        if path not in [finding.path for finding in examine_study(mine, quiet=True)]:
            missed.append(content[place - 20 : place + 20])
    assert changed > 40
    assert missed == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("study.json", '"margin": 0.005', '"margin": 5.0'),
        ("spec.json", '"flops_per_token": ', '"flops_per_token": 1'),
        ("spec.json", '"label": "standard"', '"label": "better"'),
        ("study.lock.json", '"added": []', '"added": [2]'),
    ],
)
def test_a_changed_value_is_damage_when_it_is_loaded(mine: Path, name: str, old: str, new: str) -> None:
    run = pair(mine)[0]
    path = run.path / name if name == "spec.json" else mine / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    load: dict[str, Callable[[], object]] = {
        "spec.json": run.spec,
        "study.json": lambda: open_study(mine),
        "study.lock.json": lambda: read_lock(mine),
    }
    with pytest.raises(DamagedFile, match=f"damaged file {path}: checksum mismatch"):
        load[name]()


def test_a_changed_row_of_the_history_is_found(mine: Path) -> None:
    path = mine / "history.jsonl"
    path.write_text(path.read_text().replace('"seeds": [1, 2]', '"seeds": [1, 3]'))
    (finding,) = examine_study(mine, quiet=True)
    assert (finding.path, finding.problem) == (path, "1 rows are damaged")
