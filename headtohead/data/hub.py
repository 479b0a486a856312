"""Named corpora from the Hugging Face hub, with the `[hub]` extra, where no local copy exists."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.files import digest, sync_directory

# Web-sized sets are read from their start up to this much text: more than any size here is trained on.
MOST_BYTES = 1_000_000_000


@dataclass(frozen=True)
class HubSet:
    """Where a corpus stands on the hub."""

    path: str
    config: str | None = None
    field: str = "text"
    splits: tuple[str, str, str] | None = ("train", "validation", "test")
    """Names of train, valid and test there; None: one split, divided by a hash of each document."""


SETS: dict[str, HubSet] = {
    "wikitext-2": HubSet("Salesforce/wikitext", "wikitext-2-v1"),
    "wikitext-103": HubSet("Salesforce/wikitext", "wikitext-103-v1"),
    "openwebtext": HubSet("Skylion007/openwebtext", splits=None),
    "c4": HubSet("allenai/c4", "en", splits=None),
    "pubmed": HubSet("MedRAG/pubmed", field="content", splits=None),
    "code": HubSet("codeparrot/codeparrot-clean", field="content", splits=None),
    "tinyshakespeare": HubSet("karpathy/tiny_shakespeare"),
}


def fetch(name: str, cache: Path, where: str) -> tuple[Path, Path, Path]:
    """Return the train, valid and test files of a hub set, downloading them into the cache the first time."""
    folder = cache / "hub" / name
    files = (folder / "train.jsonl", folder / "valid.jsonl", folder / "test.jsonl")
    if all(file.is_file() for file in files):
        return files
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UserError(
            f"corpus '{name}' is not at hand: {where}; with `pip install headtohead[hub]` it is taken from the hub"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        rows = {split: list(texts) for split, texts in _rows(datasets, SETS[name]).items()}
    except Exception as error:
        raise UserError(
            f"corpus '{name}' could not be taken from the hub: {type(error).__name__}: {error}"
        ) from error
    for file, split in zip(files, ("train", "valid", "test"), strict=True):
        if not rows[split]:
            raise UserError(f"corpus '{name}' from the hub has an empty {split} split")
        temporary = file.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in rows[split])
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    sync_directory(folder)
    return files


def _rows(datasets: Any, source: HubSet) -> dict[str, Iterable[str]]:
    def texts(split: str) -> Iterator[str]:
        taken = 0
        for row in datasets.load_dataset(source.path, source.config, split=split, streaming=True):
            text = row[source.field]
            if text.strip():
                yield text
                taken += len(text)
            if taken >= MOST_BYTES:
                return

    if source.splits:
        return {
            ours: texts(theirs)
            for ours, theirs in zip(("train", "valid", "test"), source.splits, strict=True)
        }
    splits: dict[str, Iterable[str]] = {"train": [], "valid": [], "test": []}
    for text in texts("train"):
        place = int(digest(text)[:8], 16) / 2**32
        chosen = splits["test" if place < 0.005 else "valid" if place < 0.01 else "train"]
        assert isinstance(chosen, list)
        chosen.append(text)
    return splits
