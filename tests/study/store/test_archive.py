from __future__ import annotations

import io
import json
import lzma
import tarfile
from pathlib import Path

import pytest

from headtohead import Study
from headtohead.common.errors import UserError
from headtohead.data.shards import prepare
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.run_store import Store


@pytest.fixture(scope="module")
def exported(story: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("study")
    Study(["standard", "diagonal"], corpus=f"file:{story}", tokens=1024, batch=256, seeds=1).run(
        folder, workers=1, quiet=True
    )
    target = folder / "runs.tar.gz"
    assert export_runs(Store(folder), target) == 2
    return folder, target


def test_imported_runs_are_not_run_again(exported: tuple[Path, Path], story: Path, tmp_path: Path) -> None:
    folder, target = exported
    assert import_runs(Store(tmp_path), target) == (2, 0)
    assert import_runs(Store(tmp_path), target) == (0, 2)
    for run in Store(folder).runs():
        assert Store(tmp_path).run(run.id).result() == run.result()
        assert not Store(tmp_path).run(run.id).weights.exists(), "weights are not exported"
    again = Study(["standard", "diagonal"], corpus=f"file:{story}", tokens=1024, batch=256, seeds=1).run(
        tmp_path, workers=1, quiet=True
    )
    assert again.summary.done == 0


def test_paths_of_the_machine_are_not_exported(story: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(prepare(f"file:{story}", "bpe:300").tokenizer.content)  # type: ignore[attr-defined]
    given = {"tasks": "glue-cola", "tokenizer": f"file:{file}", "tokens": 300, "batch": 300, "seeds": 1}
    data = tmp_path / "data" / "glue"
    data.mkdir(parents=True)
    for part in ("train", "dev"):
        rows = "".join(f"x\t{number % 2}\t\t{part} {number}\n" for number in range(60))
        (data / f"CoLA.{part}.tsv.xz").write_bytes(lzma.compress(rows.encode()))
    first = Study("standard", **given).run(tmp_path / "a", data_dir=data.parent, workers=1, quiet=True)
    (start,) = Store(first.path).runs()
    Study("standard", **(given | {"from": str(start.path)})).run(
        tmp_path / "b", data_dir=data.parent, workers=1, quiet=True
    )
    export_runs(Store(tmp_path / "b"), tmp_path / "b.tar.gz")
    assert import_runs(Store(tmp_path / "c"), tmp_path / "b.tar.gz") == (1, 0)
    (run,) = Store(tmp_path / "c").runs()
    assert str(tmp_path) not in (run.path / "spec.json").read_text()
    assert (run.spec()["start"], run.spec()["corpus"]["tokenizer"]) == (start.id, "file:mine.json")
    assert run.tokenizer().content == file.read_text()  # type: ignore[attr-defined]


def archive(path: Path, files: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.type = kind
            tar.addfile(member, io.BytesIO(content))
    return path


RUN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../evil.json", "is not an export"),
        (f"{RUN}/../../evil", "is not an export"),
        ("/etc/passwd", "is not an export"),
        (f"{RUN}/evil.py", "is not an export"),
        (f"{RUN}/result.json", "damaged or does not match its id"),
    ],
)
def test_hostile_archives_are_rejected(tmp_path: Path, name: str, message: str) -> None:
    path = archive(tmp_path / "x.tar.gz", {name: b'{"status": "done"}'})
    with pytest.raises(UserError, match=message):
        import_runs(Store(tmp_path / "s"), path)
    assert not list(tmp_path.glob("**/evil*"))


def test_a_run_that_does_not_match_its_id_is_rejected(exported: tuple[Path, Path], tmp_path: Path) -> None:
    run = Store(exported[0]).runs()[0]
    spec = run.spec()
    spec["identity"]["seed"] = 99
    files = {f"{run.id}/spec.json": json.dumps(spec).encode(), f"{run.id}/result.json": b'{"status": "done"}'}
    with pytest.raises(UserError, match="does not match its id"):
        import_runs(Store(tmp_path / "s"), archive(tmp_path / "x.tar.gz", files))


def test_links_and_other_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not an export"):
        import_runs(
            Store(tmp_path), archive(tmp_path / "l.tar.gz", {f"{RUN}/spec.json": b""}, tarfile.SYMTYPE)
        )
    (tmp_path / "r.tar.gz").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="cannot be read"):
        import_runs(Store(tmp_path), tmp_path / "r.tar.gz")
    with pytest.raises(UserError, match="no such file"):
        import_runs(Store(tmp_path), tmp_path / "none.tar.gz")
    with pytest.raises(UserError, match="no finished runs"):
        export_runs(Store(tmp_path), tmp_path / "out.tar.gz")


def probed(story: Path, folder: Path, **changes: object) -> Store:
    settings = {"corpus": f"file:{story}", "tokens": 1024, "batch": 256, "seeds": 1}
    Study(["standard"], **(settings | changes)).run(folder, workers=1, quiet=True)
    return Store(folder)


def test_probes_are_exported_and_added_to_known_runs(story: Path, tmp_path: Path) -> None:
    store = probed(story, tmp_path / "a", probes=["positions", "skip:512"])
    (run,) = store.runs()
    export_runs(store, tmp_path / "x.tar.gz")
    assert import_runs(Store(tmp_path / "b"), tmp_path / "x.tar.gz") == (1, 0)
    known = probed(story, tmp_path / "c")
    assert import_runs(known, tmp_path / "x.tar.gz") == (0, 1)
    for other in (Store(tmp_path / "b"), known):
        for name in ("positions", "skip:512"):
            assert other.run(run.id).probe(name) == run.probe(name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("probes/positions.json", {"probe": "maps", "found": {"none": "x"}}, "not a result of probe maps"),
        (
            "probes/positions.json",
            {"probe": "positions", "found": {"bins": "many"}},
            "not a result of probe positions",
        ),
        ("probes/positions.json", {"probe": "positions", "found": 3}, "not a result of probe positions"),
        ("probes/positions.json", {"found": {}}, "no probe name"),
        ("probes/positions.json", [1], "no probe name"),
        ("probes/evil.json", {"probe": "evil", "found": {}}, "is not an export"),
        ("probes/../positions.json", {}, "is not an export"),
    ],
)
def test_an_invalid_probe_is_rejected(
    exported: tuple[Path, Path], tmp_path: Path, name: str, content: object, message: str
) -> None:
    run = Store(exported[0]).runs()[0]
    files = {f"{run.id}/{file}": (run.path / file).read_bytes() for file in ("spec.json", "result.json")}
    files[f"{run.id}/{name}"] = json.dumps(content).encode()
    with pytest.raises(UserError, match=message):
        import_runs(Store(tmp_path / "s"), archive(tmp_path / "x.tar.gz", files))
    assert not list((tmp_path / "s").glob("runs/*/probes/*"))


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_the_suffix_selects_the_compression_and_a_truncated_file_is_rejected(
    exported: tuple[Path, Path], tmp_path: Path, suffix: str
) -> None:
    packed = tmp_path / f"runs.tar.{suffix}"
    assert export_runs(Store(exported[0]), packed) == 2
    assert packed.read_bytes()[:2] == {"gz": b"\x1f\x8b", "xz": b"\xfd7"}[suffix]
    assert import_runs(Store(tmp_path / "whole"), packed) == (2, 0)
    content = packed.read_bytes()
    for damage in (content[: len(content) // 2], content[:200] + bytes(64) + content[264:]):
        packed.write_bytes(damage)
        with pytest.raises(UserError, match=r"cannot be read as an export|is damaged"):
            import_runs(Store(tmp_path / "cut"), packed)
