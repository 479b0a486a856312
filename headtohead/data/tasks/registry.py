"""Tasks by name: read or generate examples, tokenize them, keep splits disjoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headtohead.common.errors import UserError, unknown
from headtohead.common.files import canonical_json, digest
from headtohead.data import hub
from headtohead.data.get.recorded import identity
from headtohead.data.locate import cache_dir, locate
from headtohead.data.tasks import zeroshot
from headtohead.data.tasks.base import Example, Material, Task, encoded, kept_apart
from headtohead.data.tasks.readers import Kind
from headtohead.data.tasks.sources import KINDS
from headtohead.data.tasks.synthetic import SYNTHETIC, Synthetic
from headtohead.data.text import SPLITS, Progress, silent
from headtohead.data.tokenizers import make_tokenizer, parse_tokenizer
from headtohead.mechanisms.contract.options import build_options, options_as_dict

RULE = 2
"""Bumped when the same files or options give different examples."""


def task_names() -> dict[str, str]:
    """Return the trainable tasks with a one-line description of each; synthetic ones take options."""
    read = {name: kind.about for name, kind in KINDS.items()}
    return read | {name: kind.about for name, kind in SYNTHETIC.items()}


def zeroshot_names() -> dict[str, str]:
    """Return the zero-shot tasks with a one-line description of each."""
    return {name: kind.about for name, kind in zeroshot.KINDS.items()}


def check_task_known(name: str) -> None:
    """Raise if no task has that name, or if a synthetic task does not have the given options."""
    word, _, given = name.partition(":")
    if word in SYNTHETIC:
        _options(word, given)
    elif name not in KINDS:
        raise unknown("task", name, task_names())


def task_kind(name: str) -> Kind[Any] | None:
    """Return the task of that name that is read from files, trained or zero-shot, or None."""
    return KINDS.get(name) or zeroshot.KINDS.get(name)


def task_files(name: str, data_dir: str | Path | None = None) -> dict[str, Path]:
    """Return the files of a task, trained or zero-shot, none for a synthetic one; raise if a file is missing."""
    if name.partition(":")[0] in SYNTHETIC:
        return {}
    kind = task_kind(name)
    if kind is None:
        raise unknown("task", name, task_names())
    return locate("task", name, kind.files, data_dir)


def prepare_task(
    name: str,
    tokenizer: str = "bytes",
    context: int = 128,
    *,
    data_dir: str | Path | None = None,
    cache: str | Path | None = None,
    progress: Progress = silent,
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
    vocabulary, metric = options.vocabulary, options.metric
    return Task(name, options.about, options.classes, vocabulary, ordered, {}, content, metric=metric)


def _read(
    name: str, tokenizer: str, context: int, data_dir: str | Path | None, cache: Path, progress: Progress
) -> Task:
    parse_tokenizer(tokenizer)
    if name not in KINDS:
        raise unknown("task", name, task_names())
    kind = KINDS[name]
    paths, _ = hub.find_files("task", name, kind.files, data_dir, cache)
    progress(f"reading {name}", 0.0)
    material = Material()
    for found in kind.read_all(paths, progress):
        material.add(found)
    material = kept_apart(material)
    files = [[key, identity(paths[key])[1]] for key in sorted(paths)]
    fingerprint = digest(canonical_json([RULE, name, files]))
    texts = [part for row in material.splits["train"] for part in (row.text, *row.answers[:1])]
    encoder = make_tokenizer(
        tokenizer, fingerprint, cache, lambda: (text.encode("utf-8") for text in texts), progress
    )
    splits, notes = encoded(material, encoder, context, progress)
    content = digest(f"{fingerprint}/{encoder.digest}/{context}")
    return Task(
        name, kind.about, kind.classes, encoder.vocabulary, splits, notes, content, encoder, kind.metric
    )
