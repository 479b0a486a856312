"""Tokenizers: bytes, and byte-pair encodings trained on a corpus' train split.

Both are lossless: bytes that are not UTF-8 are tokens of their own, and a text that contains the spelling of a special
token is encoded like any other text. A tokenizer from a file may be lossy (it lowercases, adds spaces, has no token for
some characters); `data/shards.py` then counts the bytes of the text itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headtohead.common.errors import MissingFile, UnreadableFile, UserError
from headtohead.common.files import digest, read_file, read_text, write_atomic
from headtohead.common.numbers import parse_count
from headtohead.common.text import check_unicode
from headtohead.data.text import Array, Progress, Text, chunks

SEPARATOR = "<|end|>"
MAX_TOKENIZER = 256 * 2**20
"""Size limit of a tokenizer file."""


class Tokenizer(Protocol):
    """Encodes text to tokens and decodes tokens to text. Two are equal if they are of one kind and content."""

    name: str
    vocabulary: int
    separator: int
    """The token between documents."""
    digest: str

    def __eq__(self, other: Any) -> bool:
        return type(other) is type(self) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash((type(self), self.digest))

    def encode(self, text: str | bytes) -> Array:
        """Return the tokens of a document, without separator; text is encoded as UTF-8."""
        content = check_unicode(text, "the text").encode() if isinstance(text, str) else text
        return next(self.encode_all([content]))

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[Array]:
        """Yield the tokens of each document, without separator."""
        for _, parts in groupby(self.encode_parts(texts), key=itemgetter(0)):
            yield np.concatenate([part for _, part in parts])

    def encode_parts(self, texts: Iterable[Text]) -> Iterator[tuple[int, Array]]:
        """Yield (document, tokens of its next part), counted from 0; a document has at least one part."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; invalid UTF-8 becomes replacement characters."""

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens, without separators; the encoded text if tokens are not byte-level."""

    def token_bytes(self) -> Array:
        """Return (vocabulary,): the number of text bytes of each token; a separator counts as one."""


class Bytes(Tokenizer):
    """Each byte is a token; documents are separated by the zero byte, which does not occur in text."""

    name = "bytes"
    vocabulary = 256
    separator = 0
    digest = digest("bytes")

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[Array]:
        return (np.frombuffer(text, dtype=np.uint8) for text in texts)

    def encode_parts(self, texts: Iterable[Text]) -> Iterator[tuple[int, Array]]:
        for index, text in enumerate(texts):
            for chunk in chunks(text):
                yield index, np.frombuffer(chunk, dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(map(int, tokens)).decode("utf-8", "replace")

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens).replace(b"\0", b"")

    def token_bytes(self) -> Array:
        return np.ones(256, dtype=np.int64)


# bytes.decode(..., "surrogateescape") maps invalid UTF-8 bytes to these.
_ESCAPED = re.compile("([\udc80-\udcff]+)")


class BytePairs(Tokenizer):
    """A byte-level BPE of the `tokenizers` library, or any tokenizer in its file format."""

    def __init__(self, name: str, content: str) -> None:
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_str(content)
        except Exception as error:
            raise UserError(f"tokenizer {name} cannot be read: {error}") from None
        self.name = name
        self.content = content
        vocabulary = self._library.get_vocab()
        self.vocabulary = len(vocabulary)
        if sorted(vocabulary.values()) != list(range(self.vocabulary)):
            raise UserError(f"tokenizer {name}: token ids are not consecutive from 0")
        self.digest = digest(content)
        separators = [vocabulary[token] for token in (SEPARATOR, "<|endoftext|>") if token in vocabulary]
        if not separators:
            raise UserError(
                f"tokenizer {name} has no {SEPARATOR} or <|endoftext|> token to separate documents"
            )
        self.separator = separators[0]
        self._library.encode_special_tokens = True  # their spelling in a text is plain text
        tokens = [vocabulary.get(character) for character in _byte_alphabet()]
        self._byte_tokens = None if None in tokens else np.array(tokens, dtype=np.uint32)
        """(256,): the token of every byte, or None if the vocabulary is not byte-level."""

    def encode_parts(self, texts: Iterable[Text]) -> Iterator[tuple[int, Array]]:
        """Yield the tokens of each document in parts; encodes batches of about a megabyte on all cores."""
        pending: list[tuple[int, str | bytes]] = []
        size = 0
        for count, text in enumerate(texts):
            for piece in _pieces(text):
                pending += [(count, part) for part in self._parts(piece)]
                size += len(piece)
                if size >= 2**20:
                    yield from self._encode_batch(pending)
                    pending, size = [], 0
        yield from self._encode_batch(pending)

    def _parts(self, piece: bytes) -> list[str | bytes]:
        """Return a piece as text, with invalid UTF-8 as bytes.

        If the vocabulary lacks a token for some byte, invalid UTF-8 becomes replacement characters instead.
        """
        try:
            return [piece.decode("utf-8")]
        except UnicodeDecodeError:
            if self._byte_tokens is None:
                return [piece.decode("utf-8", "replace")]
        parts = _ESCAPED.split(piece.decode("utf-8", "surrogateescape"))
        escaped = "utf-8", "surrogateescape"
        return [part.encode(*escaped) if _ESCAPED.match(part) else part for part in parts if part]

    def _encode_batch(self, pending: list[tuple[int, str | bytes]]) -> Iterator[tuple[int, Array]]:
        texts = [part for _, part in pending if isinstance(part, str)]
        codes = iter(self._library.encode_batch_fast(texts, add_special_tokens=False))
        for owner, part in pending:
            if isinstance(part, str):
                yield owner, np.asarray(next(codes).ids, dtype=np.uint32)
            else:
                assert self._byte_tokens is not None
                yield owner, self._byte_tokens[np.frombuffer(part, dtype=np.uint8)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._library.decode(list(map(int, tokens)), skip_special_tokens=True))

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        parts = [self._spelled[int(token)] for token in tokens]
        known = [part for part in parts if part is not None]
        return b"".join(known) if len(known) == len(parts) else self.decode(tokens).encode("utf-8")

    @cached_property
    def _spelled(self) -> list[bytes | None]:
        """The bytes of each token; None if it contains characters outside the byte alphabet."""
        values = {character: value for value, character in enumerate(_byte_alphabet())}
        found: list[bytes | None] = [None] * self.vocabulary
        for token, index in self._library.get_vocab().items():
            if self._byte_tokens is not None and values.keys() >= set(token):
                found[index] = bytes(values[character] for character in token)
        found[self.separator] = b""
        return found

    def token_bytes(self) -> Array:
        lengths = np.ones(self.vocabulary, dtype=np.int64)
        for token, index in self._library.get_vocab().items():
            lengths[index] = 1 if index == self.separator else len(token)
        return lengths


def _byte_alphabet() -> list[str]:
    """Return the character that represents each byte in a byte-level vocabulary (GPT-2's table).

    Printable Latin-1 characters represent themselves; the other bytes map to characters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


def _pieces(text: Text, size: int = 2**15) -> Iterator[bytes]:
    """Yield a document in pieces cut after line ends, so that long ones are encoded on all cores in little memory."""
    start, stop = 0, -1
    while stop < len(text):
        stop = len(text) if start + size >= len(text) else _line_end(text, start + size)
        yield text[start:stop]
        start = stop


def _line_end(text: Text, start: int) -> int:
    """Return the end of the line at `start`; in a file that is read in parts, at most 1 MiB after it."""
    if isinstance(text, bytes):
        return text.find(b"\n", start) + 1 or len(text)
    for size in (2**12, 2**20):  # most lines are short
        found = text[start : start + size]
        if end := found.find(b"\n") + 1:
            return start + end
    return start + len(found)


def parse_tokenizer(given: str) -> tuple[str, int | str]:
    """Return (kind, vocabulary or path) of `bytes`, `bpe:16384` or `file:tokenizer.json`."""
    kind, _, rest = given.partition(":")
    if kind == "bytes" and not rest:
        return "bytes", 256
    if kind == "bpe" and rest:
        vocabulary = parse_count(rest)
        if not 300 <= vocabulary <= 2**20:
            raise UserError(f"tokenizer bpe:{rest}: the vocabulary must be between 300 and 1,048,576")
        return "bpe", vocabulary
    if kind == "file" and rest:
        return "file", rest
    raise UserError(f"unknown tokenizer '{given}' (allowed: bytes, bpe:VOCABULARY, file:TOKENIZER.json)")


def make_tokenizer(
    given: str, fingerprint: str, cache: Path, train: Callable[[], Iterable[Text]], progress: Progress
) -> Tokenizer:
    """Return the tokenizer; a BPE is trained on the train split once and cached by its hash."""
    kind, value = parse_tokenizer(given)
    if kind == "bytes":
        return Bytes()
    if kind == "file":
        path = Path(str(value)).expanduser()
        try:
            return BytePairs(given, read_text(path, MAX_TOKENIZER, links=True))
        except MissingFile:
            raise UserError(f"no such tokenizer file: {path}") from None
    key = digest(f"bpe-1/{value}/{fingerprint}")[:16]
    path = cache / "tokenizers" / f"{key}.json"
    checksum = path.with_suffix(".sha256")
    try:
        content = read_text(path, MAX_TOKENIZER)
        whole = read_file(checksum, 1024).strip() == digest(content).encode()
    except UnreadableFile:  # missing or damaged
        whole = False
    if not whole:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _train(int(value), train(), progress)
        write_atomic(path, content)
        write_atomic(checksum, digest(content) + "\n")
    return BytePairs(given, content)


_ONE_SPACE = re.compile(r"(?<=\S) (?=\S)")


def _cut_at_spaces(text: str, size: int = 2**15) -> Iterator[str]:
    """Yield a text in parts that have the same words, because a word includes the space before it.

    A trainer's thread takes about 80 bytes of memory for each byte of its text, and there is a thread for every core.
    """
    start = 0
    while cut := _ONE_SPACE.search(text, start + size):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


# Merges learned from 64 MB of text hardly differ from those of the whole corpus, and training time grows with the text.
_TRAINING_BYTES = 64 * 2**20


def _train(vocabulary: int, texts: Iterable[Text], progress: Progress) -> str:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def pieces() -> Iterator[str]:
        read = 0
        for text in texts:
            for piece in _pieces(text):
                shown = piece.decode("utf-8", "replace")
                yield from _cut_at_spaces(shown)
                read += len(shown)
                if read >= _TRAINING_BYTES:
                    return
                progress(f"training a BPE of {vocabulary:,} tokens", min(0.99, read / _TRAINING_BYTES))

    library.train_from_iterator(pieces(), trainer)
    if library.get_vocab_size() != vocabulary:
        raise UserError(
            f"the train split yields only {library.get_vocab_size():,} tokens; choose at most that vocabulary"
        )
    return str(library.to_str())
