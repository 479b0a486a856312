"""Tasks by name: read or generate examples, tokenize them, keep splits disjoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headtohead.common.errors import UserError, unknown
from headtohead.common.files import canonical_json, digest, digest_file
from headtohead.data import hub
from headtohead.data.corpora import SPLITS, Progress, _silent, data_root
from headtohead.data.shards import cache_dir
from headtohead.data.tasks import agreement, glue, hatexplain, squad
from headtohead.data.tasks.base import Example, Material, Task, encoded, kept_apart
from headtohead.data.tasks.readers import Reader, Rows, json_rows, squad_rows, table_rows
from headtohead.data.tasks.synthetic import SYNTHETIC, Synthetic
from headtohead.data.tokenizers import make_tokenizer, parse_tokenizer
from headtohead.mechanisms.contract.options import build_options, options_as_dict

RULE = 2
"""Bumped when the same files or options give different examples."""


@dataclass(frozen=True)
class Kind:
    """A task read from files: its description, its files, and their reader."""

    about: str
    files: dict[str, str]
    rows: Reader
    read: Callable[[Rows], Material]
    classes: tuple[str, ...] = ()
    metric: str = "accuracy"


def _glue(name: str, rows: Reader, texts: tuple[str, ...], label: str, *classes: tuple[str, str]) -> Kind:
    files = {key: f"glue/{name}.{key}.tsv.xz" for key in ("train", "dev")}
    read = glue.reader(texts, label, tuple(value for value, _ in classes))
    return Kind(
        f"{_GLUE[name]} (GLUE); test is the published dev",
        files,
        rows,
        read,
        tuple(w for _, w in classes),
        metric="matthews" if name == "CoLA" else "accuracy",
    )


_GLUE = {
    "CoLA": "whether a sentence is acceptable English",
    "MRPC": "whether two sentences have the same meaning",
    "RTE": "whether one sentence follows from another",
    "SST-2": "whether a phrase of a movie review is positive",
}
_SQUAD = {"train": "squad/train-subset-v1.1.json.xz", "dev": "squad/dev-v1.1.json.xz"}
_SENTENCES = {key: f"sva/linzen_sentences.{key}.tsv.xz" for key in ("dev", "test")}
KINDS: dict[str, Kind] = {
    "hatexplain": Kind(
        "posts that are normal, offensive or hateful, with annotators' rationales (offensive language)",
        {"all": "hatexplain/hatexplain.jsonl.xz"},
        json_rows,
        hatexplain.read,
        hatexplain.CLASSES,
    ),
    "agreement": Kind(
        "a verb's number from the words before it, by number of attractors (Linzen); no relevant tokens marked",
        {"val": "sva/linzen_numpred.val.tsv.xz"}
        | {str(count): f"sva/linzen_numpred.test.{count}.tsv.xz" for count in range(1, 6)},
        table_rows("label", "text"),
        agreement.read_prefixes,
        agreement.NUMBERS,
    ),
    "agreement-sentences": Kind(
        "a verb's number from the whole sentence (Linzen); subject and verb are relevant",
        _SENTENCES,
        table_rows(),
        agreement.sentence_reader(verb=True),
        agreement.NUMBERS,
    ),
    "agreement-subject": Kind(
        "a verb's number from the words before it (Linzen's sentences); the subject is relevant",
        _SENTENCES,
        table_rows(),
        agreement.sentence_reader(verb=False),
        agreement.NUMBERS,
    ),
    "agreement-pairs": Kind(
        "right or wrong sentences of minimal pairs (Marvin and Linzen); the words that differ are relevant",
        {"all": "sva/marvin_linzen.tsv.xz"},
        table_rows(),
        agreement.read_pairs,
        agreement.PAIRS,
    ),
    "squad": Kind(
        f"SQuAD v1.1: generate the answer from {squad.AROUND} characters on either side of it; train is a subset",
        _SQUAD,
        squad_rows,
        squad.reader(squad.AROUND),
        metric="f1",
    ),
    "squad-whole": Kind(
        "SQuAD v1.1: generate the answer from the whole paragraph; train is a subset",
        _SQUAD,
        squad_rows,
        squad.reader(None),
        metric="f1",
    ),
    "glue-cola": _glue(
        "CoLA",
        table_rows("source", "label", "mark", "sentence"),
        ("sentence",),
        "label",
        ("0", "unacceptable"),
        ("1", "acceptable"),
    ),
    "glue-mrpc": _glue(
        "MRPC", table_rows(), ("#1 String", "#2 String"), "Quality", ("0", "different"), ("1", "same")
    ),
    "glue-rte": _glue(
        "RTE",
        table_rows(),
        ("sentence1", "sentence2"),
        "label",
        ("entailment", "follows"),
        ("not_entailment", "does not follow"),
    ),
    "glue-sst2": _glue("SST-2", table_rows(), ("sentence",), "label", ("0", "negative"), ("1", "positive")),
}


def task_names() -> dict[str, str]:
    """Return the trainable tasks with a one-line description of each; synthetic ones take options."""
    return {name: kind.about for name, kind in KINDS.items()} | {
        name: kind.about for name, kind in SYNTHETIC.items()
    }


def check_task_known(name: str) -> None:
    """Raise if no task has that name, or if a synthetic task does not have the given options."""
    word, _, given = name.partition(":")
    if word in SYNTHETIC:
        _options(word, given)
    elif name not in KINDS:
        raise unknown("task", name, task_names())


def task_files(name: str, data_dir: str | Path | None = None) -> dict[str, Path]:
    """Return the files of a task, none for a synthetic one; raise if a file is missing."""
    word = name.partition(":")[0]
    if word in SYNTHETIC:
        return {}
    if name not in KINDS:
        raise unknown("task", name, task_names())
    root = data_root(data_dir)
    paths = {key: root / file for key, file in KINDS[name].files.items()} if root else {}
    missing = next((path for path in paths.values() if not path.is_file()), None)
    if missing or not paths:
        where = f"{missing} is missing" if missing else "no data directory is given (H2H_DATA or --data-dir)"
        raise UserError(f"task '{name}' not found: {where}")
    return paths


def prepare_task(
    name: str,
    tokenizer: str = "bytes",
    context: int = 128,
    *,
    data_dir: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = _silent,
) -> Task:
    """Return a tokenized task; examples longer than the context are skipped and counted in its notes.

    A synthetic task takes options, `recall:pairs=16`, and has its own tokens instead of the tokenizer's.
    """
    if context < 1:
        raise UserError(f"context={context} is too small; at least 1 is allowed")
    word, _, given = name.partition(":")
    if word in SYNTHETIC:
        return _drawn(name, _options(word, given), context, progress)
    return _read(name, tokenizer, context, data_dir, cache_dir(cache), progress)


def _options(word: str, given: str) -> Synthetic:
    parts = [part.partition("=") for part in given.split(",")] if given else []
    for key, sign, value in parts:
        if not sign or not value:
            raise UserError(f"task '{word}' takes options such as {word}:seed=1, got '{key}'")
    made = build_options(word, SYNTHETIC[word], {key: value for key, _, value in parts})
    assert isinstance(made, Synthetic)
    return made


_TRIES = 200
"""Draws per new example before the task counts as too small for the requested number."""


def _drawn(name: str, options: Synthetic, context: int, progress: Progress) -> Task:
    """Return a synthetic task without duplicate examples, so that no two splits share one."""
    word = name.partition(":")[0]
    held_out = max(1, options.train // 10)
    counts = {"test": held_out, "valid": held_out, "train": options.train}
    seen: set[bytes] = set()
    splits: dict[str, list[Example]] = {}
    total, done = sum(counts.values()), 0
    for index, (split, count) in enumerate(counts.items()):
        random = np.random.default_rng([options.seed, index, *word.encode()])
        splits[split], tries = [], 0
        while len(splits[split]) < count:
            example = options.draw(random)
            if len(example.tokens) > context:
                raise UserError(
                    f"task '{name}' has examples of {len(example.tokens)} tokens; the context is {context}"
                )
            if (key := example.tokens.tobytes()) in seen:
                tries += 1
                if tries > _TRIES * (len(splits[split]) + 1):
                    raise UserError(
                        f"task '{name}' has fewer than {total:,} distinct examples; make the task larger or train smaller"
                    )
                continue
            seen.add(key)
            splits[split].append(example)
            done += 1
            if done % 1000 == 0:
                progress(f"drawing {word}", done / total)
    content = digest(canonical_json([RULE, word, options_as_dict(options)]))
    ordered = {split: splits[split] for split in SPLITS}
    return Task(
        name,
        type(options).about,
        options.classes,
        options.vocabulary,
        ordered,
        {},
        content,
        metric=type(options).metric,
    )


def _read(
    name: str, tokenizer: str, context: int, data_dir: str | Path | None, cache: Path, progress: Progress
) -> Task:
    parse_tokenizer(tokenizer)
    if name not in KINDS:
        raise unknown("task", name, task_names())
    kind = KINDS[name]
    try:
        paths, rows = task_files(name, data_dir), kind.rows
    except UserError as error:
        if name not in hub.TASKS:
            raise
        paths, rows = hub.fetch_rows(name, cache, str(error)), json_rows
    progress(f"reading {name}", 0.0)
    source = Rows({key: (path, rows(path)) for key, path in paths.items()}, progress)
    with source.locate_errors():
        material = kept_apart(kind.read(source))
    fingerprint = digest(
        canonical_json([RULE, name, [[key, digest_file(paths[key], links=True)] for key in sorted(paths)]])
    )
    train = material.splits["train"]
    found = make_tokenizer(
        tokenizer,
        fingerprint,
        cache,
        lambda: (part.encode("utf-8") for row in train for part in (row.text, *row.answers[:1])),
        progress,
    )
    splits, notes = encoded(material, found, context, progress)
    content = digest(f"{fingerprint}/{found.digest}/{context}")
    return Task(name, kind.about, kind.classes, found.vocabulary, splits, notes, content, found, kind.metric)
