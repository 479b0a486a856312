"""Corpora by name: documents in disjoint train, valid and test splits."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from headtohead.common.errors import UserError, unknown
from headtohead.common.files import canonical_json, digest, digest_file, read_file
from headtohead.data import hub, wiki
from headtohead.data.text import (
    Text,
    file_documents,
    is_blank,
    large_text,
    part_of_text,
    read_bytes,
    read_json_lines,
)

SPLITS = ("train", "valid", "test")
Progress = Callable[[str, float], None]
"""Called with a message and the fraction that is done."""


def _silent(message: str, share: float) -> None:
    pass


@dataclass
class Documents:
    """The content of a corpus: (name, text) of each document by split, and notes on how it was made."""

    splits: Mapping[str, Sequence[tuple[str, Text]]]
    notes: dict[str, object] = field(default_factory=dict)
    whole: Mapping[str, Sequence[tuple[str, Text]]] | None = None
    """The original documents if `splits` holds pieces of them; pieces may be equal across splits, documents may not."""


@dataclass(frozen=True)
class Corpus:
    """A corpus: its description, what identifies its content, and how to read it."""

    name: str
    label: str
    about: str
    files: tuple[Path, ...]
    """Files whose bytes determine the content."""
    read: Callable[[Progress], Documents]
    rule: str = "1"
    """Version of the reader; bumped when the same files are read differently."""
    topic: Callable[[str], str] | None = None
    """Maps a document's name to its topic, if the corpus has topics."""

    def fingerprint(self) -> str:
        """Return the digest that identifies the content: every file and the reader's rule."""
        listing = [[path.name, digest_file(path, links=True)] for path in self.files]
        return digest(canonical_json([self.name.split(":")[0], self.rule, listing]))


@dataclass(frozen=True)
class Kind:
    """A named corpus: a one-line description, its files, and their reader."""

    about: str
    files: dict[str, str]
    """Maps a split (or another key of the reader) to a file name under the data directory."""
    read: Callable[[dict[str, Path], Progress], Documents]
    rule: str = "1"


def corpus_names() -> dict[str, str]:
    """Return the named corpora with a one-line description of each."""
    return {
        "stdlib": "standard-library sources of the running Python, without tests; always available",
        "file:PATH": "a text file, JSON lines with a text field, or a directory of them; also .gz and .xz",
        "coherence:DIAL(CORPUS,...)": "the same pieces of several domains, mixed (DIAL 0) to coherent (DIAL 1)",
        **{name: kind.about for name, kind in _KINDS.items()},
    }


def data_root(data_dir: str | Path | None = None) -> Path | None:
    """Return the data directory: the argument or H2H_DATA, or None when neither is given."""
    given = data_dir or os.environ.get("H2H_DATA")
    return Path(given).expanduser() if given else None


def find_corpus(name: str, data_dir: str | Path | None = None, cache: Path | None = None) -> Corpus:
    """Return the corpus of that name; its files are searched in the data directory, then on the hub."""
    if name == "stdlib":
        return _stdlib()
    if name.startswith("file:"):
        return _from_path(Path(name.removeprefix("file:")).expanduser())
    check_known(name)
    if name.startswith("coherence:"):
        from headtohead.data.coherence import coherence_corpus  # avoids a circular import

        return coherence_corpus(name, lambda source: find_corpus(source, data_dir, cache))
    kind, root = _KINDS[name], data_root(data_dir)
    paths = {split: root / file for split, file in kind.files.items()} if root else {}
    if paths and all(path.is_file() for path in paths.values()):
        return _local(name, kind, paths)
    return _from_hub(name, kind, paths, cache)


def check_known(name: str) -> None:
    """Raise if no corpus has that name; does not check that its files exist."""
    if name.startswith("coherence:"):
        from headtohead.data.coherence import parse_dial

        for source in parse_dial(name).sources:
            check_known(source)
    elif name != "stdlib" and not name.startswith("file:") and name not in _KINDS:
        raise unknown("corpus", name, corpus_names())


def stable_name(name: str) -> str:
    """Return a name that means the same corpus from any directory: paths are made absolute."""
    if name.startswith("file:"):
        return f"file:{Path(name[5:]).expanduser().resolve()}"
    if name.startswith("coherence:"):
        from headtohead.data.coherence import parse_dial

        dial = parse_dial(name)
        return dial.text(tuple(map(stable_name, dial.sources)))
    return name


def _local(name: str, kind: Kind, paths: dict[str, Path]) -> Corpus:
    files = tuple(paths[key] for key in sorted(paths))
    return Corpus(name, name, kind.about, files, lambda progress: kind.read(paths, progress), kind.rule)


