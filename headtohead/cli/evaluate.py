"""h2h evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from headtohead import api
from headtohead.cli.shared.options import Json, RunArgument, ScoringOptions, flag
from headtohead.cli.shared.tables import print_rows, print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import number
from headtohead.common.terminal import say, say_json
from headtohead.evaluation.tasks import MARGINS
from headtohead.evaluation.zeroshot import TaskScore
from headtohead.study.store.manifest import metric_label
from headtohead.study.store.run_store import find_run


def command(
    run: RunArgument,
    *,
    corpus: Annotated[str | None, flag("NAME")] = None,
    task: Annotated[tuple[str, ...], flag("NAME|all")] = (),
    split: Annotated[str | None, flag("train|valid|test")] = None,
    limit: Annotated[int | None, flag("COUNT")] = None,
    skip: Annotated[str, flag("variant|standard|LAYERS")] = "",
    keep_ffn: bool = False,
    model: ScoringOptions = ScoringOptions(),  # noqa: B008  frozen
    json_: Json = False,
) -> None:
    """Score a trained run on a corpus or on zero-shot tasks, with the tokenizer of the run.

    A run that was trained on a task is scored on that task when neither --corpus nor --task is given.

    Args:
        run: STUDY/ARM/SEED, STUDY/ID or run directory
        corpus: stdlib, a path, or a named corpus (default: none)
        task: lambada, arc_easy, arc_challenge, boolq, copa, piqa, winogrande, rte, marvin_linzen,
            gulordava, arithmetic, or all (default: none)
        split: split of the corpus or of the task of the run (default: test)
        limit: examples per task, spread evenly over it (default: all)
        skip: layers to skip: all but standard ones (variant), standard ones, or 2,4-6 (default: none)
        keep_ffn: skip only the attention of those layers
        json_: print one JSON document
    """
    about = {"run": run, "skip": skip, "keep_ffn": keep_ffn}
    title = f"without {skip}{' (feed-forward kept)' if keep_ffn else ''}" if skip else ""
    how = {"skip": skip, "keep_ffn": keep_ffn, "quiet": json_, **model.arguments()}
    if corpus is None and not task and limit is None and _of_task(run):
        found = api.evaluate_task(run, split=split or "test", **how)
        if json_:
            say_json(about | found)
        else:
            _show_own_task(title, found)
    elif task and corpus is None:
        if split is not None:
            raise UserError(f"--split {split} applies to a corpus; a task has one set of examples")
        if limit is not None and limit < 1:
            raise UserError(f"--limit {limit} is too small; at least 1 is allowed")
        scores = api.score_tasks(run, task, limit=limit or 0, **how)
        if json_:
            say_json(about | {"tasks": [score.as_dict() for score in scores]})
        else:
            _show_tasks(title, scores)
    elif corpus is not None and not task:
        if limit is not None:
            raise UserError(f"--limit {limit} applies to tasks; a corpus is always scored whole")
        split = split or "test"
        score = api.evaluate(run, corpus, split=split, **how)
        if json_:
            say_json(
                about | {"corpus": corpus, "split": split, **score.as_dict(), "blocks": len(score.blocks)}
            )
            return
        numbers = (f"{score.bits_per_byte:.4f}", f"{score.nats:.4f}", f"{score.perplexity:.3f}")
        columns = ("corpus", "split", "bits per byte", "nats per token", "perplexity", "tokens")
        print_table(title, columns, [(corpus, split, *numbers, f"{score.tokens:,}")], right=columns[2:])
    else:
        raise UserError("give either --corpus or --task")


def _of_task(run: str) -> bool:
    """Return whether a run was trained on a task; False for a run that is missing."""
    try:
        return find_run(run).spec().task is not None
    except UserError:
        return False


def _show_own_task(title: str, found: dict[str, Any]) -> None:
    """Print the score of a run on the task it was trained on."""
    metrics = [name for name in MARGINS if name in found]
    lines = found["without_a_model"]
    columns = ("task", "split", *map(metric_label, metrics), "nats per target", "examples", *lines)
    scores = [f"{found[name]:.4f}" for name in (*metrics, "nats")]
    others = [f"{value:.4f}" for value in lines.values()]
    row = (found["task"], found["split"], *scores, f"{found['examples']:,}", *others)
    print_table(title, columns, [row], right=columns[2:])
    if "groups" in found:
        rows = [(name, f"{value:.4f}", f"{count:,}") for name, (value, count) in found["groups"].items()]
        print_table("by group", ("group", "score", "examples"), rows, right=("score", "examples"))


def _show_tasks(title: str, scores: list[TaskScore]) -> None:
    """Print scores on tasks with standard errors and chance."""
    columns: dict[str, Callable[[TaskScore], object]] = {
        "task": lambda score: score.task,
        "n": lambda score: f"{score.n:,}",
        "accuracy": lambda score: number(score.accuracy, ".4f"),
        "standard error": lambda score: number(score.standard_error, ".4f"),
        "by bytes": lambda score: number(score.accuracy_by_bytes, ".4f"),
        "its standard error": lambda score: number(score.standard_error_by_bytes, ".4f"),
        "chance": lambda score: number(score.chance, ".4f"),
        "one answer": lambda score: number(score.one_answer, ".4f"),
        "nats of the answer": lambda score: f"{score.nats:.2f}",
        "cut": lambda score: f"{score.cut:,}",
    }
    print_rows(title, scores, columns, text=("task",))
    cut = sum(score.cut for score in scores)
    if cut:
        say(f"{cut:,} examples are longer than the model's context; their contexts were cut from the left")
