from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headtohead.common.errors import UserError
from headtohead.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    read_checkpoint,
    read_tensors,
    save_checkpoint,
    tensor_shapes,
)
from tests.fuzz import damaged, fuzz, mutated


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.full((3,), float(step)), "n/x": torch.arange(4)}, {"seconds": 1.5})


def test_a_checkpoint_round_trips(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(7))
    found, warnings = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.state, warnings) == (7, {"seconds": 1.5}, [])
    assert torch.equal(found.tensors["w"], torch.full((3,), 7.0))


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint(step))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-0000000002", "step-0000000003"]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "missing", "state-flipped", "state-empty", "state-wrong"]
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path, checkpoint(1))
    last = save_checkpoint(tmp_path, checkpoint(2))
    tensors, state = last / "tensors.safetensors", last / "state.json"
    if damage == "flipped":
        flip(tensors, -3)
    elif damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-5])
    elif damage == "missing":
        tensors.unlink()
    elif damage == "state-flipped":
        state.write_text(state.read_text()[:-4])
    elif damage == "state-empty":
        state.write_text("")
    else:
        state.write_text(json.dumps({"step": "two"}))
    found, warnings = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert str(last) in warnings[0]


def test_without_a_valid_checkpoint_none_is_returned(tmp_path: Path) -> None:
    last = save_checkpoint(tmp_path, checkpoint(2))
    (last / "state.json").unlink()
    assert latest_checkpoint(tmp_path)[0] is None
    assert latest_checkpoint(tmp_path / "nowhere") == (None, [])


def test_an_interrupted_write_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, checkpoint(1))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, checkpoint(2))
    monkeypatch.undo()
    found, _ = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "executed",))  # type: ignore[return-value]

    (tmp_path / "x.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match="damaged file"):
        read_tensors(tmp_path / "x.safetensors")
    assert not (tmp_path / "executed").exists()


def test_a_header_that_claims_too_much_is_rejected(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="damaged file"):
        read_tensors(tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="damaged checkpoint"):
        read_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, checkpoint(7))
    return folder


@given(data=st.data(), name=st.sampled_from(["state.json", "tensors.safetensors"]))
@fuzz(200)
def test_any_bytes_give_the_checkpoint_or_a_clear_error(saved: Path, data: st.DataObject, name: str) -> None:
    path = saved / "step-0000000007" / name
    good = path.read_bytes()
    path.write_bytes(data.draw(damaged(good)))
    try:
        found = read_checkpoint(path.parent)
        assert (found.step, found.state) == (7, {"seconds": 1.5})
        assert torch.equal(found.tensors["w"], torch.full((3,), 7.0))
    except UserError as error:
        assert str(path.parent) in str(error)
    finally:
        path.write_bytes(good)


@given(data=st.data())
@fuzz(200)
def test_any_header_gives_tensors_or_a_clear_error(saved: Path, data: st.DataObject) -> None:
    good = (saved / "step-0000000007" / "tensors.safetensors").read_bytes()
    path = saved / "x.safetensors"
    length = int.from_bytes(good[:8], "little")
    header = json.dumps(data.draw(mutated(json.loads(good[8 : 8 + length])))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + good[8 + length :])
    for read in (read_tensors, tensor_shapes):
        try:
            assert isinstance(read(path), dict)
        except UserError as error:
            assert "damaged file" in str(error)


def test_a_checkpoint_of_another_step_is_rejected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(7)).rename(tmp_path / "step-0000000009")
    found, warnings = latest_checkpoint(tmp_path)
    assert found is None
    assert "it is of step 7" in warnings[0]