def _from_hub(name: str, kind: Kind, paths: dict[str, Path], cache: Path | None) -> Corpus:
    missing = next((path for path in paths.values() if not path.is_file()), None)
    where = f"{missing} is missing" if missing else "no data directory is given (H2H_DATA or --data-dir)"
    if name not in hub.SETS or cache is None:
        also = "; use wiki-prose instead" if name.startswith("wikitext-103") else ""
        raise UserError(f"corpus '{name}' not found: {where}{also}")
    files = hub.fetch(name, cache, where)
    read = _json_line_reader(lambda row: str(row["text"]))
    paths = dict(zip(SPLITS, files, strict=True))
    return Corpus(name, f"{name} (hub)", kind.about, files, lambda progress: read(paths, progress), "hub1")


# --- the embedded default ------------------------------------------------------------------------------------------

_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "ensurepip",
}
_HELD_OUT_BYTES = 128 * 1024


def _stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = tuple(
        sorted(
            (path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts)),
            key=lambda path: path.relative_to(root).as_posix(),
        )
    )
    version = ".".join(map(str, sys.version_info[:3]))
    return Corpus(
        "stdlib",
        f"stdlib@{version}",
        corpus_names()["stdlib"],
        files,
        lambda _: _read_stdlib(root, files),
        topic=_stdlib_topic,
    )


def _stdlib_topic(name: str) -> str:
    """Return encodings (character tables), packages or modules: three kinds of text, present in every split."""
    folder, inside, _ = name.partition("/")
    return ("encodings" if folder == "encodings" else "packages") if inside else "modules"


def _read_stdlib(root: Path, files: tuple[Path, ...]) -> Documents:
    names = {path.relative_to(root).as_posix(): path for path in files}
    contents = {
        read_file(names[name], links=True): name for name in sorted(names, key=digest)
    }  # deduplicated
    documents = [
        (name, content) for content, name in contents.items() if content.strip() and b"\0" not in content
    ]
    splits: dict[str, list[tuple[str, Text]]] = {"train": [], "valid": [], "test": []}
    held = {"test": 0, "valid": 0}
    for name, content in documents:
        # A file above 24 KiB would be a fifth of a held-out split.
        split = next(
            (split for split in held if held[split] < _HELD_OUT_BYTES and len(content) <= 24 * 1024), "train"
        )
        splits[split].append((name, content))
        if split != "train":
            held[split] += len(content)
    return Documents(splits)


# --- a user's own text ---------------------------------------------------------------------------------------------


def _from_path(path: Path) -> Corpus:
    if not path.exists():
        raise UserError(f"no such file or directory: {path} (given as corpus file:{path})")
    files = tuple(sorted(file for file in path.rglob("*") if file.is_file())) if path.is_dir() else (path,)
    return Corpus(f"file:{path}", path.name, f"text from {path}", files, lambda _: _read_path(path))


def _read_path(path: Path) -> Documents:
    if (large := large_text(path)) is not None:
        if is_blank(large):
            raise UserError(f"{path} contains no text")
        return Documents(in_order(path.name, large))
    documents = [(name, text) for name, text in file_documents(path) if text.strip()]
    if not documents:
        raise UserError(f"{path} contains no text")
    if len(documents) >= 40:
        return Documents(by_hash(documents))
    joined = b"\n".join(text for _, text in documents)
    return Documents(in_order(path.name, joined))


def by_hash(
    documents: Sequence[tuple[str, bytes]], held_out: float = 0.05
) -> dict[str, list[tuple[str, Text]]]:
    """Return splits by a hash of each document's text, so that equal documents share a split."""
    splits: dict[str, list[tuple[str, Text]]] = {"train": [], "valid": [], "test": []}
    for name, text in documents:
        share = int(digest(text)[:8], 16) / 2**32
        splits["test" if share < held_out else "valid" if share < 2 * held_out else "train"].append(
            (name, text)
        )
    return splits


def in_order(name: str, text: Text, held_out: float = 0.05) -> dict[str, list[tuple[str, Text]]]:
    """Return splits of one text in reading order, cut at nearby line ends if there are any."""
    offsets = [int(len(text) * share) for share in (1 - 2 * held_out, 1 - held_out)]
    cuts = [0, *(_line_end(text, offset) for offset in offsets), len(text)]
    return {
        split: [(name, part_of_text(text, a, b))]
        for split, (a, b) in zip(SPLITS, pairwise(cuts), strict=True)
    }


