"""h2h look, explain: where trained runs look."""

from __future__ import annotations

import json
from typing import Annotated, Any

import tyro

from headtohead import api
from headtohead.cli.flags import flag
from headtohead.cli.tables import number, print_table
from headtohead.common.errors import UserError
from headtohead.interpret.faithfulness import THRESHOLDS

Runs = Annotated[tuple[str, ...], tyro.conf.Positional, flag("RUN")]
Directory = Annotated[str | None, flag("DIR")]


def look(
    runs: Runs,
    /,
    *,
    text: str = "",
    task: Annotated[str, flag("NAME")] = "",
    example: int = 0,
    split: Annotated[str, flag("train|valid|test")] = "test",
    out: Annotated[str, flag("FILE")] = "look.html",
    device: str = "cpu",
    data_dir: Directory = None,
    trust_files: Annotated[bool, flag()] = False,
) -> int:
    """Write a page that shows where a run looks in a text, head by head; two runs stand side by side.

    Example: h2h look races/quick/0f3a --text "the cat sat on the mat"

    A run that was trained on a task is shown an example of it where no text is given.

    Args:
        runs: one or two runs, each a directory or STUDY/ID.
        text: what to read; longer than the context, it is cut from the left.
        task: a task whose example is read in place of a text, its relevant tokens underlined; the run's own when not given.
        example: which one, counted from 0.
        split: of the task.
        out: where the page goes.
        device: auto, cpu or cuda.
        data_dir: where the named sets stand; H2H_DATA when not given.
        trust_files: execute the mechanism file that a run names.
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
    print(page)
    return 0


def explain(
    runs: Runs,
    /,
    *,
    task: Annotated[str, flag("NAME")] = "",
    split: Annotated[str, flag("train|valid|test")] = "test",
    limit: Annotated[int, flag("COUNT")] = 0,
    seed: int = 0,
    device: str = "auto",
    data_dir: Directory = None,
    json_: Annotated[bool, flag(name="json")] = False,
    trust_files: Annotated[bool, flag()] = False,
) -> int:
    """Measure where runs look on a task and whether that explains their answers; several runs are seeds of one arm.

    Args:
        runs: directories, or STUDY/ID.
        task: labelled examples with their relevant tokens (h2h data list); what the runs were trained on when not given.
        split: of the task.
        limit: so many examples, spread evenly over the split; all when 0.
        seed: of the random floor.
        device: auto, cpu or cuda.
        data_dir: where the named sets stand; H2H_DATA when not given.
        json_: everything as one JSON document.
        trust_files: execute the mechanism file that a run names.
    """
    if not runs:
        raise UserError("h2h explain needs a run, such as: h2h explain STUDY/ID")
    if limit < 0:
        raise UserError(f"--limit {limit} is too small; 0 means all")
    found = api.explain(
        runs,
        task,
        split=split,
        limit=limit,
        seed=seed,
        device=device,
        data_dir=data_dir,
        trust_files=trust_files,
        quiet=json_,
    )
    if json_:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    _show(found)
    return 0


def _show(found: dict[str, Any]) -> None:
    columns = ("", *found["explanations"], "chance")
    tables = [*found["explanations"].values(), found["chance"] | {"mass": found["uniform"]}]
    rows = [
        ("relevant mass", *(_cell(table["mass"]) for table in tables)),
        ("over even attention", *(_cell(table.get("over_uniform"), ".2f") for table in tables)),
    ]
    for key, at in THRESHOLDS.items():
        above = (_cell(table.get("confidence", {}).get(key), ".1f") for table in tables)
        rows.append((f"per cent above {at}", *above))
    for name in ("comprehensiveness", "sufficiency"):
        rows.append((name, *(_cell(table[name]) for table in tables)))
        rows.append((f"{name}, AOPC", *(_cell(table[f"aopc_{name}"]) for table in tables)))
    title = f"{found['task']}: {_cell(found['examples'], ',.0f')} examples, {_cell(found['marked'], ',.0f')} with relevant tokens"
    print_table(title, columns, rows, right=columns[1:])
    print(f"accuracy {_cell(found['accuracy'])}; the rest with --json")
    for words in found["without_map"]:
        print(f"no attention map: {words}")
    if found["signed_layers"]:
        print(
            "signed maps, taken by their absolute values: layers "
            + ", ".join(map(str, found["signed_layers"]))
        )


def _cell(value: Any, form: str = ".3f") -> str:
    """Return a number, or the mean of several seeds with its interval."""
    if not isinstance(value, dict):
        return number(value, form)
    if value["low"] is None:
        return number(value["mean"], form)
    return f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"
