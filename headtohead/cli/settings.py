"""h2h settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from headtohead.cli.shared.options import Json, StudyOptions, flag
from headtohead.cli.shared.pages import settings_page
from headtohead.cli.shared.tables import entry, say_wrapped, width
from headtohead.common.files import write_atomic
from headtohead.common.terminal import say, say_json
from headtohead.study.config.settings import Setting, find_settings, study_settings


def command(
    name: Annotated[str, flag("NAME")] = "",
    *,
    json_: Json = False,
    page: Annotated[Path | None, flag("FILE")] = None,
) -> None:
    """List the settings of a study with type, default and one line each, or show one of them.

    Example: h2h settings schedule

    Args:
        name: setting such as tokens or model.dropout, or a table: model, tune, circuit_lr (default: all)
        json_: print one JSON document
        page: write the Markdown page about all settings to this file instead (default: none)
    """
    found = find_settings(name) if name else list(study_settings())
    if page is not None:
        write_atomic(page, settings_page())
        say(f"{len(study_settings())} settings written to {page}")
    elif json_:
        say_json([one.as_dict() for one in found], indent=1)
    elif len(found) == 1:
        _show(found[0])
    else:
        _list(found)


_HEADS = {
    "": "Study",
    "model": "Model, in the table model",
    "tune": "Tuning, in the table tune",
    "circuit_lr": "A rule of circuit_lr",
}
_COLUMN = 26


def _list(found: Sequence[Setting]) -> None:
    """Print one entry per setting: what it does, its type in parentheses and its default in brackets."""
    for group, head in _HEADS.items():
        rows = [one for one in found if one.group == group]
        if rows:
            say(f"{head}:")
        for one in rows:
            default = f" [{one.default}]" if one.default else ""
            say(entry(one.name, f"{one.about} ({one.type}){default}", _COLUMN, min(width(), 120)))
        if rows:
            say()
    say("Types are in parentheses, defaults in brackets. NAME = VALUE in a study file,")
    say("Study(NAME=VALUE) in Python, --set NAME=VALUE on the command line.")


def _show(one: Setting) -> None:
    say_wrapped(f"{one.name}: {one.about}")
    say(f"type:         {one.type}")
    say(f"default:      {one.default or 'none'}")
    own = {field.name for field in dataclasses.fields(StudyOptions)}
    if one.group == "circuit_lr":
        say('study file:   in a rule of circuit_lr, such as circuit_lr = [{tag = "qk", factor = 30}]')
        return
    flagged = f"--{one.name.replace('_', '-')} VALUE" if one.name in own else f"--set {one.name}=VALUE"
    place = f"{one.name} = VALUE" if not one.group else f"[{one.group}] {one.name.partition('.')[2]} = VALUE"
    say(f"study file:   {place}")
    say(f"command line: {flagged}")
