from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headtohead import Study
from headtohead.common.errors import UserError
from headtohead.data.shards import prepare
from headtohead.study.store import tar_stream
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.run_store import Store
from tests import processes
from tests.fuzz import damaged, fuzz


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
    assert (run.spec().start, run.spec().corpus.tokenizer) == (start.id, "file:mine.json")
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
    spec = run.document("spec.json")
    spec["identity"]["seed"] = 99
    files = {f"{run.id}/spec.json": json.dumps(spec).encode(), f"{run.id}/result.json": b'{"status": "done"}'}
    with pytest.raises(UserError, match="does not match its id"):
        import_runs(Store(tmp_path / "s"), archive(tmp_path / "x.tar.gz", files))


def test_links_and_other_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a regular file"):
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


# Attacks. Each is rejected with one line, and leaves nothing behind.


def rejected(source: Path, content: bytes, message: str) -> None:
    """Import `content`; it must raise a one-line UserError and leave nothing in the directory but the file."""
    source.write_bytes(content)
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(UserError, match=message) as caught:
        import_runs(Store(source.parent / "new" / "store"), source)
    assert "\n" not in str(caught.value)
    assert sorted(source.parent.rglob("*")) == before


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member


def block(member: tarfile.TarInfo, **changes: bytes) -> bytes:
    """Return a header with raw fields replaced and its checksum corrected."""
    content = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    for name, value in changes.items():
        start = {"size": 124, "checksum": 148, "sparse": 386, "sparse_size": 483}[name]
        content[start : start + len(value)] = value
    if "checksum" not in changes:
        content[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(content))[0]
    return bytes(content)


def pax(records: bytes) -> bytes:
    """Return a pax header with raw records, followed by an empty member."""
    padded = records + bytes(-len(records) % 512)
    return block(header("p", len(records), tarfile.XHDTYPE)) + padded + block(header(f"{RUN}/spec.json"))


END = bytes(1024)
SPEC = f"{RUN}/spec.json"
MALFORMED: dict[str, tuple[bytes, str]] = {
    "a pax header of 1 MiB": (pax(b"1048576 comment=" + b"x" * (2**20 - 17) + b"\n"), "a header of"),
    "a name of 1 MiB": (block(header("n", 2**20, tarfile.GNUTYPE_LONGNAME)) + b"a" * 2**20, "a header of"),
    "a pax header that claims 1 TiB": (block(header("p", 2**40, tarfile.XHDTYPE)), "a header of"),
    "a name of negative size": (
        block(header("n", 0, tarfile.GNUTYPE_LONGNAME), size=b"\xff" * 12),
        "cannot be read",
    ),
    "a header for all members": (
        block(header("g", 11, tarfile.XGLTYPE)) + b"11 a=bcdef\n".ljust(512, b"\0") + block(header(SPEC)),
        "for all members",
    ),
    "a file that claims 1 TiB": (block(header(SPEC, 2**40)), "claims 1,099,511,627,776 bytes"),
    "a file of negative size": (block(header(SPEC), size=b"\xff" * 12), "claims -1 bytes|negative"),
    "a probe that claims 9 MiB": (
        block(header(f"{RUN}/probes/maps.json", 9 * 2**20)),
        "claims 9,437,184 bytes",
    ),
    "the same name twice": (block(header(SPEC)) * 2, "occurs twice"),
    "a symbolic link": (block(header(SPEC, 0, tarfile.SYMTYPE)), "not a regular file"),
    "a hard link": (block(header(SPEC, 0, tarfile.LNKTYPE)), "not a regular file"),
    "a device": (block(header(SPEC, 0, tarfile.CHRTYPE)), "not a regular file"),
    "a pipe": (block(header(SPEC, 0, tarfile.FIFOTYPE)), "not a regular file"),
    "a directory": (block(header(RUN, 0, tarfile.DIRTYPE)), "not a regular file"),
    "an absolute path": (block(header("/etc/passwd")), "is not an export"),
    "a path to the parent": (block(header(f"{RUN}/../../spec.json")), "is not an export"),
    "a path with control characters": (block(header("\x1b[2J\n/x")), r"is not an export.*\\x1b"),
    "a sparse file": (block(header(SPEC, 0, tarfile.GNUTYPE_SPARSE)), "not a regular file"),
    "a malformed sparse file": (
        block(header(SPEC, 0, tarfile.GNUTYPE_SPARSE), sparse=b"\xfe" * 96, sparse_size=b"\xfe" * 12),
        "cannot be read|not a regular file",
    ),
    "a sparse file in pax format": (
        pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n26 GNU.sparse.realsize=9\n"),
        "cannot be read",
    ),
    "a sparse size that is not a number": (pax(b"24 GNU.sparse.size=many\n"), "cannot be read"),
    "a sparse map that is not numbers": (
        pax(b"21 GNU.sparse.size=1\n20 GNU.sparse.map=x\n"),
        "cannot be read",
    ),
    "a pax length that is not a number": (pax(b"xx path=y\n"), "is damaged|cannot be read"),
    "a pax length of zero": (pax(b"0 path=y\n"), "cannot be read"),
    "a pax length beyond the header": (pax(b"99999999999 path=y\n"), "is not an export|cannot be read"),
    "a pax size that is not a number": (pax(b"12 size=lot\n"), "cannot be read|does not match"),
    "a thousand pax headers in a chain": (
        (block(header("p", 10, tarfile.XHDTYPE)) + b"10 a=bcde\n".ljust(512, b"\0")) * 2000,
        "cannot be read",
    ),
    "a damaged header": (block(header(SPEC), checksum=b"0000000\0"), "cannot be read"),
    "a damaged second header": (
        block(header(SPEC)) + block(header("x"), checksum=b"0000000\0"),
        "damaged header",
    ),
    "nothing": (b"", "damaged or does not match|cannot be read|not an export"),
}


