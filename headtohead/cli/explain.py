"""h2h explain."""

from __future__ import annotations

from typing import Annotated, Any

from headtohead import api
from headtohead.cli.shared.options import Json, RunArguments, ScoringOptions, flag
from headtohead.cli.shared.tables import print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import number
from headtohead.common.terminal import say, say_json
from headtohead.interpret.faithfulness import THRESHOLDS


def command(
    runs: RunArguments,
    *,
    task: Annotated[str, flag("NAME")] = "",
    split: Annotated[str, flag("train|valid|test")] = "test",
    limit: Annotated[int, flag("COUNT")] = 0,
    seed: int = 0,
    model: ScoringOptions = ScoringOptions(),  # noqa: B008  frozen
    json_: Json = False,
) -> None:
    """Measure what runs attend to on a task and whether that explains their answers.

    Several runs are treated as seeds of one arm.

    Args:
        runs: STUDY/ARM/SEED, STUDY/ID or run directories
        task: task with relevant tokens marked, see h2h data list (default: the task of the runs)
        split: split of the task
        limit: examples to use, spread evenly over the split; 0: all
        seed: seed of the random baseline
        json_: print one JSON document
    """
    if not runs:
        raise UserError("h2h explain needs a run, such as: h2h explain races/quick/standard/1")
    if limit < 0:
        raise UserError(f"--limit {limit} is too small; 0 means all")
    found = api.explain(runs, task, split=split, limit=limit, seed=seed, quiet=json_, **model.arguments())
    if json_:
        say_json(found, indent=1)
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    columns = ("", *found["explanations"], "chance")
    tables = [*found["explanations"].values(), found["chance"] | {"mass": found["uniform"]}]
    rows = [
        ("attention on relevant tokens", *(_cell(table["mass"]) for table in tables)),
        ("ratio to uniform attention", *(_cell(table.get("over_uniform"), ".2f") for table in tables)),
    ]
    for key, at in THRESHOLDS.items():
        above = (_cell(table.get("confidence", {}).get(key), ".1f") for table in tables)
        rows.append((f"% of examples above {at}", *above))
    for name in ("comprehensiveness", "sufficiency"):
        rows.append((name, *(_cell(table[name]) for table in tables)))
        rows.append((f"{name}, AOPC", *(_cell(table[f"aopc_{name}"]) for table in tables)))
    title = f"{found['task']}: {_cell(found['examples'], ',.0f')} examples, {_cell(found['marked'], ',.0f')} with relevant tokens"
    print_table(title, columns, rows, right=columns[1:])
    say(f"accuracy {_cell(found['accuracy'])}; --json prints everything")
    for words in found["without_map"]:
        say(f"no attention map: {words}")
    if found["signed_layers"]:
        say("absolute values of signed maps: layers " + ", ".join(map(str, found["signed_layers"])))


def _cell(value: Any, form: str = ".3f") -> str:
    """Return a number, or the mean over seeds with its interval."""
    if not isinstance(value, dict):
        return number(value, form)
    if value["low"] is None:
        return number(value["mean"], form)
    return f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"