def _line_end(text: Text, offset: int) -> int:
    end = text[offset : offset + min(4096, len(text) // 40)].find(b"\n")
    return offset if end < 0 else offset + end + 1


# --- the named sets ------------------------------------------------------------------------------------------------


def _json_line_reader(
    text_of: Callable[[dict[str, object]], str],
) -> Callable[[dict[str, Path], Progress], Documents]:
    def read(paths: dict[str, Path], progress: Progress) -> Documents:
        splits: dict[str, list[tuple[str, Text]]] = {}
        for index, split in enumerate(SPLITS):
            progress(f"reading {paths[split].name}", index / len(SPLITS))
            rows = enumerate(read_json_lines(paths[split]), 1)
            splits[split] = [(f"{split}:{number}", text_of(row).encode("utf-8")) for number, row in rows]
        return Documents(splits)

    return read


def _read_enwik8(paths: dict[str, Path], progress: Progress) -> Documents:
    progress("unpacking enwik8", 0.0)
    content = read_bytes(paths["all"])
    if len(content) != 100_000_000:
        raise UserError(f"{paths['all']} has {len(content):,} bytes; enwik8 has 100,000,000")
    cuts = [0, 90_000_000, 95_000_000, 100_000_000]
    return Documents(
        {split: [("enwik8", content[a:b])] for split, (a, b) in zip(SPLITS, pairwise(cuts), strict=True)}
    )


def _read_running_text(paths: dict[str, Path], progress: Progress) -> Documents:
    return Documents(in_order(paths["all"].name, read_bytes(paths["all"])))


def _read_hashed_lines(paths: dict[str, Path], progress: Progress) -> Documents:
    rows = enumerate(read_json_lines(paths["all"]), 1)
    return Documents(by_hash([(f"all:{number}", str(row["text"]).encode("utf-8")) for number, row in rows]))


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
    splits: dict[str, list[tuple[str, Text]]] = {"train": [], "valid": [], "test": []}
    for title, text in articles:
        share = int(digest(title)[:8], 16) / 2**32
        splits["test" if share < 0.01 else "valid" if share < 0.02 else "train"].append((title, text))
    return Documents(splits, dict(counts))


def _abstract(row: dict[str, object]) -> str:
    sections = row.get("sections")
    assert isinstance(sections, list)
    parts = [f"{label}: {text}" if label else str(text) for label, text in sections]
    return "\n".join([str(row["title"]), *parts])


def _three(folder: str, pattern: str) -> dict[str, str]:
    return {split: f"{folder}/{pattern.format(split)}" for split in SPLITS}


_LINES = _json_line_reader(lambda row: str(row["text"]))
_KINDS: dict[str, Kind] = {
    "enwik8": Kind(
        "first 10^8 bytes of English Wikipedia, 90M/5M/5M in order", {"all": "enwik8/enwik8.xz"}, _read_enwik8
    ),
    "wiki-prose": Kind(
        "article text of enwik8 without markup and without articles of WikiText's valid and test splits",
        {
            "all": "enwik8/enwik8.xz",
            "valid": "wikitext/wikitext103.valid.txt.xz",
            "test": "wikitext/wikitext103.test.txt.xz",
        },
        _read_wiki_prose,
        wiki.RULE,
    ),
    "wikitext-2": Kind(
        "WikiText-2, tokenized, complete", _three("wikitext", "wikitext2.{}.txt.xz"), _read_wikitext
    ),
    "wikitext-103": Kind(
        "WikiText-103, tokenized", _three("wikitext", "wikitext103.{}.txt.xz"), _read_wikitext
    ),
    "wikitext-103-head": Kind(
        "WikiText-103 with the first 0.53 % of its training file",
        _three("wikitext", "wikitext103.{}.txt.xz") | {"train": "wikitext/wikitext103.train-head.txt.xz"},
        _read_wikitext,
    ),
    "pubmed": Kind(
        "PubMed titles and abstracts", _three("pubmed", "{}.jsonl.xz"), _json_line_reader(_abstract)
    ),
    "openwebtext": Kind("a sample of OpenWebText", _three("webtext", "openwebtext.{}.jsonl.xz"), _LINES),
    "c4": Kind("excerpts of C4, split by hash", {"all": "webtext/c4-excerpts.jsonl.xz"}, _read_hashed_lines),
    "tinyshakespeare": Kind(
        "Shakespeare's plays in one file", {"all": "tinyshakespeare/input.txt.xz"}, _read_running_text
    ),
    "code": Kind("Python sources of 19 packages", _three("code", "{}.jsonl.xz"), _LINES),
}
