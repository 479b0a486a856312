"""Checkpoints: safetensors and JSON, no pickle; written atomically; a damaged one is reported and the previous one used."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headtohead.common.errors import DamagedFile, UnreadableFile
from headtohead.common.files import canonical_json, digest, digest_file, naming, open_regular, sync_directory
from headtohead.common.schema import read_document, with_schema

_NAME = re.compile(r"step-(\d{10})")
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to resume exactly."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, kept: int | None = KEPT) -> Path:
    """Write a checkpoint under a temporary name, fsync and rename it; then delete all but the newest `kept`.

    None keeps all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = checkpoint_path(folder, checkpoint.step)
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
        _write(temporary / "tensors.safetensors", save(tensors))
        checksum = digest_file(temporary / "tensors.safetensors")
        facts = with_schema({"step": checkpoint.step, "sha256": checksum, "state": checkpoint.state})
        facts |= {"checksum": digest(canonical_json(facts))}
        _write(temporary / "state.json", json.dumps(facts).encode())
        sync_directory(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(folder)
    for old in checkpoint_paths(folder)[:-kept] if kept else ():
        shutil.rmtree(old, ignore_errors=True)
    return final


def latest_checkpoint(
    folder: Path, misfit: Callable[[Checkpoint], str] = lambda checkpoint: "", before: int | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint (of a step below `before`, if given) or None, and a warning for each one skipped.

    `misfit` returns why a checkpoint does not belong to this run, or an empty string.
    """
    warnings: list[str] = []
    paths = checkpoint_paths(folder)
    if before is not None:
        paths = [path for path in paths if path.name < _name(before)]
    for path in reversed(paths):
        try:
            checkpoint = read_checkpoint(path)
        except UnreadableFile as error:
            warnings.append(f"{error}; using the previous one")
            continue
        if not (reason := misfit(checkpoint)):
            return checkpoint, warnings
        warnings.append(f"checkpoint {path} does not belong to this run: {reason}; using the previous one")
    return None, warnings


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in `path`; raise DamagedFile, naming the file, when a checksum does not match."""
    try:
        facts = read_document(path / "state.json", json.loads)
        checksum = facts.pop("checksum")
        if checksum != digest(canonical_json(facts)):
            raise ValueError("it does not match its checksum")
        step, wanted, state = int(facts["step"]), str(facts["sha256"]), dict(facts["state"])
        if path.name != _name(step):
            raise ValueError(f"it is of step {step}")
    except (UnreadableFile, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"damaged checkpoint {path}: state.json: {error}") from None
    try:
        if digest_file(path / "tensors.safetensors") != wanted:
            raise DamagedFile(f"damaged checkpoint {path}: tensors.safetensors does not match its checksum")
        return Checkpoint(step, read_tensors(path / "tensors.safetensors"), state)
    except UnreadableFile as error:
        raise DamagedFile(f"damaged checkpoint {path}: {error}") from None


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a safetensors file; reads only the header."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a dict


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; the format holds only data, so nothing in it is executed."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    open_regular(path).close()  # safe_open would wait for a pipe
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedFile(f"damaged file {path}: {error}") from None


def _name(step: int) -> str:
    return f"step-{step:010d}"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint in `folder`."""
    return folder / _name(step)


def checkpoint_paths(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _write(path: Path, content: bytes) -> None:
    with naming(path), open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
