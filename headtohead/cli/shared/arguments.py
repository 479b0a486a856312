"""The words of a command line as a call of its command. A mistake in them is a UserError of one line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from headtohead.cli.shared.help import Flag, flags_of
from headtohead.common.errors import UserError, closest, unknown
from headtohead.common.numbers import parse_number

# Spellings until version 0.1; accepted, not shown.
OLD_FLAGS = {
    "--for": "--time-limit",
    "--from": "--init-from",
    "--stack": "--population",
    "--no-stack": "--no-population",
}
_OPTION = re.compile(r"--.+|-[A-Za-z][\w-]*(=.*)?", re.DOTALL)


def parse_command(name: str, command: Callable[..., Any], words: Sequence[str]) -> Callable[[], Any]:
    """Return the call of a command with the arguments in `words`."""
    flags = flags_of(command)
    try:
        given = read_words(words, flags)
    except UserError as error:
        raise UserError(f"{error} (h2h {name} --help)") from None
    parameters = inspect.signature(command).parameters
    arguments: list[Any] = []
    options: dict[str, Any] = {}
    for one in flags:
        value = one.value(given[one.name]) if one.name in given else one.default
        if one.positional and not one.holder:
            arguments.append(() if value is inspect.Parameter.empty else value)
        elif one.name in given and one.holder:
            held = options.get(one.holder, parameters[one.holder].default)
            options[one.holder] = dataclasses.replace(held, **{one.parameter: value})
        elif one.name in given:
            options[one.parameter] = value
    return functools.partial(command, *arguments, **options)


def read_words(words: Sequence[str], flags: Sequence[Flag]) -> dict[str, list[str]]:
    """Return the values of each option and positional argument that is given, by name.

    Old spellings become new ones; `--no-compile` is the value off of `compile`; `--lr.qk 30x` is the value lr.qk=30x
    of `set`; the values of `--set a --set b` are joined, and an option that takes one value and is given twice is rejected.
    """
    known = {f"--{one.name}": one for one in flags if not one.positional}
    given: dict[str, list[str]] = {}
    places: list[str] = []
    # The list that takes the next word, and the number of words it still takes.
    target, room = places, math.inf
    rest = iter(words)
    for word in rest:
        if word == "--":
            places.extend(rest)
        elif not _OPTION.fullmatch(word):
            target.append(word)
            room -= 1
            if room == 0:
                target, room = places, math.inf
        else:
            written, sign, value = word.partition("=")
            one, on = _option(written, known)
            target, room = places, math.inf
            if sign and (one.boolean or not on):
                raise UserError(f"{written} takes no value, got '{value}'")
            if one.boolean:
                given[one.name] = ["on" if on else "off"]
                continue
            values = given.setdefault(one.name, [])
            if values and not one.several:
                raise UserError(f"--{one.name} is given twice; it takes one value")
            if one.switch or sign:
                values.append(value if sign else "on" if on else "off")
            if one.several or not (one.switch or sign):
                target, room = values, math.inf if one.several else 1
    positional = [one for one in flags if one.positional]
    for one in positional:
        if own := places[:] if one.several else places[:1]:
            given[one.name] = own
        del places[: len(own)]
    for one in (*known.values(), *positional):
        _check(one, given.get(one.name))
    if places:
        raise UserError(f"unexpected argument '{places[0]}'")
    for name in [name for name in given if name.startswith("lr.")]:
        given.setdefault("set", []).append(f"{name}={given.pop(name)[0]}")
    return given


def _option(written: str, known: dict[str, Flag]) -> tuple[Flag, bool]:
    """Return the option of a word, and False if the word is its negation. The ratio of a circuit is added to `known`."""
    name = OLD_FLAGS.get(written, written).replace("_", "-")
    if name.startswith("--lr.") and "--set" in known:
        ratio = dataclasses.replace(known["--set"], name=name[2:], metavar="RATIO", several=False)
        known.setdefault(name, ratio)
    if name in known:
        return known[name], True
    positive = known.get(f"--{name.removeprefix('--no-')}")
    if positive is not None and (positive.switch or positive.boolean):
        return positive, False
    spellings = [part for one in known.values() for part in _spellings(one)]
    match = closest(written.lstrip("-"), spellings)
    raise UserError(f"unknown option {written}" + (f"; did you mean --{match}?" if match else ""))


def _spellings(one: Flag) -> list[str]:
    if one.switch:
        return [one.name, f"no-{one.name}"]
    return [f"no-{one.name}" if one.boolean and one.default else one.name]


def _check(one: Flag, values: list[str] | None) -> None:
    """Raise UserError for an option or positional argument that is missing, has no value or a wrong one."""
    if values is None and one.default is inspect.Parameter.empty and not (one.positional and one.several):
        raise UserError(f"{one.spelling} is missing")
    name = one.metavar if one.positional else f"--{one.name}"
    if (values == [] and not one.may_be_empty) or "" in (values or ()):
        ratio = name.startswith("--lr.")
        raise UserError(f"{name} takes a ratio such as 30x" if ratio else f"{one.spelling} needs a value")
    for value in values or ():
        if one.choices and value not in one.choices:
            raise unknown(f"value for {name}", value, [choice for choice in one.choices if choice])
        try:
            if one.kind is int or one.kind is float:
                parse_number(value, one.kind)
        except ValueError:
            what = "a whole number" if one.kind is int else "a number"
            raise UserError(f"{name} takes {what}, got '{value}'") from None
