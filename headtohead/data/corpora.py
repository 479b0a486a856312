"""Corpora by name: documents in disjoint train, valid and test splits."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError, unknown
from headtohead.common.files import canonical_json, digest, digest_file, read_file
from headtohead.data import hub, wiki
from headtohead.data.get.recorded import identity
from headtohead.data.lines import TextOf, index_lines
from headtohead.data.text import (
    SPLITS,
    TEXT_SUFFIXES,
    Progress,
    Text,
    are_large_lines,
    file_documents,
    hashed_split,
    is_blank,
    kind_of,
    large_text,
    part_of_text,
    read_bytes,
    read_json_lines,
    row_text,
    silent,
)

Splits = Mapping[str, Sequence[tuple[str, Text]]]
"""(name, text) of each document by split."""


@dataclass
class Documents:
    """The content of a corpus, and notes on how it was made."""

    splits: Splits
    notes: dict[str, object] = field(default_factory=dict)
    whole: Splits | None = None
    """The original documents if `splits` holds pieces of them; pieces may be equal across splits, documents may not."""


@dataclass(frozen=True)
class Corpus:
    """A corpus: what identifies its content, and how to read it."""

    name: str
    label: str
    files: tuple[Path, ...]
    """Files whose bytes determine the content."""
    read: Callable[[Progress], Documents]
    rule: str = "1"
    """Version of the reader; bumped when the same files are read differently."""
    topic: Callable[[str], str] | None = None
    """Maps a document's name to its topic, if the corpus has topics."""

    def fingerprint(self) -> str:
        """Return the digest that identifies the content: every file and the reader's rule."""
        own = self.name == "stdlib" or self.name.startswith("file:")
        listing = [
            [path.name, digest_file(path, links=True)] if own else [*identity(path)] for path in self.files
        ]
        return digest(canonical_json([self.name.split(":")[0], self.rule, listing]))


@dataclass(frozen=True)
class Kind:
    """A named corpus: a one-line description, its files, and their reader."""

    about: str
    files: dict[str, str]
    """Maps a split (or another key of the reader) to a file under the data directory: `a.xz|b` is a.xz, else a, else b."""
    read: Callable[[dict[str, Path], Progress], Documents]
    rule: str = "1"


def corpus_names() -> dict[str, str]:
    """Return the named corpora with a one-line description of each."""
    return {
        "stdlib": "standard-library sources of the running Python, without tests; always available",
        "file:PATH": "a text file, JSON lines with a text field, or a directory of them; also .gz and .xz; also as PATH",
        "coherence:DIAL(CORPUS,...)": "the same pieces of several domains, mixed (DIAL 0) to coherent (DIAL 1)",
        "first:BYTES(CORPUS)": "a corpus with only its first BYTES to train on, such as first:9M(wiki-prose)",
        "first:BYTES/HELD(CORPUS)": "the same with the first HELD bytes of valid and of test: first:20M/1M(enwik8)",
        **{name: kind.about for name, kind in _KINDS.items()},
    }


def find_corpus(name: str, data_dir: str | Path | None = None, cache: Path | None = None) -> Corpus:
    """Return the corpus of that name; its files are searched in the data directory, then on the hub."""
    name = _with_prefix(name)
    if name == "stdlib":
        return _stdlib()
    if name.startswith("file:"):
        return _from_path(Path(name.removeprefix("file:")).expanduser())
    check_known(name)
    if name.startswith("coherence:"):
        from headtohead.data.coherence import coherence_corpus  # avoids a circular import

        return coherence_corpus(name, lambda source: find_corpus(source, data_dir, cache))
    if name.startswith("first:"):
        from headtohead.data.first import first_corpus  # avoids a circular import

        return first_corpus(name, lambda source: find_corpus(source, data_dir, cache))
    kind = _KINDS[name]
    paths, from_hub = hub.find_files("corpus", name, kind.files, data_dir, cache)
    label, read, rule, files = name, kind.read, kind.rule, tuple(paths[key] for key in sorted(paths))
    if from_hub:
        label, read, rule, files = f"{name} (hub)", _read_lines, "hub1", tuple(paths.values())
    return Corpus(name, label, files, lambda progress: read(paths, progress), rule)