@pytest.mark.parametrize("attack", [name for name in MALFORMED if name != "nothing"])
def test_a_malformed_archive_is_rejected(tmp_path: Path, attack: str) -> None:
    content, message = MALFORMED[attack]
    rejected(tmp_path / "x.tar.gz", gzip.compress(content + END, 1), message)


@pytest.mark.slow
@pytest.mark.parametrize("attack", MALFORMED)
@pytest.mark.parametrize("suffix", ["gz", "xz"])
@pytest.mark.parametrize("end", [b"", bytes(512), END, b"x" * 700])
def test_every_form_of_a_malformed_archive_is_rejected(
    exported: tuple[Path, Path], tmp_path: Path, attack: str, suffix: str, end: bytes
) -> None:
    run = Store(exported[0]).runs()[0]
    before = b"".join(
        block(header(f"{run.id}/{name}", len(content))) + content + bytes(-len(content) % 512)
        for name in ("spec.json", "result.json")
        if (content := (run.path / name).read_bytes())
    )
    content, _ = MALFORMED[attack]
    if attack == "nothing" and len(end) in (512, 1024):
        return
    packed = {"gz": gzip.compress, "xz": lzma.compress}[suffix](before + content + end)
    rejected(tmp_path / f"x.tar.{suffix}", packed, "x.tar")


