"""Find the files of corpora and tasks: a local copy, or one from the Hugging Face hub (the `[hub]` extra)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.common.errors import MissingFile, UserError
from headtohead.common.files import replacing
from headtohead.data.text import SPLITS, hashed_split, locate

# Web-scale corpora are read up to this many bytes, more than any size here is trained on.
MAX_BYTES = 1_000_000_000
Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class HubSet:
    """The location of a corpus on the hub."""

    path: str
    config: str | None = None
    field: str = "text"
    whole: bool = False
    """Whether it has only a train split, which is divided by a hash of each document."""

    def rows(self, load: Callable[[str], Iterator[dict[str, Any]]]) -> Rows:
        """Return the documents by split, from the rows of a split on the hub."""
        found: Rows = {split: [] for split in SPLITS}
        names = (
            {"train": "train"} if self.whole else {"train": "train", "valid": "validation", "test": "test"}
        )
        for split, hub_split in names.items():
            for text in self._texts(load(hub_split)):
                found[hashed_split(text, 0.005, 0.005) if self.whole else split].append({"text": text})
        return found

    def _texts(self, rows: Iterator[dict[str, Any]]) -> Iterator[str]:
        taken = 0
        for row in rows:
            text = row[self.field]
            if text.strip():
                yield text
                taken += len(text)
            if taken >= MAX_BYTES:
                return


SETS: dict[str, HubSet] = {
    "wikitext-2": HubSet("Salesforce/wikitext", "wikitext-2-v1"),
    "wikitext-103": HubSet("Salesforce/wikitext", "wikitext-103-v1"),
    "openwebtext": HubSet("Skylion007/openwebtext", whole=True),
    "c4": HubSet("allenai/c4", "en", whole=True),
    "pubmed": HubSet("MedRAG/pubmed", field="content", whole=True),
    "code": HubSet("codeparrot/codeparrot-clean", field="content", whole=True),
    "tinyshakespeare": HubSet("karpathy/tiny_shakespeare"),
}


@dataclass(frozen=True)
class HubTask:
    """The location of a task on the hub, and how its rows map to those of the local files."""

    path: str
    config: str | None = None
    files: dict[str, str] = field(default_factory=lambda: {"train": "train", "dev": "validation"})
    """Maps the reader's key of a file to a split on the hub."""
    columns: dict[str, str] = field(default_factory=dict)
    """Maps column names on the hub to those of the local files, where they differ."""
    labels: tuple[str, ...] = ()
    """The local files' values for label 0, 1, ...; empty if they store the number."""

    def rows(self, load: Callable[[str], Iterator[dict[str, Any]]]) -> Rows:
        """Return the rows of each file, from the rows of a split on the hub."""
        return {key: [self._local(key, row) for row in load(split)] for key, split in self.files.items()}

    def _local(self, key: str, row: dict[str, Any]) -> dict[str, Any]:
        found = {self.columns.get(name, name): value for name, value in row.items()}
        if self.labels:
            found["label"] = self.labels[found["label"]]
        return found | {"split": key}


_MRPC = {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"}
_HATEXPLAIN = {"train": "train", "val": "validation", "test": "test"}
TASKS: dict[str, HubTask] = {
    "squad": HubTask("rajpurkar/squad"),
    "squad-whole": HubTask("rajpurkar/squad"),
    "glue-cola": HubTask("nyu-mll/glue", "cola"),
    "glue-mrpc": HubTask("nyu-mll/glue", "mrpc", columns=_MRPC),
    "glue-rte": HubTask("nyu-mll/glue", "rte", labels=("entailment", "not_entailment")),
    "glue-sst2": HubTask("nyu-mll/glue", "sst2"),
    "hatexplain": HubTask("Hate-speech-CNERG/hatexplain", files=_HATEXPLAIN),
}
_SOURCES: dict[str, Mapping[str, HubSet | HubTask]] = {"corpus": SETS, "task": TASKS}


def find_files(
    kind: str, name: str, files: Mapping[str, str], data_dir: str | Path | None, cache: Path | None
) -> tuple[dict[str, Path], bool]:
    """Return the files of a corpus or task in the data directory, else on the hub; and whether they are from the hub."""
    try:
        return locate(f"{kind} '{name}'", files, data_dir), False
    except MissingFile as error:
        if cache is None or name not in _SOURCES[kind]:
            raise
        return fetch(kind, name, cache, str(error)), True


def fetch(kind: str, name: str, cache: Path, missing: str) -> dict[str, Path]:
    """Return the files of a hub corpus or task, one JSON object per row; downloads them into the cache the first time.

    `missing` is the error if they cannot be downloaded.
    """
    source = _SOURCES[kind][name]
    keys = SPLITS if isinstance(source, HubSet) else source.files
    files = {key: cache / "hub" / name / f"{key}.jsonl" for key in keys}
    if all(file.is_file() for file in files.values()):
        return files
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UserError(f"{missing}; to download it, run `pip install headtohead[hub]`") from None

    def load(split: str) -> Iterator[dict[str, Any]]:
        return iter(datasets.load_dataset(source.path, source.config, split=split, streaming=True))

    what = f"{kind} '{name}'"
    try:
        found = source.rows(load)
    except Exception as error:
        raise UserError(f"{what}: download from the hub failed: {type(error).__name__}: {error}") from error
    for key, file in files.items():
        if not found[key]:
            raise UserError(f"{what} from the hub has an empty {key} split")
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in found[key])
    return files