def check_known(name: str) -> None:
    """Raise if no corpus has that name; does not check that its files exist."""
    name = _with_prefix(name)
    if sources := source_names(name):
        for source in sources:
            check_known(source)
    elif name != "stdlib" and not name.startswith("file:") and name not in _KINDS:
        raise unknown("corpus", name, corpus_names())


def source_names(name: str) -> tuple[str, ...]:
    """Return the corpora that a coherence corpus or the first bytes of a corpus are made of; empty for any other name."""
    if name.startswith("coherence:"):
        from headtohead.data.coherence import parse_dial

        return parse_dial(name).sources
    if name.startswith("first:"):
        from headtohead.data.first import parse_first

        return (parse_first(name).source,)
    return ()


def stable_name(name: str) -> str:
    """Return a name that means the same corpus from any directory: paths are made absolute."""
    name = _with_prefix(name)
    if name.startswith("file:"):
        return f"file:{Path(name[5:]).expanduser().resolve()}"
    if name.startswith("coherence:"):
        from headtohead.data.coherence import parse_dial

        dial = parse_dial(name)
        return dial.text(tuple(map(stable_name, dial.sources)))
    if name.startswith("first:"):
        from headtohead.data.first import parse_first

        first = parse_first(name)
        return first.text(stable_name(first.source))
    return name


def corpus_files(name: str) -> dict[str, str]:
    """Return the files of a named corpus, as in `Kind.files`; empty for any other name."""
    return _KINDS[name].files if name in _KINDS else {}


def _with_prefix(name: str) -> str:
    """Return `file:PATH` for a path that is given without the prefix: it has a slash or a text suffix, or it exists."""
    if name in ("stdlib", *_KINDS) or name.startswith(("file:", "coherence:", "first:")):
        return name
    path = Path(name).expanduser()
    suffixes = (*TEXT_SUFFIXES, ".jsonl", ".ndjson")
    is_path = os.sep in name or kind_of(path) in suffixes or (name and path.exists())
    return f"file:{name}" if is_path else name


# --- the embedded default ------------------------------------------------------------------------------------------

_LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "lib2to3", "ensurepip"}
_LEFT_OUT |= {"site-packages", "dist-packages"}
_HELD_OUT_BYTES = 128 * 1024


def _stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    names = {name: names[name] for name in sorted(names) if not _LEFT_OUT.intersection(name.split("/"))}
    version = ".".join(map(str, sys.version_info[:3]))
    label, files = f"stdlib@{version}", tuple(names.values())
    return Corpus("stdlib", label, files, lambda _: _read_stdlib(names), topic=_stdlib_topic)


def _stdlib_topic(name: str) -> str:
    """Return encodings (character tables), packages or modules: three kinds of text, present in every split."""
    folder, inside, _ = name.partition("/")
    return ("encodings" if folder == "encodings" else "packages") if inside else "modules"


def _read_stdlib(files: dict[str, Path]) -> Documents:
    # Keys are contents, so that equal files are one document.
    contents = {read_file(files[name], links=True): name for name in sorted(files, key=digest)}
    splits: dict[str, list[tuple[str, Text]]] = {split: [] for split in SPLITS}
    held = {"test": 0, "valid": 0}
    for content, name in contents.items():
        if not content.strip() or b"\0" in content:
            continue
        # A file above 24 KiB would be a fifth of a held-out split.
        small = len(content) <= 24 * 1024
        split = next((split for split in held if small and held[split] < _HELD_OUT_BYTES), "train")
        splits[split].append((name, content))
        if split != "train":
            held[split] += len(content)
    return Documents(splits)


# --- a user's own text ---------------------------------------------------------------------------------------------


_BY_HASH = 40
"""The least number of documents that are assigned to splits as wholes; fewer are joined and cut in order."""


def _from_path(path: Path) -> Corpus:
    if not path.exists():
        raise UserError(f"no such file or directory: {path} (given as corpus file:{path})")
    files = tuple(sorted(file for file in path.rglob("*") if file.is_file())) if path.is_dir() else (path,)
    return Corpus(f"file:{path}", path.name, files, lambda _: _read_path(path))


