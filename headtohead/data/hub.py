"""Find the files of a named corpus or task, also those that version 0.1 stored in the cache from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headtohead.common.errors import MissingFile
from headtohead.data.locate import locate
from headtohead.data.text import SPLITS

_TASK_FILES = {"hatexplain": ("train", "val", "test")}


def find_files(
    kind: str, name: str, files: Mapping[str, str], data_dir: str | Path | None, cache: Path | None
) -> tuple[dict[str, Path], bool]:
    """Return the files of a corpus or task in the data directory, else in the cache; and whether they are from the hub."""
    try:
        return locate(kind, name, files, data_dir), False
    except MissingFile:
        if cache is None:
            raise
        keys = SPLITS if kind == "corpus" else _TASK_FILES.get(name, ("train", "dev"))
        stored = {key: cache / "hub" / name / f"{key}.jsonl" for key in keys}
        if not all(path.is_file() for path in stored.values()):
            raise
        return stored, True