def test_limits_hold_for_the_unpacked_bytes_the_ratio_and_the_number_of_files(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = exported[1].read_bytes()
    for name, limit, message in (
        ("MAX_BYTES", 2**14, "more than 16,384 bytes unpacked"),
        ("MAX_MEMBERS", 3, "more than 3 files"),
        ("MAX_RATIO", 1, "more than 1 times its size"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(tar_stream, name, limit)
            patch.setattr(tar_stream, "_ANY_RATIO_BYTES", 0)
            rejected(tmp_path / "x.tar.gz", content, message)


def test_bytes_after_the_end_of_the_archive_count_too(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_stream, "MAX_BYTES", 2**22)
    unpacked = gzip.decompress(exported[1].read_bytes())
    rejected(tmp_path / "x.tar.gz", gzip.compress(unpacked + bytes(2**23)), "more than 4,194,304 bytes")


def test_the_checksums_of_gzip_and_xz_are_verified(exported: tuple[Path, Path], tmp_path: Path) -> None:
    plain = gzip.decompress(exported[1].read_bytes())
    packed = {"gz": gzip.compress(plain), "xz": lzma.compress(plain)}
    for suffix, content in packed.items():
        for position in (-1, -6, -10):
            changed = bytearray(content)
            changed[position] ^= 1
            rejected(tmp_path / f"x.tar.{suffix}", bytes(changed), "cannot be read")
        rejected(tmp_path / f"x.tar.{suffix}", content[:-4], "cannot be read")


def test_an_xz_file_that_needs_much_memory_is_rejected(exported: tuple[Path, Path], tmp_path: Path) -> None:
    content = bytearray(lzma.compress(gzip.decompress(exported[1].read_bytes())))
    stop = 12 + (content[12] + 1) * 4
    assert content[14:16] == b"\x21\x01", "the filter is LZMA2, and the next byte its dictionary size"
    content[16] = 38  # 2 GiB
    content[stop - 4 : stop] = zlib.crc32(content[12 : stop - 4]).to_bytes(4, "little")
    rejected(tmp_path / "x.tar.xz", bytes(content), "emory")


@given(data=st.data())
@fuzz(40)
def test_a_damaged_archive_is_imported_whole_or_not_at_all(
    exported: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    source = folder / "x.tar.gz"
    source.write_bytes(data.draw(damaged(exported[1].read_bytes())))
    try:
        assert import_runs(Store(folder / "store"), source) == (2, 0)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        assert [path.name for path in folder.iterdir()] == ["x.tar.gz"]


def test_one_bad_run_keeps_the_others_out(exported: tuple[Path, Path], tmp_path: Path) -> None:
    good, bad = Store(exported[0]).runs()
    files = {
        f"{run.id}/{name}": (run.path / name).read_bytes()
        for run in (good, bad)
        for name in ("spec.json", "result.json")
    }
    files[f"{bad.id}/result.json"] = b"{}"
    content = archive(tmp_path / "made.tar.gz", files).read_bytes()
    (tmp_path / "made.tar.gz").unlink()
    rejected(tmp_path / "x.tar.gz", content, f"x.tar.gz: {bad.id} is damaged")


BOMBS: dict[str, Callable[[tarfile.TarFile], None]] = {
    "24 files of 240 MiB": lambda tar: (
        [tar.addfile(header(f"{number:016x}/tokenizer.json", 240 * 2**20), Zeros()) for number in range(24)]
        and None
    ),
    "a pax header of 1 GiB": lambda tar: _long_header(tar, tarfile.XHDTYPE, 2**30),
    "a name of 1 GiB": lambda tar: _long_header(tar, tarfile.GNUTYPE_LONGNAME, 2**30),
    "bytes after the end": lambda tar: _long_header(tar, tarfile.REGTYPE, 0),
}


class Zeros(io.RawIOBase):
    """An endless file of zeros."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def _long_header(tar: tarfile.TarFile, kind: bytes, size: int) -> None:
    assert tar.fileobj is not None
    if size:
        tar.addfile(header(SPEC, size, kind), Zeros())
        return
    tar.fileobj.write(bytes(1024))
    for _ in range(5 * 2**10):
        tar.fileobj.write(bytes(2**20))


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_an_archive_of_many_gigabytes_takes_little_memory(tmp_path: Path, bomb: str) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz", format=tarfile.GNU_FORMAT, compresslevel=1) as tar:
        BOMBS[bomb](tar)
    child = processes.start(processes.import_in_little_memory, tmp_path / "x.tar.gz", tmp_path / "store")
    assert processes.ended(child) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.tar.gz"]
