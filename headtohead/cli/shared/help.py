"""The options of a command, read from its signature and docstring, and its help page."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headtohead.cli.shared.options import Switch, flag
from headtohead.cli.shared.tables import entry

WIDTH = 100
_COLUMN = 30


@dataclass(frozen=True)
class Flag:
    """One option or positional argument."""

    name: str
    parameter: str
    """The parameter of the command that it sets, or the field of the dataclass in the parameter `holder`."""
    metavar: str
    about: str
    default: Any
    group: str
    positional: bool
    several: bool
    switch: bool
    """Whether it is given as --NAME and --no-NAME."""
    holder: str = ""
    kind: type[str] | type[int] | type[float] | type[Path] = str
    choices: tuple[str, ...] = ()
    """The values it takes; empty: any of its kind."""
    may_be_empty: bool = False
    """Whether a list without values means something."""

    @property
    def boolean(self) -> bool:
        """Whether it takes no value."""
        return isinstance(self.default, bool)

    def value(self, words: Sequence[str]) -> Any:
        """Return its value, given as these words."""
        if self.boolean:
            return words[0] == "on"
        return tuple(map(self.kind, words)) if self.several else self.kind(words[0])

    @property
    def spelling(self) -> str:
        """How it is typed: --tokens COUNT, --no-keep-weights, RUN."""
        several = " ..." if self.several else ""
        if self.positional:
            return f"{self.metavar}{several}"
        if self.boolean:
            return f"--no-{self.name}" if self.default else f"--{self.name}"
        if self.switch:
            return f"--[no-]{self.name}"
        return f"--{self.name} {self.metavar}{several}"

    @property
    def line(self) -> str:
        """What it does, with its default in brackets."""
        about, _, default = self.about.removesuffix(")").partition(" (default: ")
        if default:
            return f"{about} [{default}]"
        if self.boolean or self.default is inspect.Parameter.empty:
            return self.about
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        return f"{self.about} [{', '.join(map(str, values))}]"


def flags_of(owner: Any, holder: str = "", defaults: Any = None) -> list[Flag]:
    """Return the arguments of a command; keyword-only ones are options, a dataclass has one option per field."""
    hints = typing.get_type_hints(owner, include_extras=True)
    about = _descriptions(owner)
    flags: list[Flag] = []
    for parameter in inspect.signature(owner).parameters.values():
        hint = hints[parameter.name]
        plain, marks = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        if dataclasses.is_dataclass(plain):
            flags += flags_of(plain, parameter.name, parameter.default)
            continue
        mark = next((mark for mark in marks if isinstance(mark, flag)), flag())
        choices = tuple(map(str, typing.get_args(plain))) if typing.get_origin(plain) is Literal else ()
        kinds = (plain, *typing.get_args(plain))
        word = {int: "COUNT", float: "NUMBER"}.get(plain, "TEXT")
        one = Flag(
            name=mark.name or parameter.name.rstrip("_").replace("_", "-"),
            parameter=parameter.name,
            metavar=mark.metavar or "|".join(choices) or word,
            about=about.get(parameter.name, ""),
            default=getattr(defaults, parameter.name, parameter.default),
            group=getattr(owner, "heading", ""),
            positional=mark.positional
            or (not holder and parameter.kind is not inspect.Parameter.KEYWORD_ONLY),
            several="tuple[" in str(plain),
            switch=plain == Switch,
            holder=holder,
            kind=next((kind for kind in (int, float, Path) if kind in kinds), str),
            choices=choices,
            may_be_empty=mark.may_be_empty,
        )
        flags.append(one)
    return flags


def _descriptions(owner: Any) -> dict[str, str]:
    """Return the text about each parameter, from the Args sections of a docstring and those it inherits."""
    found: dict[str, str] = {}
    for kind in reversed(inspect.getmro(owner)) if inspect.isclass(owner) else [owner]:
        section = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
        for match in re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            found[match[1]] = " ".join(match[2].split())
    return found


def help_page(name: str, command: Callable[..., Any]) -> str:
    """Return the help of a command: usage, what it does, one line per option with its default."""
    flags = flags_of(command)
    arguments = [one for one in flags if one.positional]
    usage = " ".join(
        one.spelling if one.default is inspect.Parameter.empty else f"[{one.spelling}]" for one in arguments
    )
    head, _, _ = inspect.cleandoc(command.__doc__ or "").partition("Args:\n")
    lines = [f"usage: h2h {name} {usage}".rstrip() + " [OPTIONS]", ""]
    for paragraph in head.strip().split("\n\n"):
        lines += [*textwrap.wrap(" ".join(paragraph.split()), WIDTH), ""]
    for one in arguments:
        lines.append(entry(one.spelling, one.line, _COLUMN, WIDTH))
    if arguments:
        lines.append("")
    options = [one for one in flags if not one.positional]
    groups = list(dict.fromkeys(one.group for one in sorted(options, key=lambda one: one.group == "")))
    for group in groups:
        lines.append(f"{group or ('Options' if len(groups) == 1 else 'Other options')}:")
        for one in options:
            if one.group == group:
                lines.append(entry(one.spelling, one.line, _COLUMN, WIDTH))
        lines.append("")
    if any(one.line.endswith("]") for one in options):
        lines.append("Defaults are in brackets.")
    return "\n".join(lines).rstrip()
