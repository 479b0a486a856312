"""Token shards: one memory-mapped, checksummed file per split, documents packed with separators."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from headtohead.common.errors import DamagedFile, UnreadableFile, UserError
from headtohead.common.files import (
    digest,
    digest_file,
    naming,
    read_file,
    read_json,
    read_text,
    sync_directory,
    write_atomic,
    write_json,
)
from headtohead.data.corpora import SPLITS, Corpus, Documents, Progress, _silent, find_corpus
from headtohead.data.text import Text, chunks, is_blank
from headtohead.data.tokenizers import (
    MAX_TOKENIZER,
    BytePairs,
    Bytes,
    Tokenizer,
    make_tokenizer,
    parse_tokenizer,
)

FORMAT = 3
_PROGRESS_EVERY = 2**16
"""Bytes between progress updates, because a corpus may have a million short documents."""
_MAX_TABLE = 2**34
"""Size limit of the tables of a shard, which may have an entry per document."""


def cache_dir(given: str | Path | None = None) -> Path:
    """Return the directory of prepared data: the argument, H2H_CACHE, or the user's cache directory."""
    if chosen := given or os.environ.get("H2H_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headtohead"


@dataclass(frozen=True)
class Split:
    """The tokens of one split."""

    tokens: np.ndarray[Any, Any]
    """Memory-mapped; all documents packed, each followed by a separator."""
    documents: np.ndarray[Any, Any]
    """The start of each document."""
    bytes: int
    """Bytes of text; a separator counts as one."""
    scales: np.ndarray[Any, Any] | None = None
    """Per document: bytes of text divided by the bytes that the tokenizer's table gives for its tokens; None if the
    table is exact for all documents."""

    def token_lengths(self, table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return (tokens,): the bytes of text of each token, from a tokenizer's table (vocabulary,).

        Their sum over a document is its true number of bytes, for any tokenizer.
        """
        lengths: np.ndarray[Any, Any] = table[np.asarray(self.tokens)]
        if self.scales is None:
            return lengths
        counts = np.diff([*self.documents.astype(np.int64), len(self.tokens)])
        return lengths * np.repeat(self.scales[: len(counts)], counts)


class Spelling:
    """Compares the bytes of documents with the bytes that the tokenizer's table gives for their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._table = None if isinstance(tokenizer, Bytes) else tokenizer.token_bytes()
        self._scales: list[float] = []
        self._implied = 0

    def add(self, tokens: np.ndarray[Any, Any]) -> None:
        """Add the next tokens of a document."""
        if self._table is not None:
            parts = range(0, len(tokens), 2**22)
            self._implied += sum(int(self._table[tokens[at : at + 2**22]].sum()) for at in parts)

    def end(self, size: int) -> None:
        """End a document of `size` bytes; a separator counts as one more, in text and tokens."""
        if self._table is not None:
            self._scales.append((size + 1) / (self._implied + 1))
            self._implied = 0

    def scales(self) -> np.ndarray[Any, Any] | None:
        """Return the value for `Split.scales`."""
        exact = all(scale == 1.0 for scale in self._scales)
        return None if exact else np.array(self._scales, dtype=np.float64)


@dataclass(frozen=True)
class Prepared:
    """A tokenized corpus, ready for windows."""

    name: str
    label: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: dict[str, Split]
    folder: Path
    notes: dict[str, Any]

    @property
    def content(self) -> str:
        """The digest of corpus and tokenizer content."""
        return digest(f"{self.fingerprint}/{self.tokenizer.digest}")


def prepare(
    name: str,
    tokenizer: str = "bytes",
    *,
    data_dir: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = _silent,
) -> Prepared:
    """Return the tokenized corpus; made the first time, then found in the cache by its hash."""
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
            # Shards depend only on the corpus, whose hash names the folder, so it is safe to make them again.
            progress(f"{error}; preparing it again", 0.0)
            _set_aside(folder)
    _make(corpus, fingerprint, tokenizer, root, folder, progress)
    return load(folder, corpus, progress)


def load(folder: Path, corpus: Corpus, progress: Progress = _silent) -> Prepared:
    """Return a prepared corpus; raise an error that names a missing or changed shard."""
    try:
        return _load(folder, read_json(folder / "meta.json", limit=_MAX_TABLE), corpus)
    except DamagedFile:
        raise
    except (UnreadableFile, KeyError, TypeError, ValueError, OSError) as error:
        raise DamagedFile(f"damaged shards {folder}: {type(error).__name__}: {error}") from None


def _load(folder: Path, meta: dict[str, Any], corpus: Corpus) -> Prepared:
    tokenizer: Tokenizer = Bytes()
    if meta["tokenizer"] != "bytes":
        path = folder / "tokenizer.json"
        content = read_text(path, MAX_TOKENIZER)
        if digest(content) != meta["tokenizer_digest"]:
            raise DamagedFile(f"changed tokenizer {path}: it does not match its checksum")
        tokenizer = BytePairs(meta["tokenizer"], content)
    splits = {}
    for split in SPLITS:
        facts = meta["splits"][split]
        path = folder / f"{split}.bin"
        if digest_file(path) != facts["sha256"]:
            raise DamagedFile(f"changed shard {path}: it does not match its checksum")
        tokens = (
            np.memmap(path, dtype=np.dtype(meta["dtype"]), mode="r")
            if facts["size"]
            else np.empty(0, meta["dtype"])
        )
        documents = np.frombuffer(read_file(folder / f"{split}.documents", _MAX_TABLE), dtype=np.uint64)
        if digest(documents.tobytes()) != facts["documents_sha256"]:
            raise DamagedFile(f"changed shard {folder / split}.documents: it does not match its checksum")
        scales = None
        if "scales_sha256" in facts:
            scales = np.frombuffer(read_file(folder / f"{split}.scales", _MAX_TABLE), dtype=np.float64)
            if digest(scales.tobytes()) != facts["scales_sha256"] or len(scales) != len(documents):
                raise DamagedFile(f"changed shard {folder / split}.scales: it does not match its checksum")
        splits[split] = Split(tokens, documents, facts["bytes"], scales)
    return Prepared(corpus.name, meta["label"], meta["fingerprint"], tokenizer, splits, folder, meta["notes"])


def _set_aside(folder: Path) -> None:
    """Rename and remove a damaged folder; a process that reads it keeps the files it has open."""
    away = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        os.rename(folder, away)
    except FileNotFoundError:
        return
    shutil.rmtree(away, ignore_errors=True)


def _tokenizer_file(given: str) -> str:
    kind, value = parse_tokenizer(given)
    path = Path(str(value)).expanduser()
    return digest_file(path, links=True) if kind == "file" and path.exists() else ""


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
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with naming(folder), _temporary(temporary):
        splits = {}
        total = sum(len(text) for texts in documents.splits.values() for _, text in texts)
        done = 0
        for split in SPLITS:
            texts = documents.splits[split]
            splits[split] = _write_split(temporary, split, tokenizer, texts, dtype, progress, done, total)
            done += sum(len(text) for _, text in texts)
        if isinstance(tokenizer, BytePairs):
            write_atomic(temporary / "tokenizer.json", tokenizer.content)
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


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """Create a folder, and delete it after an error."""
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _rename_folder(temporary: Path, folder: Path) -> None:
    """Rename the finished folder to its final name, unless another process made the same content first."""
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
    texts: Sequence[tuple[str, Text]],
    dtype: type,
    progress: Progress,
    done: int,
    total: int,
) -> dict[str, Any]:
    starts, count, text_bytes, read = [], 0, 0, 0
    separator: np.ndarray[Any, Any] = np.array([tokenizer.separator], dtype=dtype)
    checksum, spelling = sha256(), Spelling(tokenizer)
    lengths = [len(text) for _, text in texts]

    def walk() -> Iterator[Text]:
        nonlocal read
        for _, text in texts:
            before, read = read, read + len(text)
            if before // _PROGRESS_EVERY != read // _PROGRESS_EVERY:
                progress(f"writing {split}", (done + read) / max(1, total))
            yield text

    with open(folder / f"{split}.bin", "wb") as stream:

        def write(tokens: np.ndarray[Any, Any]) -> None:
            nonlocal count
            data = tokens.astype(dtype, copy=False).tobytes()
            stream.write(data)
            checksum.update(data)
            count += len(tokens)

        for index, parts in groupby(tokenizer.encode_parts(walk()), key=itemgetter(0)):
            starts.append(count)
            for _, tokens in parts:
                spelling.add(tokens)
                write(tokens)
            write(separator)
            spelling.end(lengths[index])
            text_bytes += lengths[index] + 1
        stream.flush()
        os.fsync(stream.fileno())
    offsets = np.array(starts, dtype=np.uint64)
    write_atomic(folder / f"{split}.documents", offsets.tobytes())
    scales = spelling.scales()
    if scales is not None:
        write_atomic(folder / f"{split}.scales", scales.tobytes())
    return {
        "tokens": count,
        "bytes": text_bytes,
        "documents": len(starts),
        "size": count * np.dtype(dtype).itemsize,
        "sha256": checksum.hexdigest(),
        "documents_sha256": digest(offsets.tobytes()),
        **({} if scales is None else {"scales_sha256": digest(scales.tobytes())}),
    }


def _check_splits(corpus: Corpus, documents: Documents) -> None:
    """Raise if a split is empty, or if two splits share a document of at least 64 bytes."""
    owners: dict[bytes, str] = {}
    for split in SPLITS:
        if all(is_blank(text) for _, text in documents.splits[split]):
            raise UserError(f"corpus {corpus.label}: the {split} split is empty")
        for name, text in (documents.whole or documents.splits)[split]:
            if len(text) < 64:
                continue
            digester = sha256()
            for chunk in chunks(text):
                digester.update(chunk)
            key = digester.digest()
            if owners.setdefault(key, split) != split:
                raise UserError(
                    f"corpus {corpus.label}: document {name} is in both {owners[key]} and {split}"
                )
