"""h2h data prepare."""

from __future__ import annotations

import time
from typing import Annotated

from headtohead.cli.shared.options import DataDirectory, flag
from headtohead.cli.shared.tables import print_table
from headtohead.common.numbers import parse_count, short_bytes
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say
from headtohead.data.available import named_sets
from headtohead.data.shards import prepare, split_note
from headtohead.data.tasks.registry import prepare_task, task_names
from headtohead.evaluation.references import reference_lines


def command(
    name: Annotated[str, flag("NAME")],
    *,
    tokenizer: Annotated[str, flag("NAME")] = "bytes",
    context: Annotated[str, flag("COUNT")] = "128",
    data_dir: DataDirectory = None,
) -> None:
    """Tokenize a corpus into shards ahead of a race, or show the contents of a task.

    Args:
        name: stdlib, a path, coherence:DIAL(CORPUS,...), a named corpus, or a task: recall:pairs=16
        tokenizer: bytes, bpe:VOCABULARY or file:TOKENIZER.json
        context: longest example of a task in tokens; longer ones are dropped and counted
        data_dir: directory of the named corpora and tasks (default: $H2H_DATA)
    """
    if name.partition(":")[0] in task_names():
        return _show_task(name, tokenizer, parse_count(context, "--context"), data_dir)
    named_sets(name)  # raises for an unknown name
    began = time.monotonic()
    with progress_bar(f"preparing {name}") as progress:
        corpus = prepare(name, tokenizer, data_dir=data_dir, progress=progress)
        progress("reference lines", 0.99)
        lines = reference_lines(corpus)
    columns = ("split", "documents", "bytes", "tokens", "bytes per token")
    rows = []
    for split, part in corpus.splits.items():
        ratio = f"{part.bytes / max(1, len(part.tokens)):.3f}"
        rows.append((split, f"{len(part.documents):,}", f"{part.bytes:,}", f"{len(part.tokens):,}", ratio))
    title = (
        f"{corpus.label} ({corpus.fingerprint[:8]}), {tokenizer}, vocabulary {corpus.tokenizer.vocabulary:,}"
    )
    print_table(title, columns, rows, right=columns[1:])
    if note := split_note(corpus):
        say(note)
    for key, value in corpus.notes.items():
        say(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
    say(
        "bits per byte on test without a model: "
        + ", ".join(f"{key} {value:.3f}" for key, value in lines.items())
    )
    size = sum(path.stat().st_size for path in corpus.folder.iterdir())
    say(f"{corpus.folder} ({short_bytes(size)}), ready after {time.monotonic() - began:.1f} s")


def _show_task(name: str, tokenizer: str, context: int, data_dir: str | None) -> None:
    with progress_bar(f"preparing {name}") as progress:
        task = prepare_task(name, tokenizer, context, data_dir=data_dir, progress=progress)
    columns = ("split", "examples", "mean tokens", "with relevant tokens", *task.classes)
    rows = []
    for split, examples in task.splits.items():
        marked = sum(bool(example.relevant.any()) for example in examples)
        labels = [sum(example.label == label for example in examples) for label in range(len(task.classes))]
        mean = sum(len(example.tokens) for example in examples) / len(examples)
        shown = (f"{len(examples):,}", f"{mean:.1f}", f"{marked / len(examples):.1%}")
        rows.append((split, *shown, *(f"{count:,}" for count in labels)))
    print_table(f"{name}: {task.about}; vocabulary {task.vocabulary:,}", columns, rows, right=columns[1:])
    for words, count in task.notes.items():
        say(f"{words}: {count:,}")