def _read_path(path: Path) -> Documents:
    if (large := large_text(path)) is not None:
        if is_blank(large):
            raise UserError(f"{path} contains no text")
        return Documents(in_order(path.name, large))
    if are_large_lines(path):
        splits = _stored_by_hash(path, path.name, partial(row_text, path))
        if sum(map(len, splits.values())) >= _BY_HASH:
            return Documents(splits)
    documents = [(name, text) for name, text in file_documents(path) if text.strip()]
    if not documents:
        raise UserError(f"{path} contains no text")
    if len(documents) >= _BY_HASH:
        return Documents(by_hash(documents))
    joined = b"\n".join(text for _, text in documents)
    notes: dict[str, object] = {"documents": len(documents)} if len(documents) > 1 else {}
    return Documents(in_order(path.name, joined), notes)


def by_hash(documents: Iterable[tuple[str, bytes]]) -> dict[str, list[tuple[str, Text]]]:
    """Return splits by a hash of each document's text, so that equal documents share a split."""
    splits: dict[str, list[tuple[str, Text]]] = {split: [] for split in SPLITS}
    for name, text in documents:
        splits[hashed_split(text, 0.05, 0.05)].append((name, text))
    return splits


def _stored_by_hash(
    path: Path, label: str, text_of: TextOf, progress: Progress = silent
) -> dict[str, Sequence[tuple[str, Text]]]:
    """Return the splits of `by_hash` of a large file, whose documents are read when they are used."""
    found = index_lines(
        path, label, text_of, lambda text: hashed_split(text, 0.05, 0.05) if text.strip() else None, progress
    )
    return {split: found.get(split, ()) for split in SPLITS}


def in_order(name: str, text: Text) -> dict[str, list[tuple[str, Text]]]:
    """Return splits of one text in reading order, 90/5/5, cut at nearby line ends if there are any."""
    cuts = [_line_end(text, int(len(text) * share)) for share in (0.9, 0.95)]
    return _cut(name, text, *cuts)


def _cut(name: str, text: Text, *cuts: int) -> dict[str, list[tuple[str, Text]]]:
    edges = pairwise([0, *cuts, len(text)])
    return {split: [(name, part_of_text(text, a, b))] for split, (a, b) in zip(SPLITS, edges, strict=True)}


