"""h2h data, generate, evaluate."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import tyro

from headtohead import api
from headtohead.cli.flags import flag
from headtohead.cli.tables import number, print_table
from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import parse_count, short_bytes
from headtohead.common.progress import progress_bar
from headtohead.data.corpora import corpus_names, find_corpus
from headtohead.data.shards import cache_dir, prepare
from headtohead.data.tasks import zeroshot
from headtohead.data.tasks.registry import prepare_task, task_files, task_names
from headtohead.evaluation.corpus_stats import statistics_head, statistics_row
from headtohead.evaluation.references import reference_lines
from headtohead.evaluation.tasks import MARGINS
from headtohead.evaluation.zeroshot import TaskScore
from headtohead.model.generation import Sampling
from headtohead.study.store.manifest import metric_label
from headtohead.study.store.run_store import find_run

Run = Annotated[str, tyro.conf.Positional, flag("RUN")]
Directory = Annotated[str | None, flag("DIR")]


def data_list(*, data_dir: Directory = None) -> int:
    """Show the corpora and tasks and whether each is at hand.

    Args:
        data_dir: where the named sets stand; H2H_DATA when not given.
    """
    for title, names, find in (
        ("corpora", corpus_names(), lambda name: ":" in name or find_corpus(name, data_dir)),
        ("tasks", task_names(), lambda name: task_files(name, data_dir)),
        (
            "tasks scored without training",
            zeroshot.task_names(),
            lambda name: zeroshot.task_file(name, data_dir),
        ),
    ):
        rows = []
        for name, about in names.items():
            try:
                find(name)
                state = "at hand"
            except UserError as error:
                state = str(error).split(": ", 1)[-1]
            rows.append((name, about, state))
        print_table(title, ("task" if "task" in title else "corpus", "what it is", "state"), rows)
    print(f"prepared data goes to {cache_dir()} (H2H_CACHE)")
    return 0


def data_stats(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, flag("CORPUS")],
    /,
    *,
    window: Annotated[str, flag("BYTES")] = "1024",
    json_: Annotated[bool, flag(name="json")] = False,
    data_dir: Directory = None,
) -> int:
    """Show what corpora are like: size, entropy, xz ratio, repetition within a window, what holds a window together.

    Example: h2h data stats "coherence:0(stdlib)" "coherence:1(stdlib)" --window 256

    Args:
        names: stdlib, file:PATH, coherence:DIAL(CORPUS,...), or a named set (h2h data list).
        window: bytes of a window: the model's context times the bytes of a token.
        json_: as one JSON document.
        data_dir: where the named sets stand; H2H_DATA when not given.
    """
    if not names:
        raise UserError("h2h data stats needs a corpus, such as: h2h data stats stdlib")
    found = api.corpus_stats(names, window=parse_count(window, "--window"), data_dir=data_dir)
    if json_:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    head = statistics_head()
    rows = [(label, *statistics_row(row)) for label, row in found.items()]
    print_table(f"train splits, windows of {window} bytes", ("corpus", *head), rows, right=head)
    return 0


def data_prepare(
    name: Annotated[str, tyro.conf.Positional, flag("NAME")],
    /,
    *,
    tokenizer: str = "bytes",
    context: Annotated[str, flag("COUNT")] = "128",
    data_dir: Directory = None,
) -> int:
    """Turn a corpus into token shards now, instead of at the start of a race; of a task, say what it holds.

    Args:
        name: stdlib, file:PATH, coherence:DIAL(CORPUS,...), or a named set or task; synthetic tasks take options: recall:pairs=16.
        tokenizer: bytes, bpe:VOCABULARY or file:TOKENIZER.json.
        context: tokens that an example of a task may have; longer ones are left out, and counted.
        data_dir: where the named sets stand; H2H_DATA when not given.
    """
    if name.partition(":")[0] in task_names():
        return _show_task(name, tokenizer, parse_count(context, "--context"), data_dir)
    if ":" not in name and name not in corpus_names():
        raise unknown("corpus or task", name, [*corpus_names(), *task_names()])
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
    for key, value in corpus.notes.items():
        print(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
    print(
        "bits per byte on test without a model: "
        + ", ".join(f"{key} {value:.3f}" for key, value in lines.items())
    )
    size = sum(path.stat().st_size for path in corpus.folder.iterdir())
    print(f"{corpus.folder} ({short_bytes(size)}), ready after {time.monotonic() - began:.1f} s")
    return 0


def _show_task(name: str, tokenizer: str, context: int, data_dir: str | None) -> int:
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
        print(f"{words}: {count:,}")
    return 0


def generate(
    run: Run,
    /,
    *,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "auto",
    trust_files: Annotated[bool, flag()] = False,
) -> int:
    """Let a trained run continue a text: prefill, then decode from the cache.

    Args:
        run: a run's directory, or STUDY/ID.
        prompt: the text to continue.
        tokens: how many tokens to write.
        temperature: 0 always takes the likeliest token.
        top_p: keep the likeliest tokens that together have this probability.
        seed: of the draws.
        device: auto, cpu or cuda.
        trust_files: execute the mechanism file that the run names.
    """
    if tokens < 1:
        raise UserError(f"--tokens {tokens} is too small; at least 1 is allowed")
    sampling = Sampling(temperature, top_p, seed)
    pieces = api.generate_text(
        run,
        prompt,
        tokens=tokens,
        sampling=sampling,
        device=device,
        trust_files=trust_files,
        warn=lambda words: print(words, file=sys.stderr),
    )
    first = next(pieces, "")
    began = time.monotonic()
    print(prompt + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    rate = (tokens - 1) / max(1e-9, time.monotonic() - began)
    print()
    print(f"{tokens} tokens, {rate:.0f} tokens/s after the prompt", file=sys.stderr)
    return 0


def evaluate(
    run: Run,
    /,
    *,
    corpus: Annotated[str | None, flag("NAME")] = None,
    task: Annotated[tuple[str, ...], flag("NAME|all")] = (),
    split: Annotated[str | None, flag("train|valid|test")] = None,
    limit: Annotated[int | None, flag("COUNT")] = None,
    device: str = "auto",
    data_dir: Directory = None,
    json_: Annotated[bool, flag(name="json")] = False,
    trust_files: Annotated[bool, flag()] = False,
    skip: Annotated[str, flag("variant|standard|LAYERS")] = "",
    keep_ffn: Annotated[bool, flag()] = False,
) -> int:
    """Score a trained run on any corpus or on tasks, under the run's own tokenizer; give --corpus or --task.

    A run that was trained on a task is scored on that task; give neither.

    Args:
        run: a run's directory, or STUDY/ID.
        corpus: stdlib, file:PATH, or a named set.
        task: lambada, arc_easy, arc_challenge, boolq, copa, piqa, winogrande, rte, marvin_linzen, gulordava, arithmetic, or all.
        split: of a corpus, or of the task that the run was trained on; test when not given.
        limit: so many examples of each task, spread evenly over it; all when not given.
        device: auto, cpu or cuda.
        data_dir: where the named sets stand; H2H_DATA when not given.
        json_: as one JSON document.
        trust_files: execute the mechanism file that the run names.
        skip: leave out blocks of the trained model: every layer that is not standard (variant), every standard one,
            or layers counted from 1, such as 2,4-6.
        keep_ffn: leave out only the attention part of skipped layers.
    """
    if corpus is None and not task and limit is None and _of_task(run):
        found = api.evaluate_task(
            run,
            split=split or "test",
            device=device,
            data_dir=data_dir,
            trust_files=trust_files,
            quiet=json_,
            skip=skip,
            keep_ffn=keep_ffn,
        )
        _show_own_task(run, found, json_, skip, keep_ffn)
        return 0
    if (corpus is None) == (not task):
        raise UserError("give either --corpus or --task: what the run is to be scored on")
    if task:
        if split is not None:
            raise UserError(f"--split {split} is of a corpus; a task has one set of examples")
        if limit is not None and limit < 1:
            raise UserError(f"--limit {limit} is too small; at least 1 is allowed")
        scores = api.score_tasks(
            run,
            task,
            limit=limit or 0,
            device=device,
            data_dir=data_dir,
            trust_files=trust_files,
            quiet=json_,
            skip=skip,
            keep_ffn=keep_ffn,
        )
        _show_tasks(run, scores, json_, skip, keep_ffn)
        return 0
    if limit is not None:
        raise UserError(f"--limit {limit} counts a task's examples; a corpus is scored whole")
    assert corpus is not None
    split = split or "test"
    score = api.evaluate(
        run,
        corpus,
        split=split,
        device=device,
        data_dir=data_dir,
        trust_files=trust_files,
        quiet=json_,
        skip=skip,
        keep_ffn=keep_ffn,
    )
    if json_:
        print(
            json.dumps(
                {"run": run, "corpus": corpus, "split": split, "skip": skip, "keep_ffn": keep_ffn}
                | {**score.as_dict(), "blocks": len(score.blocks)}
            )
        )
        return 0
    row = (
        corpus,
        split,
        f"{score.bits_per_byte:.4f}",
        f"{score.nats:.4f}",
        f"{score.perplexity:.3f}",
        f"{score.tokens:,}",
    )
    columns = ("corpus", "split", "bits per byte", "nats per token", "perplexity", "tokens")
    print_table(_without(skip, keep_ffn), columns, [row], right=columns[2:])
    return 0


def _of_task(run: str) -> bool:
    """Return whether a run was trained on a task; one that is not there is named once it is known what is asked."""
    try:
        return "task" in find_run(run).spec()
    except UserError:
        return False


def _show_own_task(run: str, found: dict[str, Any], json_: bool, skip: str, keep_ffn: bool) -> None:
    """Print what a run scores on the task it was trained on."""
    if json_:
        print(json.dumps({"run": run, "skip": skip, "keep_ffn": keep_ffn} | found))
        return
    metrics = [name for name in MARGINS if name in found]
    lines = found["without_a_model"]
    columns = ("task", "split", *map(metric_label, metrics), "nats per target", "examples", *lines)
    scores = [f"{found[name]:.4f}" for name in (*metrics, "nats")]
    row = (
        found["task"],
        found["split"],
        *scores,
        f"{found['examples']:,}",
        *(f"{v:.4f}" for v in lines.values()),
    )
    print_table(_without(skip, keep_ffn), columns, [row], right=columns[2:])
    if "groups" in found:
        rows = [(name, f"{value:.4f}", f"{count:,}") for name, (value, count) in found["groups"].items()]
        print_table("by group", ("group", "score", "examples"), rows, right=("score", "examples"))


def _show_tasks(run: str, scores: list[TaskScore], json_: bool, skip: str, keep_ffn: bool) -> None:
    """Print scores on tasks, chance and standard errors beside them."""
    if json_:
        tasks = [score.as_dict() for score in scores]
        print(json.dumps({"run": run, "skip": skip, "keep_ffn": keep_ffn, "tasks": tasks}))
        return
    columns = (
        *("task", "n", "accuracy", "standard error", "by bytes", "its standard error"),
        *("chance", "one answer", "nats of the answer", "cut"),
    )
    rows = []
    for score in scores:
        shares = (
            *(score.accuracy, score.standard_error, score.accuracy_by_bytes),
            *(score.standard_error_by_bytes, score.chance, score.one_answer),
        )
        cells = [number(share, ".4f") for share in shares]
        rows.append((score.task, f"{score.n:,}", *cells, f"{score.nats:.2f}", f"{score.cut:,}"))
    print_table(_without(skip, keep_ffn), columns, rows, right=columns[1:])
    cut = sum(score.cut for score in scores)
    if cut:
        print(f"{cut:,} examples are longer than the model's context; their contexts were cut from the left")


def _without(skip: str, keep_ffn: bool) -> str:
    kept = " (feed-forward kept)" if keep_ffn else ""
    return f"without {skip}{kept}" if skip else ""
