"""h2h look."""

from __future__ import annotations

from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import DataDirectory, RunArguments, flag
from headtohead.common.errors import UserError
from headtohead.common.files import output_target
from headtohead.common.terminal import say


def command(
    runs: RunArguments,
    /,
    *,
    text: str = "",
    task: Annotated[str, flag("NAME")] = "",
    example: Annotated[int, flag("INDEX")] = 0,
    split: Annotated[str, flag("train|valid|test")] = "test",
    out: Annotated[str, flag("FILE")] = "look.html",
    device: Annotated[str, flag("auto|cpu|cuda")] = "cpu",
    data_dir: DataDirectory = None,
    trust_files: bool = False,
) -> int:
    """Write a page that shows what a run attends to in a text, head by head; two runs side by side.

    Example: h2h look races/quick/0f3a --text "the cat sat on the mat"

    Args:
        runs: one or two runs, each a directory or STUDY/ID
        text: text to read, cut from the left to the context (default: an example of the task)
        task: task whose example is read, its relevant tokens underlined (default: the task of the run)
        example: index of the example
        split: split of the task
        out: page to write
        device: where to run
        data_dir: directory of the named corpora and tasks (default: $H2H_DATA)
        trust_files: execute the mechanism file that a run names
    """
    if not runs:
        raise UserError('h2h look needs a run, such as: h2h look STUDY/ID --text "the cat sat"')
    page = api.look(
        runs,
        text,
        task=task,
        example=example,
        split=split,
        out=out,
        device=device,
        data_dir=data_dir,
        trust_files=trust_files,
    )
    if output_target(page) is not None:  # nothing follows a page on standard output
        say(page)
    return 0
