"""Bytes, and byte-pair encodings trained on a corpus' train split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headtohead.common.errors import UserError
from headtohead.common.files import digest, digest_file, write_atomic
from headtohead.common.numbers import parse_count

SEPARATOR = "<|end|>"


class Tokenizer(Protocol):
    """Text to tokens and back."""

    name: str
    vocabulary: int
    separator: int
    """The token that stands between documents."""
    digest: str

    def encode(self, text: bytes) -> np.ndarray[Any, Any]:
        """Return the tokens of a document, without separator."""

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the tokens of each document, without separator."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def token_bytes(self) -> np.ndarray[Any, Any]:
        """Return (vocabulary,): how many bytes of text each token stands for; a separator counts as one."""


class Bytes:
    """Each byte is a token; documents are separated by the zero byte, which text does not hold."""

    name = "bytes"
    vocabulary = 256
    separator = 0
    digest = digest("bytes")

    def encode(self, text: bytes) -> np.ndarray[Any, Any]:
        """Return the bytes."""
        return np.frombuffer(text, dtype=np.uint8)

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the bytes of each document."""
        return map(self.encode, texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; bytes that form no character are shown as such."""
        return bytes(tokens).decode("utf-8", "replace")

    def token_bytes(self) -> np.ndarray[Any, Any]:
        """One each."""
        return np.ones(256, dtype=np.int64)


class BytePairs:
    """A byte-level BPE of the `tokenizers` library."""

    def __init__(self, name: str, content: str) -> None:
        from tokenizers import Tokenizer as Library

        try:
            self._library = Library.from_str(content)
        except Exception as error:
            raise UserError(f"tokenizer {name} cannot be read: {error}") from None
        self.name = name
        self.content = content
        self.vocabulary = self._library.get_vocab_size()
        if sorted(self._library.get_vocab().values()) != list(range(self.vocabulary)):
            raise UserError(f"tokenizer {name}: its tokens are not numbered from 0 without gaps")
        self.digest = digest(content)
        separator = self._library.token_to_id(SEPARATOR)
        if separator is None:
            separator = self._library.token_to_id("<|endoftext|>")
        if separator is None:
            raise UserError(
                f"tokenizer {name} has no {SEPARATOR} or <|endoftext|> token to separate documents with"
            )
        self.separator = int(separator)

    def encode(self, text: bytes) -> np.ndarray[Any, Any]:
        """Return the tokens of a document."""
        return next(self.encode_all([text]))

    def encode_all(self, texts: Iterable[bytes]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the tokens of each document, batches of about a megabyte encoded on all cores."""
        pending: list[tuple[int, str]] = []
        held: list[tuple[int, np.ndarray[Any, Any]]] = []
        size = 0
        for count, text in enumerate(texts):
            for piece in _pieces(text):
                pending.append((count, piece))
                size += len(piece)
                if size >= 2**20:
                    held += self._encode_batch(pending)
                    pending, size = [], 0
                    while held and held[0][0] < count:
                        yield _joined(held)
        held += self._encode_batch(pending)
        while held:
            yield _joined(held)

    def _encode_batch(self, pending: list[tuple[int, str]]) -> list[tuple[int, np.ndarray[Any, Any]]]:
        codes = self._library.encode_batch_fast([piece for _, piece in pending], add_special_tokens=False)
        return [
            (owner, np.asarray(code.ids, dtype=np.uint32))
            for (owner, _), code in zip(pending, codes, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; separators are left out."""
        return str(self._library.decode(list(map(int, tokens)), skip_special_tokens=True))

    def token_bytes(self) -> np.ndarray[Any, Any]:
        """Characters of the byte alphabet stand for one byte each."""
        lengths = np.ones(self.vocabulary, dtype=np.int64)
        for token, place in self._library.get_vocab().items():
            lengths[place] = 1 if place == self.separator else len(token)
        return lengths


def _joined(held: list[tuple[int, np.ndarray[Any, Any]]]) -> np.ndarray[Any, Any]:
    """Take the first document's pieces off the list and return them as one."""
    owner = held[0][0]
    stop = next((place for place, (other, _) in enumerate(held) if other != owner), len(held))
    parts = [part for _, part in held[:stop]]
    del held[:stop]
    return np.concatenate(parts)


def _pieces(text: bytes, size: int = 2**15) -> Iterator[str]:
    """Yield a document in pieces cut behind line ends: long ones are then encoded on all cores in little memory."""
    start = 0
    while start < len(text) or start == 0:
        stop = len(text) if start + size >= len(text) else text.find(b"\n", start + size) + 1 or len(text)
        yield text[start:stop].decode("utf-8", "replace")
        start = stop
        if not text:
            return


def parse_tokenizer(given: str) -> tuple[str, int | str]:
    """Return (kind, vocabulary or path) of `bytes`, `bpe:16384` or `file:tokenizer.json`."""
    kind, _, rest = given.partition(":")
    if kind == "bytes" and not rest:
        return "bytes", 256
    if kind == "bpe" and rest:
        vocabulary = parse_count(rest)
        if not 300 <= vocabulary <= 2**20:
            raise UserError(f"tokenizer bpe:{rest}: the vocabulary must lie between 300 and 1,048,576")
        return "bpe", vocabulary
    if kind == "file" and rest:
        return "file", rest
    raise UserError(f"unknown tokenizer '{given}' (allowed: bytes, bpe:VOCABULARY, file:TOKENIZER.json)")


def make_tokenizer(
    given: str,
    fingerprint: str,
    cache: Path,
    train: Callable[[], Iterable[bytes]],
    progress: Callable[[str, float], None],
) -> Tokenizer:
    """Return the tokenizer; a BPE is trained on the train split once and kept by its hash."""
    kind, value = parse_tokenizer(given)
    if kind == "bytes":
        return Bytes()
    if kind == "file":
        path = Path(str(value)).expanduser()
        if not path.is_file():
            raise UserError(f"no such tokenizer file: {path}")
        return BytePairs(given, path.read_text(encoding="utf-8"))
    key = digest(f"bpe-1/{value}/{fingerprint}")[:16]
    path = cache / "tokenizers" / f"{key}.json"
    seal = path.with_suffix(".sha256")
    if not path.is_file() or not seal.is_file() or seal.read_text().strip() != digest_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _train(int(value), train(), progress)
        write_atomic(path, content)
        write_atomic(seal, digest(content) + "\n")
    return BytePairs(given, path.read_text(encoding="utf-8"))


# Merges learnt from 64 MB of text hardly differ from those of all of it, and training time grows with the text.
_TRAINING_BYTES = 64 * 2**20


def _train(vocabulary: int, texts: Iterable[bytes], progress: Callable[[str, float], None]) -> str:
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
                yield piece
                read += len(piece)
                if read >= _TRAINING_BYTES:
                    return
                progress(f"training a BPE of {vocabulary:,} tokens", min(0.99, read / _TRAINING_BYTES))

    library.train_from_iterator(pieces(), trainer)
    if library.get_vocab_size() != vocabulary:
        raise UserError(
            f"the train split yields only {library.get_vocab_size():,} tokens; choose a vocabulary up to that"
        )
    return str(library.to_str())
