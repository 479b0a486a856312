"""Download named corpora and tasks from the Hugging Face hub (the `[hub]` extra) if there is no local copy."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.files import digest, replacing

# Web-scale corpora are read up to this many bytes, more than any size here is trained on.
MAX_BYTES = 1_000_000_000


@dataclass(frozen=True)
class HubSet:
    """The location of a corpus on the hub."""

    path: str
    config: str | None = None
    field: str = "text"
    splits: tuple[str, str, str] | None = ("train", "validation", "test")
    """Hub names of train, valid and test; None: one split, divided by a hash of each document."""


SETS: dict[str, HubSet] = {
    "wikitext-2": HubSet("Salesforce/wikitext", "wikitext-2-v1"),
    "wikitext-103": HubSet("Salesforce/wikitext", "wikitext-103-v1"),
    "openwebtext": HubSet("Skylion007/openwebtext", splits=None),
    "c4": HubSet("allenai/c4", "en", splits=None),
    "pubmed": HubSet("MedRAG/pubmed", field="content", splits=None),
    "code": HubSet("codeparrot/codeparrot-clean", field="content", splits=None),
    "tinyshakespeare": HubSet("karpathy/tiny_shakespeare"),
}


@dataclass(frozen=True)
class HubTask:
    """The location of a task on the hub, and how its rows map to those of the local files."""

    path: str
    config: str | None
    files: dict[str, str]
    """Maps the reader's key of a file to a split on the hub."""
    columns: dict[str, str] = field(default_factory=dict)
    """Maps column names on the hub to those of the local files, where they differ."""
    labels: tuple[str, ...] = ()
    """The local files' values for label 0, 1, ...; empty if they store the number."""


TASKS: dict[str, HubTask] = {
    "squad": HubTask("rajpurkar/squad", None, {"train": "train", "dev": "validation"}),
    "squad-whole": HubTask("rajpurkar/squad", None, {"train": "train", "dev": "validation"}),
    "glue-cola": HubTask("nyu-mll/glue", "cola", {"train": "train", "dev": "validation"}),
    "glue-mrpc": HubTask(
        "nyu-mll/glue",
        "mrpc",
        {"train": "train", "dev": "validation"},
        {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
    ),
    "glue-rte": HubTask(
        "nyu-mll/glue",
        "rte",
        {"train": "train", "dev": "validation"},
        labels=("entailment", "not_entailment"),
    ),
    "glue-sst2": HubTask("nyu-mll/glue", "sst2", {"train": "train", "dev": "validation"}),
    "hatexplain": HubTask(
        "Hate-speech-CNERG/hatexplain", None, {"train": "train", "val": "validation", "test": "test"}
    ),
}


def fetch(name: str, cache: Path, where: str) -> tuple[Path, Path, Path]:
    """Return the train, valid and test files of a hub corpus; downloads them into the cache the first time."""
    folder = cache / "hub" / name
    train, valid, test = (folder / f"{split}.jsonl" for split in ("train", "valid", "test"))
    files = {"train": train, "valid": valid, "test": test}

    def rows(datasets: Any) -> dict[str, list[dict[str, Any]]]:
        return {
            split: [{"text": text} for text in texts] for split, texts in _rows(datasets, SETS[name]).items()
        }

    _keep(f"corpus '{name}'", files, rows, f"corpus '{name}' not found: {where}")
    return train, valid, test


def fetch_rows(name: str, cache: Path, missing: str) -> dict[str, Path]:
    """Return the files of a hub task, one JSON object per row; `missing` is the error if they cannot be downloaded."""
    source = TASKS[name]
    files = {key: cache / "hub" / name / f"{key}.jsonl" for key in source.files}

    def rows(datasets: Any) -> dict[str, list[dict[str, Any]]]:
        return {
            key: [
                _local_row(source, key, row)
                for row in datasets.load_dataset(source.path, source.config, split=split, streaming=True)
            ]
            for key, split in source.files.items()
        }

    _keep(f"task '{name}'", files, rows, missing)
    return files


def _local_row(source: HubTask, key: str, row: dict[str, Any]) -> dict[str, Any]:
    found = {source.columns.get(name, name): value for name, value in row.items()}
    if source.labels:
        found["label"] = source.labels[found["label"]]
    return found | {"split": key}


def _keep(
    what: str,
    files: dict[str, Path],
    rows: Callable[[Any], dict[str, list[dict[str, Any]]]],
    missing: str,
) -> None:
    """Write the rows from the hub to files, unless the files exist."""
    if all(file.is_file() for file in files.values()):
        return
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UserError(f"{missing}; to download it, run `pip install headtohead[hub]`") from None
    try:
        found = rows(datasets)
    except Exception as error:
        raise UserError(f"{what}: download from the hub failed: {type(error).__name__}: {error}") from error
    for key, file in files.items():
        if not found[key]:
            raise UserError(f"{what} from the hub has an empty {key} split")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in found[key])
        with replacing(file) as stream:
            stream.writelines(lines)


def _rows(datasets: Any, source: HubSet) -> dict[str, Iterable[str]]:
    def texts(split: str) -> Iterator[str]:
        taken = 0
        for row in datasets.load_dataset(source.path, source.config, split=split, streaming=True):
            text = row[source.field]
            if text.strip():
                yield text
                taken += len(text)
            if taken >= MAX_BYTES:
                return

    if source.splits:
        return {
            ours: texts(theirs)
            for ours, theirs in zip(("train", "valid", "test"), source.splits, strict=True)
        }
    splits: dict[str, Iterable[str]] = {"train": [], "valid": [], "test": []}
    for text in texts("train"):
        share = int(digest(text)[:8], 16) / 2**32
        chosen = splits["test" if share < 0.005 else "valid" if share < 0.01 else "train"]
        assert isinstance(chosen, list)
        chosen.append(text)
    return splits
