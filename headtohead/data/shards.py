"""Token shards: one memory-mapped, checksummed file per split, documents packed with separators."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from headtohead.common.errors import DamagedFile, UnreadableFile, UserError, unknown
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
from headtohead.data.corpora import Corpus, Documents, find_corpus
from headtohead.data.lines import text_lengths
from headtohead.data.locate import cache_dir
from headtohead.data.text import SPLITS, Array, Progress, Text, chunks, is_blank, silent
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


@dataclass(frozen=True)
class Split:
    """The tokens of one split."""

    tokens: Array
    """Memory-mapped; all documents packed, each followed by a separator."""
    documents: Array
    """The start of each document."""
    bytes: int
    """Bytes of text; a separator counts as one."""
    scales: Array | None = None
    """Per document: bytes of text divided by the bytes that the tokenizer's table gives for its tokens; None if the
    table is exact for all documents."""

    def token_lengths(self, table: Array) -> Array:
        """Return (tokens,): the bytes of text of each token, from a tokenizer's table (vocabulary,).

        Their sum over a document is its true number of bytes, for any tokenizer.
        """
        lengths: Array = table[np.asarray(self.tokens)]
        if self.scales is None:
            return lengths
        counts = np.diff([*self.documents.astype(np.int64), len(self.tokens)])
        return lengths * np.repeat(self.scales[: len(counts)], counts)


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

    def cached(
        self,
        name: str,
        version: int,
        key: str,
        columns: Iterable[str],
        make: Callable[[], Mapping[str, float | None]],
    ) -> dict[str, float | None]:
        """Return numbers by column that are stored with the shards; made the first time, and when `version` changes."""
        path = self.folder / f"{name}.json"
        try:
            stored = read_json(path)
            if stored["version"] == version and stored[key].keys() == set(columns):
                return {name: None if value is None else float(value) for name, value in stored[key].items()}
        except (UserError, KeyError, TypeError, AttributeError, ValueError):
            pass  # missing or damaged: made again
        found = make()
        write_json(path, {"version": version, key: found})
        return dict(found)


def prepare(
    name: str,
    tokenizer: str = "bytes",
    *,
    data_dir: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = silent,
) -> Prepared:
    """Return the tokenized corpus; made the first time, then found in the cache by its hash."""
    root = cache_dir(cache)
    parse_tokenizer(tokenizer)
    if data_dir and (folder := Path(data_dir) / prepared_place(name, tokenizer)).is_dir():
        return _load(folder, name)
    corpus = find_corpus(name, data_dir, root)
    fingerprint = corpus.fingerprint()
    key = digest(f"{FORMAT}/{fingerprint}/{tokenizer}/{_tokenizer_file(tokenizer)}")[:20]
    folder = root / "corpora" / key
    if (folder / "meta.json").is_file():
        try:
            return _load(folder, corpus.name)
        except DamagedFile as error:
            # Shards depend only on the corpus, whose hash names the folder, so it is safe to make them again.
            progress(f"{error}; preparing it again", 0.0)
            _remove(folder)
    _make(corpus, fingerprint, tokenizer, root, folder, progress)
    return _load(folder, corpus.name)


def prepared_place(name: str, tokenizer: str) -> str:
    """Return the path below a data directory at which a corpus may be given in its prepared form."""
    return f"prepared/{digest(f'{name}/{tokenizer}')[:20]}"


def split_note(corpus: Prepared) -> str:
    """Return how the documents of a user's text were split; empty for a named corpus."""
    if not corpus.name.startswith("file:"):
        return ""
    counts = {split: len(part.documents) for split, part in corpus.splits.items()}
    if set(counts.values()) == {1}:  # documents that are assigned by hash are more
        total = sum(part.bytes for part in corpus.splits.values())
        shares = ", ".join(f"{part.bytes / total:.0%} {split}" for split, part in corpus.splits.items())
        number = corpus.notes.get("documents", 1)
        what = "1 document" if number == 1 else f"{number} documents, joined"
        return f"{corpus.label}: {what}, cut in order: {shares}"
    found = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    return f"{corpus.label}: {sum(counts.values()):,} documents, assigned by a hash of their text: {found}"