def _line_end(text: Text, offset: int) -> int:
    end = text[offset : offset + min(4096, len(text) // 40)].find(b"\n")
    return offset if end < 0 else offset + end + 1


# --- the named sets ------------------------------------------------------------------------------------------------


def _text(row: dict[str, Any]) -> str:
    """Return the text of a row, or the title and the sections of an abstract."""
    if "sections" not in row:
        return str(row["text"])
    parts = [f"{label}: {text}" if label else str(text) for label, text in row["sections"]]
    return "\n".join([str(row["title"]), *parts])


def _documents(path: Path, key: str, progress: Progress) -> Sequence[tuple[str, Text]]:
    """Return (name, text) of the object on each line; of a large plain file, they are read when they are used."""
    if are_large_lines(path):
        found = index_lines(path, key, _row_bytes, lambda _: key, progress)
        return found.get(key, ())
    rows = enumerate(read_json_lines(path), 1)
    return [(f"{key}:{number}", _row_bytes(number, row)) for number, row in rows]


def _row_bytes(_: int, row: dict[str, Any]) -> bytes:
    return _text(row).encode("utf-8")


def _read_lines(paths: dict[str, Path], progress: Progress) -> Documents:
    splits = {}
    for index, split in enumerate(SPLITS):
        progress(f"reading {paths[split].name}", index / len(SPLITS))
        splits[split] = _documents(paths[split], split, progress)
    return Documents(splits)


def _read_hashed_lines(paths: dict[str, Path], progress: Progress) -> Documents:
    path = paths["all"]
    if are_large_lines(path):
        return Documents(_stored_by_hash(path, "all", _row_bytes, progress))
    return Documents(by_hash((name, text[:]) for name, text in _documents(path, "all", progress)))


def _read_running_text(paths: dict[str, Path], progress: Progress) -> Documents:
    return Documents(in_order(paths["all"].name, read_bytes(paths["all"])))


def _read_enwik8(paths: dict[str, Path], progress: Progress) -> Documents:
    progress("unpacking enwik8", 0.0)
    content = read_bytes(paths["all"])
    if len(content) != 100_000_000:
        raise UserError(f"{paths['all']} has {len(content):,} bytes; enwik8 has 100,000,000")
    return Documents(_cut("enwik8", content, 90_000_000, 95_000_000))


# A title is on a line of its own between empty lines, unlike " = 3 = " inside a formula.
_ARTICLE = re.compile(rb"^ = ([^=\n]+) = ?\n ?\n", re.MULTILINE)


def wikitext_articles(content: bytes) -> list[tuple[str, bytes]]:
    """Return (title, text) of each article of a WikiText file; every byte belongs to one of them."""
    titles = list(_ARTICLE.finditer(content))
    if not titles:
        return [("wikitext", content)]
    edges = [0, *(match.start() for match in titles[1:]), len(content)]
    return [
        (match[1].decode("utf-8", "replace"), content[start:stop])
        for match, (start, stop) in zip(titles, pairwise(edges), strict=True)
    ]


def _read_wikitext(paths: dict[str, Path], progress: Progress) -> Documents:
    return Documents({split: wikitext_articles(read_bytes(paths[split])) for split in SPLITS})


def _read_wiki_prose(paths: dict[str, Path], progress: Progress) -> Documents:
    taken = {
        wiki.plain_title(title)
        for key in ("valid", "test")
        for title, _ in wikitext_articles(read_bytes(paths[key]))
    }
    progress("unpacking enwik8", 0.0)
    articles, counts = wiki.prose(read_bytes(paths["all"]), taken, progress)
    splits: dict[str, list[tuple[str, Text]]] = {split: [] for split in SPLITS}
    for title, text in articles:
        splits[hashed_split(title, 0.01, 0.01)].append((title, text))
    return Documents(splits, dict(counts))


def _three(pattern: str) -> dict[str, str]:
    return {split: pattern.format(split) for split in SPLITS}


_ENWIK8 = {"all": "enwik8/enwik8.xz"}
_WIKITEXT = _three("wikitext/wikitext103.{}.txt.xz")
_KINDS: dict[str, Kind] = {
    "enwik8": Kind("first 10^8 bytes of English Wikipedia, 90M/5M/5M in order", _ENWIK8, _read_enwik8),
    "wiki-prose": Kind(
        "article text of enwik8 without markup and without articles of WikiText's valid and test splits",
        _ENWIK8 | {split: _WIKITEXT[split] for split in ("valid", "test")},
        _read_wiki_prose,
        wiki.RULE,
    ),
    "wikitext-2": Kind(
        "WikiText-2, tokenized, complete", _three("wikitext/wikitext2.{}.txt.xz"), _read_wikitext
    ),
    "wikitext-103": Kind("WikiText-103, tokenized", _WIKITEXT, _read_wikitext),
    "wikitext-103-head": Kind(
        "WikiText-103 with the first 0.53 % of its training file",
        _WIKITEXT | {"train": "wikitext/wikitext103.train-head.txt.xz"},
        _read_wikitext,
    ),
    "pubmed": Kind("PubMed titles and abstracts", _three("pubmed/{}.jsonl.xz"), _read_lines),
    "openwebtext": Kind("OpenWebText documents", _three("webtext/openwebtext.{}.jsonl.xz"), _read_lines),
    "c4": Kind(
        "C4 documents, split by hash",
        {"all": "webtext/c4-excerpts.jsonl.xz|webtext/c4.jsonl"},
        _read_hashed_lines,
    ),
    "tinyshakespeare": Kind(
        "Shakespeare's plays in one file", {"all": "tinyshakespeare/input.txt.xz"}, _read_running_text
    ),
    "code": Kind("Python source files", _three("code/{}.jsonl.xz"), _read_lines),
}
