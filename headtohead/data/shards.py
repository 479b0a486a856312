"""Token shards: one memory-mapped, checksummed file per split, documents packed with separators between them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from headtohead.common.errors import DamagedFile, UserError
from headtohead.common.files import digest, digest_file, read_json, sync_directory, write_json
from headtohead.data.corpora import SPLITS, Corpus, Documents, Progress, _silent, find_corpus
from headtohead.data.tokenizers import BytePairs, Bytes, Tokenizer, make_tokenizer, parse_tokenizer

FORMAT = 3
_TOLD_EVERY = 2**16
"""Bytes between two signs of progress: a corpus may hold a million short documents."""


def cache_dir(given: str | Path | None = None) -> Path:
    """Return where prepared data goes: the argument, H2H_CACHE, or the user's cache directory."""
    if chosen := given or os.environ.get("H2H_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headtohead"


@dataclass(frozen=True)
class Split:
    """The tokens of one split."""

    tokens: np.ndarray[Any, Any]
    """Memory-mapped, all documents packed, a separator behind each."""
    documents: np.ndarray[Any, Any]
    """Where each document starts."""
    bytes: int
    """Bytes of text, a separator counted as one."""
    scales: np.ndarray[Any, Any] | None = None
    """Bytes of text for every byte that the tokenizer's table gives a document's tokens, one number for each document;
    None where the table is right for all of them."""

    def token_lengths(self, table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return (tokens,): the bytes of text that each token stands for, by a tokenizer's table (vocabulary,).

        Their sum over a document is its true number of bytes, whatever the tokenizer.
        """
        lengths: np.ndarray[Any, Any] = table[np.asarray(self.tokens)]
        if self.scales is None:
            return lengths
        counts = np.diff([*self.documents.astype(np.int64), len(self.tokens)])
        return lengths * np.repeat(self.scales[: len(counts)], counts)


class Spelling:
    """Compares the bytes of documents with those that the tokenizer's table gives their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._table = None if isinstance(tokenizer, Bytes) else tokenizer.token_bytes()
        self._scales: list[float] = []

    def add(self, tokens: np.ndarray[Any, Any], size: int) -> None:
        """Take the tokens of the next document, and its true number of bytes; a separator counts as one in both."""
        if self._table is not None:
            chunks = range(0, len(tokens), 2**22)
            implied = sum(int(self._table[tokens[at : at + 2**22]].sum()) for at in chunks)
            self._scales.append((size + 1) / (implied + 1))

    def scales(self) -> np.ndarray[Any, Any] | None:
        """Return what `Split.scales` holds."""
        exact = all(scale == 1.0 for scale in self._scales)
        return None if exact else np.array(self._scales, dtype=np.float64)


@dataclass(frozen=True)
class Prepared:
    """A corpus in tokens, ready for windows."""

    name: str
    label: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: dict[str, Split]
    folder: Path
    notes: dict[str, Any]

    @property
    def content(self) -> str:
        """The digest of corpus and tokenizer content together."""
        return digest(f"{self.fingerprint}/{self.tokenizer.digest}")


def prepare(
    name: str,
    tokenizer: str = "bytes",
    *,
    data_dir: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = _silent,
) -> Prepared:
    """Return the corpus in tokens, made the first time and found by its hash after that."""
    root = cache_dir(cache)
    parse_tokenizer(tokenizer)
    corpus = find_corpus(name, data_dir, root)
    fingerprint = corpus.fingerprint()
    folder = (
        root / "corpora" / digest(f"{FORMAT}/{fingerprint}/{tokenizer}/{_tokenizer_file(tokenizer)}")[:20]
    )
    if (folder / "meta.json").is_file():
        try:
            return load(folder, corpus, progress)
        except DamagedFile as error:
            # Shards are made from the corpus alone, whose hash names the folder: making them again is always safe.
            progress(f"{error}; making it again", 0.0)
            _set_aside(folder)
    _make(corpus, fingerprint, tokenizer, root, folder, progress)
    return load(folder, corpus, progress)


def load(folder: Path, corpus: Corpus, progress: Progress = _silent) -> Prepared:
    """Return a prepared corpus; a shard that is missing or changed is named."""
    meta = read_json(folder / "meta.json")
    try:
        return _load(folder, meta, corpus)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise DamagedFile(f"damaged shards {folder}: {type(error).__name__}: {error}") from None


def _load(folder: Path, meta: dict[str, Any], corpus: Corpus) -> Prepared:
    tokenizer: Tokenizer = Bytes()
    if meta["tokenizer"] != "bytes":
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise DamagedFile(f"missing tokenizer {path}")
        content = path.read_text(encoding="utf-8")
        if digest(content) != meta["tokenizer_digest"]:
            raise DamagedFile(f"changed tokenizer {path}: its checksum is not the one it was made with")
        tokenizer = BytePairs(meta["tokenizer"], content)
    splits = {}
    for split in SPLITS:
        facts = meta["splits"][split]
        path = folder / f"{split}.bin"
        if not path.is_file():
            raise DamagedFile(f"missing shard {path}")
        if path.stat().st_size != facts["size"] or digest_file(path) != facts["sha256"]:
            raise DamagedFile(f"changed shard {path}: its checksum is not the one it was made with")
        tokens = (
            np.memmap(path, dtype=np.dtype(meta["dtype"]), mode="r")
            if facts["size"]
            else np.empty(0, meta["dtype"])
        )
        documents = np.fromfile(folder / f"{split}.documents", dtype=np.uint64)
        if digest(documents.tobytes()) != facts["documents_sha256"]:
            raise DamagedFile(f"changed shard {folder / split}.documents: its checksum is not its own")
        scales = None
        if "scales_sha256" in facts:
            scales = np.fromfile(folder / f"{split}.scales", dtype=np.float64)
            if digest(scales.tobytes()) != facts["scales_sha256"] or len(scales) != len(documents):
                raise DamagedFile(f"changed shard {folder / split}.scales: its checksum is not its own")
        splits[split] = Split(tokens, documents, facts["bytes"], scales)
    return Prepared(corpus.name, meta["label"], meta["fingerprint"], tokenizer, splits, folder, meta["notes"])


def _set_aside(folder: Path) -> None:
    """Take a damaged folder out of the way; a process that reads it goes on with the files it has open."""
    away = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        os.rename(folder, away)
    except FileNotFoundError:
        return
    shutil.rmtree(away, ignore_errors=True)


def _tokenizer_file(given: str) -> str:
    kind, value = parse_tokenizer(given)
    path = Path(str(value)).expanduser()
    return digest_file(path) if kind == "file" and path.is_file() else ""


def _make(
    corpus: Corpus, fingerprint: str, tokenizer_name: str, root: Path, folder: Path, progress: Progress
) -> None:
    progress(f"reading {corpus.label}", 0.0)
    documents = corpus.read(progress)
    _check_splits(corpus, documents)
    tokenizer = make_tokenizer(
        tokenizer_name,
        fingerprint,
        root,
        lambda: (text for _, text in (documents.whole or documents.splits)["train"]),
        progress,
    )
    dtype = (
        np.uint8
        if tokenizer.vocabulary <= 2**8
        else np.uint16
        if tokenizer.vocabulary <= 2**16
        else np.uint32
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        splits = {}
        total = sum(len(text) for texts in documents.splits.values() for _, text in texts)
        done = 0
        for split in SPLITS:
            texts = documents.splits[split]
            splits[split] = _write_split(temporary, split, tokenizer, texts, dtype, progress, done, total)
            done += sum(len(text) for _, text in texts)
        if isinstance(tokenizer, BytePairs):
            (temporary / "tokenizer.json").write_text(tokenizer.content, encoding="utf-8")
        write_json(
            temporary / "meta.json",
            {
                "format": FORMAT,
                "corpus": corpus.name.split(":")[0],
                "label": corpus.label,
                "fingerprint": fingerprint,
                "tokenizer": tokenizer.name,
                "tokenizer_digest": tokenizer.digest,
                "vocabulary": tokenizer.vocabulary,
                "dtype": np.dtype(dtype).name,
                "splits": splits,
                "notes": documents.notes,
            },
        )
        _rename_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _rename_folder(temporary: Path, folder: Path) -> None:
    """Put the finished folder in place; another process that was first has made the same content."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not (folder / "meta.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
        else:
            shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(folder.parent)


def _write_split(
    folder: Path,
    split: str,
    tokenizer: Tokenizer,
    texts: list[tuple[str, bytes]],
    dtype: type,
    progress: Progress,
    done: int,
    total: int,
) -> dict[str, Any]:
    starts, count, text_bytes, read = [], 0, 0, 0
    separator: np.ndarray[Any, Any] = np.array([tokenizer.separator], dtype=dtype)
    checksum, spelling = sha256(), Spelling(tokenizer)

    def walk() -> Iterator[bytes]:
        nonlocal read
        for _, text in texts:
            before, read = read, read + len(text)
            if before // _TOLD_EVERY != read // _TOLD_EVERY:
                progress(f"writing {split}", (done + read) / max(1, total))
            yield text

    with open(folder / f"{split}.bin", "wb") as stream:
        lengths = (len(text) for _, text in texts)
        for tokens, length in zip(tokenizer.encode_all(walk()), lengths, strict=True):
            starts.append(count)
            spelling.add(tokens, length)
            parts: tuple[np.ndarray[Any, Any], ...] = (tokens.astype(dtype, copy=False), separator)
            for part in parts:
                data = part.tobytes()
                stream.write(data)
                checksum.update(data)
            count += len(tokens) + 1
            text_bytes += length + 1
        stream.flush()
        os.fsync(stream.fileno())
    places = np.array(starts, dtype=np.uint64)
    places.tofile(folder / f"{split}.documents")
    scales = spelling.scales()
    if scales is not None:
        scales.tofile(folder / f"{split}.scales")
    return {
        "tokens": count,
        "bytes": text_bytes,
        "documents": len(starts),
        "size": count * np.dtype(dtype).itemsize,
        "sha256": checksum.hexdigest(),
        "documents_sha256": digest(places.tobytes()),
        **({} if scales is None else {"scales_sha256": digest(scales.tobytes())}),
    }


def _check_splits(corpus: Corpus, documents: Documents) -> None:
    """Refuse a corpus with an empty split, or one whose splits share a document of any length."""
    owners: dict[bytes, str] = {}
    for split in SPLITS:
        if not any(text.strip() for _, text in documents.splits[split]):
            raise UserError(f"corpus {corpus.label}: the {split} split is empty")
        for name, text in (documents.whole or documents.splits)[split]:
            if len(text) < 64:
                continue
            key = sha256(text).digest()
            if owners.setdefault(key, split) != split:
                raise UserError(
                    f"corpus {corpus.label}: document {name} stands in {owners[key]} and in {split}"
                )
