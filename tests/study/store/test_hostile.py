"""Damaged and malicious files give a valid object or a clear error, and never run code."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import headtohead as h2h
from headtohead import Study
from headtohead.common.errors import DamagedFile, NewerFile, UserError
from headtohead.common.files import canonical_json, digest, verify_checksum, with_checksum
from headtohead.common.schema import SCHEMA, write_document
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.evaluation.stability import final_loss, gradient_tail, spikes, tokens_to_target
from headtohead.report.gather import ArmFacts, arm_rows, gather
from headtohead.report.panels import View
from headtohead.report.panels.training.circuits import circuit_rows, circuits_over_tokens
from headtohead.report.panels.training.curves import curve_rows
from headtohead.study.judge.verdict import sentence, study_verdicts
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.history import Marks
from headtohead.study.store.manifest import read_manifest
from headtohead.study.store.result import read_cost, read_result
from headtohead.study.store.run_spec import InvalidSpec, run_spec_from
from headtohead.study.store.run_store import RunDirectory, Store
from tests import processes
from tests.fuzz import JSON, damaged, fuzz, mutated

SETTINGS: dict[str, Any] = {
    "arms": ["standard", "diagonal"],
    "tokens": 2560,
    "batch": 256,
    "seeds": 2,
    "lr": 5e-3,
    "probes": ["positions"],
}


@pytest.fixture(scope="module")
def whole(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "study"
    Study(**(SETTINGS | {"corpus": f"file:{story}"})).run(folder, workers=1, quiet=True)
    return folder


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture
def mine(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "study")
    return tmp_path / "study"


def first(folder: Path) -> RunDirectory:
    return Store(folder).runs()[0]


@given(data=st.data())
@fuzz(150)
def test_any_result_is_judged_or_rejected(whole: Path, data: st.DataObject) -> None:
    manifest, added = read_manifest(whole / "study.json")
    runs = Store(whole).runs()
    chosen = data.draw(st.sampled_from(runs))
    record = json.loads((chosen.path / "result.json").read_text())
    try:
        spoiled = read_result(data.draw(mutated(record) | JSON))
    except ValueError as error:
        assert "\n" not in str(error)
        return
    rows = study_verdicts(
        manifest, Store(whole).results([run.id for run in runs]) | {chosen.id: spoiled}, Marks(added)
    )
    assert all(sentence(row) for row in rows)
    assert json.dumps([row.as_dict() for row in rows], allow_nan=False)


@given(data=st.data())
@fuzz(150)
def test_any_bytes_are_a_result_or_damaged(whole: Path, scratch: Path, data: st.DataObject) -> None:
    content = (first(whole).path / "result.json").read_bytes()
    spoiled = data.draw(damaged(content))
    run = RunDirectory(scratch / first(whole).id)
    run.path.mkdir(exist_ok=True)
    (run.path / "result.json").write_bytes(spoiled)
    try:
        found = run.result()
    except DamagedFile as error:
        assert str(run.path / "result.json") in str(error)
        assert run.state() == "damaged"
    else:
        assert found == read_result(json.loads(content)), "a changed result was accepted"


@given(data=st.data())
@fuzz(150)
def test_any_spec_is_accepted_or_rejected(whole: Path, data: st.DataObject) -> None:
    spec = first(whole).spec().as_dict()
    spoiled = data.draw(mutated(spec) | JSON)
    if isinstance(spoiled, dict) and isinstance(spoiled.get("identity"), dict) and data.draw(st.booleans()):
        try:
            spoiled["id"] = digest(canonical_json(spoiled["identity"]))[:16]
        except ValueError:
            return
    name = spoiled.get("id") if isinstance(spoiled, dict) else spec["id"]
    try:
        accepted = run_spec_from(spoiled, name if isinstance(name, str) else spec["id"])
    except InvalidSpec:
        return
    curve = {1: [LoggedRow(1, nats=1.0)]}
    assert len(curve_rows([ArmFacts("x", "x", accepted, 1, {}, [], curve)])) == 1


@given(content=st.lists(st.text(max_size=30) | JSON.map(lambda value: json.dumps(value)), max_size=8))
@fuzz(200)
def test_any_metrics_file_gives_rows_that_a_chart_can_take(
    scratch: Path, whole: Path, content: list[str]
) -> None:
    run = RunDirectory(scratch / first(whole).id)
    run.path.mkdir(exist_ok=True)
    row = '{"step": 3, "tokens": 768, "nats": 2.5}'
    text = "\n".join([row, *content, row])
    (run.path / "metrics.jsonl").write_bytes(text.encode("utf-8", errors="surrogatepass"))
    assert run.logged_rows()[0] == LoggedRow(3, tokens=768, nats=2.5)


LOGGED = {
    "step": 3,
    "tokens": 768,
    "nats": 2.5,
    "lr": 0.004,
    "grad_norm": 1.5,
    "grad_norm_max": 2.0,
    "seconds": 0.5,
    "circuits": {
        "qk": {"layers": [1, 2], "lr_sum": [0.1, 0.2], "grad_norm": [0.5, None], "product": [3.0, 2.0]}
    },
}
COSTS = {"train_seconds": 0.5, "tokens_per_second": 1000.0, "peak_bytes": 10**9, "micro_batch": 8}


@given(data=st.data())
@fuzz(25)
def test_charts_and_tables_take_any_row_and_cost_that_is_read(
    scratch: Path, whole: Path, data: st.DataObject
) -> None:
    run = RunDirectory(scratch / first(whole).id)
    run.path.mkdir(exist_ok=True)
    rows = [data.draw(st.just(LOGGED) | mutated(LOGGED) | JSON) for _ in range(8)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.path / "cost.json").write_text(json.dumps(data.draw(mutated(COSTS) | JSON)))
    damage: list[str] = []
    found, costs = run.logged_rows(damage=damage), run.costs(damage=damage)
    assert len(damage) <= 2
    assert bool(damage) >= (len(found) < len(rows))
    curve = [row for row in found if row.nats is not None]
    arms = [
        ArmFacts(
            *("x", "x", first(whole).spec(), 1, {}, [costs, read_cost(COSTS)]),
            {1: curve, 2: [msgspec.convert(LOGGED, LoggedRow)]},
        )
    ]
    numbers = [curve_rows(arms), circuit_rows(arms), arm_rows(arms), spikes(found), gradient_tail(found)]
    assert json.dumps([numbers, tokens_to_target(found * 5, 1.0), final_loss(found * 5)], allow_nan=False)
    circuits_over_tokens(
        circuit_rows(arms), View(whole, read_manifest(whole / "study.json")[0], None, arms, [])
    )  # type: ignore[arg-type]


@given(data=st.data())
@fuzz(100)
def test_any_study_file_is_a_manifest_or_damaged(whole: Path, scratch: Path, data: st.DataObject) -> None:
    spoiled = data.draw(mutated(json.loads((whole / "study.json").read_text())) | JSON)
    folder = scratch / "study"
    folder.mkdir(exist_ok=True)
    (folder / "study.json").write_text(json.dumps(spoiled))
    try:
        found = h2h.open_study(folder)
    except UserError as error:
        assert str(error)
        return
    assert all(row.n == 0 for row in found.verdicts)


def test_the_checksum_covers_every_byte() -> None:
    text = with_checksum({"status": "done", "x": [1.5, None, "é"]}).encode()
    assert verify_checksum(text)["x"] == [1.5, None, "é"]
    for position in range(len(text)):
        for change in (b"", b"#", b" "):
            spoiled = text[:position] + change + text[position + 1 :]
            try:
                found = verify_checksum(spoiled)
            except ValueError:  # JSON's own, or ours
                continue
            # Only a checksum that is no longer recognized can pass, with every value unchanged.
            assert {key: found[key] for key in ("status", "x")} == {"status": "done", "x": [1.5, None, "é"]}


@pytest.mark.parametrize("every_command", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_pipe_or_an_endless_device_instead_of_a_file_stops_no_command(
    mine: Path, tmp_path: Path, story: Path, every_command: bool
) -> None:
    settings = SETTINGS | {"corpus": f"file:{story}"}
    child = processes.start(
        processes.read_with_irregular_files, settings, mine, tmp_path / "log", every_command
    )
    assert processes.ended(child) == 0
    log = (tmp_path / "log").read_text().splitlines()
    assert {line.split()[0] for line in log} >= {
        "study.json",
        "history.jsonl",
        "result.json",
        "metrics.jsonl",
        "lock",
    }
    assert all("\n" not in line for line in log)
    (found,) = [line for line in log if line.startswith("study.json pipe report")]
    assert "study.json: not a regular file" in found


@pytest.mark.page
def test_a_page_is_built_despite_damaged_runs_and_names_them(mine: Path) -> None:
    pytest.importorskip("altair")
    runs = Store(mine).runs()
    (runs[0].path / "result.json").write_text("{")
    (runs[1].path / "cost.json").write_text('{"train_seconds": "soon", "tokens_per_second": []}')
    (runs[1].path / "environment.json").write_text('{"stretches": [3, {"date": 5}]}')
    (runs[1].path / "metrics.jsonl").write_text(
        '{"step": 5, "nats": 2.0, "circuits": {"qk": {"product": []}}}\n'
    )
    (runs[3].path / "cost.json").write_text('{"train_seconds": 1e308, "tokens_per_second": Infinity}')
    (runs[2].path / "metrics.jsonl").write_text('{"step": 5, "nats": "low"}\n{"step": true}\n[]\n{"step": 9')
    (runs[3].path / "spec.json").write_text("[]")
    found = h2h.open_study(mine)
    found.write(quiet=True)
    page = (mine / "report.html").read_text()
    assert f"damaged file {runs[0].path / 'result.json'}" in page
    names = [
        (1, "cost.json"),
        (1, "environment.json"),
        (1, "metrics.jsonl"),
        (2, "metrics.jsonl"),
        (3, "cost.json"),
    ]
    assert all(page.count(f"damaged file {runs[number].path / name}") == 1 for number, name in names)
    assert len(found.damage) == 1


# A run directory from an untrusted source.


def forge(folder: Path, **changes: Any) -> RunDirectory:
    """Rewrite a run so that its id is the hash of its changed identity, with valid checksums."""
    run = first(folder)
    spec, result = run.document("spec.json"), run.result()
    assert result is not None
    for key, value in changes.items():
        target = spec["identity"] if key in spec["identity"] and key != "layers" else spec
        if isinstance(value, dict):
            spec[key] = spec[key] | value
            target[key] = target[key] | value
        else:
            spec[key] = value
    if "layers" in changes:
        spec["identity"]["layers"] = [
            [{"mechanism": "Evil", "options": {}, "source": "0"}] for _ in spec["layers"]
        ]
    spec["id"] = digest(canonical_json(spec["identity"]))[:16]
    target_path = run.path.with_name(spec["id"])
    run.path.rename(target_path)
    write_document(target_path / "spec.json", spec)
    RunDirectory(target_path).finish(result)
    return RunDirectory(target_path)


EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"


def test_an_untrusted_run_executes_no_code(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    run = forge(mine, layers=[f"{tmp_path / 'evil.py'}:Evil"] * 2)
    for action in (
        lambda: h2h.load(run.path),
        lambda: h2h.evaluate(run.path, "stdlib", quiet=True),
        lambda: list(h2h.generate_text(run.path, "x")),
    ):
        with pytest.raises(UserError, match="trust_files"):
            action()
    h2h.open_study(mine).write(quiet=True)
    h2h.examine_study(mine, repair=True, quiet=True)
    export_runs(Store(mine), tmp_path / "x.tar.gz")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["result.json", "cost.json", "environment.json", "study.json"])
def test_a_pickle_instead_of_a_json_file_is_not_executed(mine: Path, tmp_path: Path, name: str) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return (Path.touch, (tmp_path / "executed",))

    target = mine / name if name == "study.json" else first(mine).path / name
    target.write_bytes(pickle.dumps(Evil()))
    try:
        h2h.open_study(mine).write(quiet=True)
    except UserError as error:
        assert "damaged file" in str(error)
    h2h.examine_study(mine, quiet=True)
    assert not (tmp_path / "executed").exists()


def test_changed_weights_are_rejected(mine: Path) -> None:
    run = first(mine)
    content = bytearray(run.weights.read_bytes())
    content[-3] ^= 1
    run.weights.write_bytes(content)
    with pytest.raises(UserError, match="checksum mismatch"):
        h2h.load(run.path)


def test_a_pickle_instead_of_weights_is_rejected(mine: Path) -> None:
    run = first(mine)
    torch.save({"x": torch.zeros(2)}, run.weights)
    run.weights.with_suffix(".sha256").unlink()
    with pytest.raises(UserError, match="damaged file"):
        h2h.load(run.path)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": {"width": 2**23, "heads": 4}},
        {"size": {"vocabulary": 2**24}},
        {"size": {"layers": 2**20}},
        {"size": {"context": 2**23, "settings": {"positions": "learned"}}},
    ],
    ids=lambda changes: str(changes["size"]),
)
def test_a_size_that_the_weights_do_not_fill_takes_no_memory(mine: Path, changes: dict[str, Any]) -> None:
    inner = changes["size"]
    if "settings" in inner:
        inner = inner | {
            "settings": first(mine).document("spec.json")["size"]["settings"] | inner["settings"]
        }
    run = forge(mine, size=inner)
    before = _peak_bytes()
    with pytest.raises(UserError, match="does not fit the run's model"):
        h2h.load(run.path)
    assert _peak_bytes() - before < 200 * 2**20


def test_an_oversized_dimension_is_rejected(mine: Path) -> None:
    with pytest.raises(UserError, match="too large"):
        forge(mine, size={"layers": 2**40}).spec()


def test_an_oversized_tensor_is_rejected(mine: Path) -> None:
    run = first(mine)
    header = {"norm.gain": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    text = json.dumps(header).encode()
    run.weights.write_bytes(len(text).to_bytes(8, "little") + text)
    run.weights.with_suffix(".sha256").unlink()
    with pytest.raises(UserError, match="damaged file"):
        h2h.load(run.path)


def test_tensors_of_another_model_are_rejected(mine: Path) -> None:
    run = first(mine)
    content = save({f"x{index}": torch.zeros(3) for index in range(40)})
    run.keep_weights(content)
    with pytest.raises(UserError, match="is missing and should be"):
        h2h.load(run.path)


@pytest.mark.parametrize(
    "name", ["../../../etc", "..", "/etc/passwd", "a/b", "x" * 16, "0123456789ABCDEF", ""]
)
def test_names_from_files_never_become_paths_outside_the_study(mine: Path, name: str) -> None:
    record = json.loads((mine / "study.json").read_text())
    record["outline"]["entries"][0]["run"] = name
    (mine / "study.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"is not a run id|damaged file"):
        h2h.open_study(mine)


def test_links_out_of_the_study_are_not_exported(mine: Path, tmp_path: Path) -> None:
    run = first(mine)
    (tmp_path / "secret").write_text("secret")
    (run.path / "metrics.jsonl").unlink()
    os.symlink(tmp_path / "secret", run.path / "metrics.jsonl")
    export_runs(Store(mine), tmp_path / "x.tar.gz")
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        assert f"{run.id}/metrics.jsonl" not in archive.getnames()
        assert f"{run.id}/result.json" in archive.getnames()


def test_an_oversized_file_is_not_read(mine: Path) -> None:
    path = first(mine).path / "result.json"
    with open(path, "wb") as stream:
        stream.truncate(2**40)
    assert first(mine).state() == "damaged"


def test_deeply_nested_json_is_damage(mine: Path) -> None:
    (first(mine).path / "result.json").write_text("[" * 10**6)
    assert first(mine).state() == "damaged"
    (first(mine).path / "metrics.jsonl").write_text("[" * 10**6 + "\n" + '{"step": 1}')
    assert first(mine).logged_rows() == [LoggedRow(1)]


def test_a_tokenizer_with_gaps_is_rejected(mine: Path) -> None:
    from headtohead.data.tokenizers import BytePairs

    content = json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 10**9}, "merges": []},
        }
    )
    with pytest.raises(UserError, match=r"not consecutive|cannot be read"):
        BytePairs("hostile", content)


def test_curves_of_any_numbers_are_drawn(whole: Path) -> None:
    manifest, _ = read_manifest(whole / "study.json")
    arms = gather(whole, manifest, manifest.contests()[0], Store(whole).results([]), [])
    arms[0].curves[1] = [
        LoggedRow(2, nats=1e308),
        LoggedRow(10**12, tokens=5, nats=-1.0),
    ]
    assert all(np.isfinite(row["mean"]) for row in curve_rows(arms))


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_numbers_too_large_for_a_float_are_damage(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    run = Store(copy).runs()[0]
    record = json.loads((run.path / "result.json").read_text())
    record["test"]["blocks"] = [[10**400, 1]]
    with pytest.raises(ValueError, match="are not numbers"):
        read_result(record)
    run.log({"step": 10**400, "nats": 1.0})
    assert all(row.step < 10**9 for row in run.logged_rows())


NEWER = {
    "study.json": "",
    "study.lock.json": "",
    "spec.json": "runs/{}/spec.json",
    "result.json": "runs/{}/result.json",
    "environment.json": "runs/{}/environment.json",
    "cost.json": "runs/{}/cost.json",
    "positions.json": "runs/{}/probes/positions.json",
}


@pytest.mark.parametrize("name", NEWER)
def test_a_file_of_a_newer_version_is_reported_as_such_and_not_changed(
    mine: Path, story: Path, tmp_path: Path, name: str
) -> None:
    run = first(mine)
    export_runs(Store(mine), tmp_path / "x.tar.gz")
    path = mine / (NEWER[name].format(run.id) or name)
    content = json.loads(path.read_text()) | {"schema": SCHEMA + 1}  # its checksum is no longer ours
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    commands = processes.study_commands(SETTINGS | {"corpus": f"file:{story}"}, mine)
    found = {
        command: processes.outcome(commands[command])
        for command in ("report", "runs", "doctor", "export", "race")
    }
    assert path.read_bytes() == before
    assert "newer headtohead" in found["doctor"]
    assert any("newer headtohead" in found[command] for command in ("report", "runs", "race"))
    assert all(not text or "newer headtohead" in text for text in found.values()), found
    if "runs/" not in NEWER[name]:
        return
    with tarfile.open(tmp_path / "x.tar.gz") as old, tarfile.open(tmp_path / "y.tar.gz", "w:gz") as new:
        for member in old:
            packed = old.extractfile(member)
            assert packed is not None
            changed = before if member.name == f"{run.id}/{path.relative_to(run.path)}" else packed.read()
            member.size, member.pax_headers = len(changed), {}
            new.addfile(member, io.BytesIO(changed))
    with pytest.raises(NewerFile, match=f"y.tar.gz: {run.id}/.*{name} was written by a newer headtohead"):
        import_runs(Store(tmp_path / "new"), tmp_path / "y.tar.gz")
    assert not (tmp_path / "new").exists()
