"""The options of a command, read from its signature and docstring, and its help page."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from headtohead.cli.shared.options import Switch

WIDTH = 100
_COLUMN = 30


@dataclass(frozen=True)
class Flag:
    """One option or positional argument."""

    name: str
    metavar: str
    about: str
    default: Any
    group: str
    positional: bool
    several: bool
    switch: bool
    """Whether it is given as --NAME and --no-NAME."""
    kind: type[str] | type[int] | type[float] = str
    choices: tuple[str, ...] = ()
    """The values it takes; empty: any of its kind."""

    @property
    def boolean(self) -> bool:
        """Whether it takes no value."""
        return self.default in (True, False) and isinstance(self.default, bool)

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


def flags_of(command: Callable[..., Any]) -> list[Flag]:
    """Return the options of a command; a dataclass parameter gives one option per field."""
    return [*_flags(command, "")]


def _flags(owner: Any, group: str) -> Iterator[Flag]:
    hints = typing.get_type_hints(owner, include_extras=True)
    about = _descriptions(owner)
    for parameter in inspect.signature(owner).parameters.values():
        hint, default = hints[parameter.name], parameter.default
        plain, marks = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        if dataclasses.is_dataclass(plain):
            yield from _flags(plain, (inspect.getdoc(plain) or "").partition(".")[0])
            continue
        given = next((mark for mark in marks if hasattr(mark, "metavar")), None)
        literal = typing.get_args(plain) if typing.get_origin(plain) is Literal else ()
        metavar = (given.metavar if given else None) or "|".join(map(str, literal)) or _kind(plain)
        yield Flag(
            name=(given.name if given and given.name else parameter.name.rstrip("_").replace("_", "-")),
            metavar=metavar,
            about=about.get(parameter.name, ""),
            default=default,
            group=group,
            positional=tyro.conf.Positional in marks,
            several=typing.get_origin(plain) is tuple or "tuple[" in str(plain),
            switch=plain == Switch,
            kind=next((kind for kind in (int, float) if kind in (plain, *typing.get_args(plain))), str),
            choices=tuple(map(str, literal)),
        )


def _kind(hint: Any) -> str:
    return {int: "COUNT", float: "NUMBER"}.get(hint, "TEXT")


def _descriptions(owner: Any) -> dict[str, str]:
    """Return the text about each parameter, from the Args sections of a docstring and those it inherits."""
    found: dict[str, str] = {}
    for kind in reversed(inspect.getmro(owner)) if inspect.isclass(owner) else [owner]:
        _, _, section = inspect.cleandoc(vars(kind).get("__doc__", "") or kind.__doc__ or "").partition(
            "Args:\n"
        )
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
        lines += _entry(one)
    if arguments:
        lines.append("")
    options = [one for one in flags if not one.positional]
    groups = list(dict.fromkeys(one.group for one in sorted(options, key=lambda one: one.group == "")))
    for group in groups:
        lines.append(f"{group or ('Options' if len(groups) == 1 else 'Other options')}:")
        for one in options:
            if one.group == group:
                lines += _entry(one)
        lines.append("")
    if any(one.line.endswith("]") for one in options):
        lines.append("Defaults are in brackets.")
    return "\n".join(lines).rstrip()


def _entry(one: Flag) -> list[str]:
    indent = " " * _COLUMN
    about = textwrap.wrap(one.line, WIDTH - _COLUMN)
    spelled = f"  {one.spelling}"
    if len(spelled) >= _COLUMN:
        return [spelled, *(indent + line for line in about)]
    return [spelled.ljust(_COLUMN) + (about[0] if about else ""), *(indent + line for line in about[1:])]