def tokens_of(
    corpus: str,
    split: str,
    tokenizer: Tokenizer,
    *,
    data_dir: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = silent,
) -> Split:
    """Return one split of a corpus encoded with `tokenizer`, to score a model on a corpus other than its own.

    The text is read from the cached corpus in bytes, because reading a large corpus again takes a minute.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    text = prepare(corpus, "bytes", data_dir=data_dir, cache=cache, progress=progress).splits[split]
    if isinstance(tokenizer, Bytes):
        return text
    edges = [(a, b - 1) for a, b in pairwise([*map(int, text.documents), len(text.tokens)])]
    documents = (text.tokens[a:b].tobytes() for a, b in edges)
    parts: list[Array] = []
    starts, scales = _pack(
        tokenizer, documents, [b - a for a, b in edges], lambda tokens: parts.append(tokens.astype(np.int64))
    )
    return Split(np.concatenate(parts), starts, text.bytes, scales)


def _load(folder: Path, name: str) -> Prepared:
    """Return a prepared corpus; raise an error that names a missing or changed shard."""
    try:
        meta = read_json(folder / "meta.json", limit=_MAX_TABLE)
        tokenizer: Tokenizer = Bytes()
        if meta["tokenizer"] != "bytes":
            path = folder / "tokenizer.json"
            content = read_text(path, MAX_TOKENIZER)
            if digest(content) != meta["tokenizer_digest"]:
                raise DamagedFile(f"changed tokenizer {path}: it does not match its checksum")
            tokenizer = BytePairs(meta["tokenizer"], content)
        splits = {
            split: _load_split(folder / split, meta["dtype"], meta["splits"][split]) for split in SPLITS
        }
        label, fingerprint, notes = meta["label"], meta["fingerprint"], meta["notes"]
        return Prepared(name, label, fingerprint, tokenizer, splits, folder, notes)
    except DamagedFile:
        raise
    except (UnreadableFile, KeyError, TypeError, ValueError, OSError) as error:
        raise DamagedFile(f"damaged shards {folder}: {type(error).__name__}: {error}") from None


def _load_split(stem: Path, dtype: str, facts: dict[str, Any]) -> Split:
    path = stem.with_suffix(".bin")
    if digest_file(path) != facts["sha256"]:
        raise DamagedFile(f"changed shard {path}: it does not match its checksum")
    tokens = np.memmap(path, dtype=np.dtype(dtype), mode="r") if facts["size"] else np.empty(0, dtype)
    documents = _table(stem.with_suffix(".documents"), np.uint64, facts["documents_sha256"])
    scales = None
    if "scales_sha256" in facts:
        scales = _table(stem.with_suffix(".scales"), np.float64, facts["scales_sha256"])
        if len(scales) != len(documents):
            raise DamagedFile(f"damaged shard {stem}.scales: it does not have a number for every document")
    return Split(tokens, documents, facts["bytes"], scales)


def _table(path: Path, dtype: type, checksum: str) -> Array:
    content = read_file(path, _MAX_TABLE)
    if digest(content) != checksum:
        raise DamagedFile(f"changed shard {path}: it does not match its checksum")
    return np.frombuffer(content, dtype=dtype)


def _temporary_name(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def _remove(folder: Path) -> None:
    """Rename and remove a damaged folder; a process that reads it keeps the files it has open."""
    away = _temporary_name(folder)
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
    train = (documents.whole or documents.splits)["train"]
    tokenizer = make_tokenizer(
        tokenizer_name, fingerprint, root, lambda: (text for _, text in train), progress
    )
    dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
    lengths = {split: text_lengths(documents.splits[split]) for split in SPLITS}
    total = sum(map(sum, lengths.values()))
    done = 0

    def walk(split: str) -> Iterator[Text]:
        nonlocal done
        for _, text in documents.splits[split]:
            before, done = done, done + len(text)
            if before // _PROGRESS_EVERY != done // _PROGRESS_EVERY:
                progress(f"writing {split}", done / max(1, total))
            yield text

    with naming(folder), _new_folder(folder) as temporary:
        splits = {}
        for split in SPLITS:
            splits[split] = _write_split(temporary / split, tokenizer, walk(split), lengths[split], dtype)
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
                "dtype": dtype.name,
                "splits": splits,
                "notes": documents.notes,
            },
        )


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed at the end, unless another process made the same content first."""
    temporary = _temporary_name(folder)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / "meta.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(temporary, folder)
        sync_directory(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_split(
    stem: Path, tokenizer: Tokenizer, texts: Iterable[Text], lengths: Sequence[int], dtype: np.dtype[Any]
) -> dict[str, Any]:
    """Write the files of a split, and return what `meta.json` says about them."""
    checksum, count = sha256(), 0
    with open(stem.with_suffix(".bin"), "wb") as stream:

        def write(tokens: Array) -> None:
            nonlocal count
            data = tokens.astype(dtype, copy=False).tobytes()
            stream.write(data)
            checksum.update(data)
            count += len(tokens)

        starts, scales = _pack(tokenizer, texts, lengths, write)
        stream.flush()
        os.fsync(stream.fileno())
    write_atomic(stem.with_suffix(".documents"), starts.tobytes())
    if scales is not None:
        write_atomic(stem.with_suffix(".scales"), scales.tobytes())
    return {
        "tokens": count,
        "bytes": sum(lengths) + len(lengths),
        "documents": len(starts),
        "size": count * dtype.itemsize,
        "sha256": checksum.hexdigest(),
        "documents_sha256": digest(starts.tobytes()),
        **({} if scales is None else {"scales_sha256": digest(scales.tobytes())}),
    }


def _pack(
    tokenizer: Tokenizer, texts: Iterable[Text], lengths: Sequence[int], write: Callable[[Array], None]
) -> tuple[Array, Array | None]:
    """Write the tokens of documents of these lengths, each followed by a separator.

    Returns the start of each document, and `Split.scales`; a separator counts as one byte, in text and tokens.
    """
    separator = np.array([tokenizer.separator])
    table = None if isinstance(tokenizer, Bytes) else tokenizer.token_bytes()
    starts, scales, count = [], [], 0
    for index, parts in groupby(tokenizer.encode_parts(texts), key=itemgetter(0)):
        starts.append(count)
        implied = 0
        for _, tokens in parts:
            write(tokens)
            count += len(tokens)
            if table is not None:
                slices = (tokens[at : at + 2**22] for at in range(0, len(tokens), 2**22))
                implied += sum(int(table[part].sum()) for part in slices)
        write(separator)
        count += 1
        scales.append((lengths[index] + 1) / (implied + 1))
    exact = table is None or all(scale == 1.0 for scale in scales)
    return np.array(starts, dtype=np.uint64), None if exact else np.array(scales, dtype=np.float64)


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
