"""h2h look."""

from __future__ import annotations

from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import RunArguments, ScoringOptions, flag
from headtohead.common.errors import UserError
from headtohead.common.files import output_target
from headtohead.common.terminal import say


def command(
    runs: RunArguments,
    *,
    text: str = "",
    task: Annotated[str, flag("NAME")] = "",
    example: Annotated[int, flag("INDEX")] = 0,
    split: Annotated[str, flag("train|valid|test")] = "test",
    out: Annotated[str, flag("FILE")] = "look.html",
    model: ScoringOptions = ScoringOptions(device="cpu"),  # noqa: B008  frozen
) -> None:
    """Write a page that shows what a run attends to in a text, head by head; two runs side by side.

    Example: h2h look races/quick/standard/1 --text "the cat sat on the mat"

    Args:
        runs: one or two runs: STUDY/ARM/SEED, STUDY/ID or run directory
        text: text to read, cut from the left to the context (default: an example of the task)
        task: task whose example is read, its relevant tokens underlined (default: the task of the run)
        example: index of the example
        split: split of the task
        out: page to write
    """
    if not runs:
        raise UserError('h2h look needs a run, such as: h2h look races/quick/standard/1 --text "the cat sat"')
    page = api.look(runs, text, task=task, example=example, split=split, out=out, **model.arguments())
    if output_target(page) is not None:  # nothing follows a page on standard output
        say(page)
