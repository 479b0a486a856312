"""Where data sets are published: addresses, licenses, and the files of the data directory made from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headtohead.data.get.recorded import RECORDED
from headtohead.data.get.unpack import (
    Unpack,
    first_lines,
    hatexplain,
    json_rows,
    side_by_side,
    split_files,
    text_archives,
    verbatim,
    zipped,
)

_GITHUB = "https://raw.githubusercontent.com"
_HUB = "hub://"


@dataclass(frozen=True)
class Remote:
    """A file to download, from the first address that has it."""

    addresses: tuple[str, ...]
    sha256: str = ""
    """Empty if it is not known; the size that the server states is then checked alone."""

    @property
    def name(self) -> str:
        """The name of the download."""
        return "-".join(self.addresses[0].split("/")[-2:])

    @property
    def urls(self) -> list[str]:
        """The addresses; those on the hub begin with HF_ENDPOINT."""
        return [_url(address) for address in self.addresses]


@dataclass(frozen=True)
class Source:
    """A published set."""

    files: tuple[str, ...]
    """What it gives, as paths below the data directory."""
    parts: tuple[Remote, ...]
    unpack: Unpack
    license: str
    compared: str = "the same"
    """How its content compares with that of the recorded results."""
    default_parts: int = 0
    """The number of parts downloaded by default, if any number of them is a set; 0: all are needed."""
    exact: bool = False
    """Whether other content than the recorded one is an error."""


def _url(address: str) -> str:
    if not address.startswith(_HUB):
        return address
    owner, name, file = address.removeprefix(_HUB).split("/", 2)
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return f"{endpoint.rstrip('/')}/datasets/{owner}/{name}/resolve/main/{file}"


def find_source(file: str) -> Source | None:
    """Return the source of a file that a reader names (`a.xz|b`: a.xz, a or b), or None."""
    names = {one.removesuffix(".xz") for one in file.split("|")}
    return next((source for source in SOURCES if names & {*source.files}), None)


def _as_published(license: str, files: dict[str, Sequence[str]], **more: Any) -> Source:
    """Return a source whose downloads are its files."""
    parts = tuple(Remote(tuple(urls), RECORDED[f"{file}.xz"][0]) for file, urls in files.items())
    return Source(tuple(files), parts, verbatim(*files), license, **more)


def _glue(name: str) -> Source:
    members = {f"glue/{name}.{key}.tsv": f"{name}/{key}.tsv" for key in ("train", "dev")}
    part = Remote((f"https://dl.fbaipublicfiles.com/glue/data/{name}.zip",))
    return Source(tuple(members), (part,), zipped(members), _GLUE)


def _zero_shot(name: str, group: str, license: str) -> Source:
    path = f"mosaicml/llm-foundry/main/scripts/eval/local_data/{group}/{name}.jsonl"
    return _as_published(license, {f"zeroshot/{name}.jsonl": [f"{_GITHUB}/{path}"]})


def _shards(pattern: str, addresses: Sequence[str], unpack: Unpack, license: str, **more: Any) -> Source:
    parts = tuple(Remote((f"{_HUB}{address}",)) for address in addresses)
    return Source(split_files(pattern), parts, unpack, license, **more)


_GLUE = "research use; see gluebenchmark.com"
_WIKIPEDIA = "CC BY-SA 3.0 and GFDL (Wikipedia text)"
_ENWIK8 = {"enwik8/enwik8": "enwik8"}
_WIKITEXT = {f"wikitext/wikitext103.{split}.txt": split for split in ("train", "valid", "test")}
_HEAD = "wikitext/wikitext103.train-head.txt"
_AGREEMENT = [f"numpred.{part}" for part in ("val", *(f"test.{count}" for count in range(1, 6)))]
_GULORDAVA = f"{_GITHUB}/facebookresearch/colorlessgreenRNNs/00a7b1cbd6b5b837cedcb38a37962150be4f4273"
_SQUAD = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
_SQUAD_FILES = ("squad/train-v1.1.json", "squad/dev-v1.1.json")
_WEB, _PUBMED, _CODE = "webtext/openwebtext.{}.jsonl", "pubmed/{}.jsonl", "code/{}.jsonl"

SOURCES: tuple[Source, ...] = (
    Source(
        tuple(_ENWIK8),
        (Remote(("https://mattmahoney.net/dc/enwik8.zip", "http://mattmahoney.net/dc/enwik8.zip")),),
        zipped(_ENWIK8),
        _WIKIPEDIA,
        exact=True,
    ),
    Source(
        (*_WIKITEXT, _HEAD),
        (Remote(("https://wikitext.smerity.com/wikitext-103-v1.zip",)),),
        first_lines(
            zipped({file: f"wikitext-103/wiki.{split}.tokens" for file, split in _WIKITEXT.items()}),
            "wikitext/wikitext103.train.txt",
            _HEAD,
            2_882_983,
        ),
        _WIKIPEDIA,
        "valid, test and the head of train the same; no result was recorded on the whole train file",
    ),
    _as_published(
        _WIKIPEDIA,
        {
            f"wikitext/wikitext2.{split}.txt": [
                f"{_GITHUB}/pytorch/examples/main/word_language_model/data/wikitext-2/{split}.txt"
            ]
            for split in ("train", "valid", "test")
        },
    ),
    _as_published(
        "public domain",
        {"tinyshakespeare/input.txt": [f"{_GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"]},
    ),
    _shards(
        _WEB,
        [f"Skylion007/openwebtext/subsets/urlsf_subset{index:02d}.tar" for index in range(21)],
        text_archives(_WEB),
        "collection CC0; the pages belong to their authors: research use",
        default_parts=1,
        compared="more: recorded on a sample of 2,289 documents; a part has about 390,000",
    ),
    _shards(
        _PUBMED,
        [f"MedRAG/pubmed/chunk/pubmed23n{number:04d}.jsonl" for number in range(1166, 0, -1)],
        json_rows(_PUBMED, "title", "content"),
        "National Library of Medicine; abstracts may belong to their publishers: research use",
        default_parts=20,
        compared="other: recorded on 9,475 abstracts of 2021 with section labels; a part has up to 30,000 without",
    ),
    _shards(
        _CODE,
        [f"codeparrot/codeparrot-clean/file-{number:012d}.json.gz" for number in range(1, 55)],
        json_rows(_CODE, "content"),
        "the license of each file's GitHub repository",
        default_parts=1,
        compared="other: recorded on 1,502 files of 19 Python packages; a part is about 1 GB of CodeParrot",
    ),
    Source(
        ("webtext/c4.jsonl",),
        tuple(
            Remote((f"{_HUB}allenai/c4/en/c4-train.{index:05d}-of-01024.json.gz",)) for index in range(1024)
        ),
        json_rows("webtext/c4.jsonl", "text"),
        "ODC-BY; the pages belong to their authors",
        "other: recorded on 1,480 excerpts; a part has about 356,000 documents",
        default_parts=1,
    ),
    Source(
        ("hatexplain/hatexplain.jsonl",),
        tuple(
            Remote((f"{_GITHUB}/hate-alert/HateXplain/master/Data/{file}",))
            for file in ("dataset.json", "post_id_divisions.json")
        ),
        hatexplain("hatexplain/hatexplain.jsonl"),
        "MIT (offensive language)",
    ),
    _as_published(
        "MIT (sentences: Wikipedia, CC BY-SA)",
        {
            f"sva/linzen_{name}.tsv": [
                f"{_GITHUB}/viking-sudo-rm/StackNN/{branch}/data/linzen/rnn_agr_simple/{name}"
                for branch in ("master", "10c5e139b610a472fcfffcc8b8ac57a56f24d4b7")
            ]
            for name in _AGREEMENT
        },
    ),
    _as_published(
        "none stated (sentences: Wikipedia, CC BY-SA)",
        {
            f"sva/linzen_sentences.{key}.tsv": [
                f"{_GITHUB}/treszkai/edinburgh-nlu-cw/{branch}/data/wiki-{key}.txt"
                for branch in ("8901558e8dddbd8b6807331da547bbe77286239b", "master")
            ]
            for key in ("dev", "test")
        },
    ),
    Source(
        ("sva/linzen_gulordava_filtered.tsv",),
        tuple(
            Remote((f"{_GULORDAVA}/data/linzen_testset/subj_agr_filtered.{kind}",))
            for kind in ("gold", "text")
        ),
        side_by_side("sva/linzen_gulordava_filtered.tsv", "verb_idx\tcorrect\twrong\tn_attractors\tsentence"),
        "CC BY-NC 4.0",
    ),
    Source(
        _SQUAD_FILES,
        (
            Remote(
                (f"{_SQUAD}/train-v1.1.json",),
                "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
            ),
            Remote((f"{_SQUAD}/dev-v1.1.json",), RECORDED["squad/dev-v1.1.json.xz"][0]),
        ),
        verbatim(*_SQUAD_FILES),
        "CC BY-SA 4.0",
        "dev the same; recorded on 14,348 of the 87,599 training questions",
    ),
    *map(_glue, ("CoLA", "RTE", "SST-2")),
    _as_published(
        _GLUE,
        {
            f"glue/MRPC.{key}.tsv": [
                f"{_GITHUB}/F0restL1n/BERT/{branch}/glue_data/MRPC/{key}.tsv"
                for branch in ("03e1106d3656e7fd111803077af70ef6fcce505b", "master")
            ]
            for key in ("train", "dev")
        },
    ),
    _zero_shot("lambada_openai", "language_understanding", "CC BY 4.0"),
    _zero_shot("winogrande", "language_understanding", "CC BY 4.0"),
    _zero_shot("arc_easy", "world_knowledge", "CC BY-SA 4.0"),
    _zero_shot("arc_challenge", "world_knowledge", "CC BY-SA 4.0"),
    _zero_shot("boolq", "reading_comprehension", "CC BY-SA 3.0"),
    _zero_shot("copa", "commonsense_reasoning", "BSD 2-Clause"),
    _zero_shot("piqa", "commonsense_reasoning", "AFL 3.0"),
    _zero_shot("simple_arithmetic_withspaces", "symbolic_problem_solving", "Apache 2.0"),
)
