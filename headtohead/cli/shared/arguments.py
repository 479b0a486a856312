"""The words of a command line in the form that tyro parses. A mistake in them is a UserError of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from headtohead.cli.shared.help import Flag, flags_of
from headtohead.common.errors import UserError, closest, unknown

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

    @functools.wraps(command)
    def deferred(*places: Any, **options: Any) -> Callable[[], Any]:
        return functools.partial(command, *places, **options)

    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    printed = io.StringIO()
    try:
        arguments = tyro_words(words, flags_of(command))
        with contextlib.redirect_stderr(printed):
            call: Callable[[], Any] = tyro.cli(deferred, prog=f"h2h {name}", args=arguments, config=config)
        return call
    except UserError as error:
        message = str(error)
    except SystemExit:  # a mistake that only tyro knows; its message is a box
        box = re.sub("[╭╮╰╯│]", "", printed.getvalue()).strip("─ \n")
        message = " ".join(re.split("─{3,}", box)[0].split()) or "invalid arguments"
    raise UserError(f"{message} (h2h {name} --help)")


def tyro_words(words: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Return the command line in the form that tyro parses, positional arguments first.

    Old spellings become new ones; `--no-compile` becomes `--compile off`; `--lr.qk 30x` becomes `--set lr.qk=30x`;
    `--set a --set b` becomes `--set a b`, and an option that takes one value and is given twice is rejected.
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
            name = f"--{one.name}"
            known.setdefault(name, one)
            target, room = places, math.inf
            if sign and (one.boolean or not on):
                raise UserError(f"{written} takes no value, got '{value}'")
            if one.boolean:
                if on is not one.default:
                    given.setdefault(name if on else f"--no-{one.name}", [])
                continue
            values = given.setdefault(name, [])
            if values and not one.several:
                raise UserError(f"{name} is given twice; it takes one value")
            if one.switch or sign:
                values.append(value if sign else "on" if on else "off")
            if one.several or not (one.switch or sign):
                target, room = values, math.inf if one.several else 1
    _check(known, given)
    _check_places([one for one in flags if one.positional], places)
    for name in [name for name in given if name.startswith("--lr.")]:
        given.setdefault("--set", []).append(f"{name.removeprefix('--')}={given.pop(name)[0]}")
    options = [part for name, values in given.items() for part in _spelled(name, values)]
    return [*places, *options] if not any(map(_OPTION.fullmatch, places)) else [*options, "--", *places]


def _option(written: str, known: dict[str, Flag]) -> tuple[Flag, bool]:
    """Return the option of a word, and False if the word is its negation."""
    name = OLD_FLAGS.get(written, written).replace("_", "-")
    if name in known:
        return known[name], True
    if name.startswith("--lr.") and "--set" in known:
        return dataclasses.replace(known["--set"], name=name[2:], metavar="RATIO", several=False), True
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


def _check(known: dict[str, Flag], given: dict[str, list[str]]) -> None:
    """Raise UserError for an option without a value, with a wrong value, or missing."""
    for name, one in known.items():
        if name not in given:
            if one.default is inspect.Parameter.empty:
                raise UserError(f"{one.spelling} is missing")
            continue
        if not given[name] and not one.boolean and not one.several:  # a list may be empty: --peers
            ratio = name.startswith("--lr.")
            raise UserError(f"{name} takes a ratio such as 30x" if ratio else f"{one.spelling} needs a value")
        for value in given[name]:
            _check_value(name, one, value)


def _check_places(expected: Sequence[Flag], places: Sequence[str]) -> None:
    """Raise UserError for a positional argument that is missing, wrong, or one too many."""
    for index, one in enumerate(expected):
        own = places[index:] if one.several else places[index : index + 1]
        if not own and not one.several and one.default is inspect.Parameter.empty:
            raise UserError(f"{one.spelling} is missing")
        for value in own:
            _check_value(one.metavar, one, value)
    if len(places) > len(expected) and not any(one.several for one in expected):
        raise UserError(f"unexpected argument '{places[len(expected)]}'")


def _check_value(name: str, one: Flag, value: str) -> None:
    if one.choices and value not in one.choices:
        raise unknown(f"value for {name}", value, [choice for choice in one.choices if choice])
    if one.kind is not str:
        try:
            one.kind(value)
        except ValueError:
            what = "a whole number" if one.kind is int else "a number"
            raise UserError(f"{name} takes {what}, got '{value}'") from None


def _spelled(name: str, values: list[str]) -> list[str]:
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{name}={values[0]}"]
    return [name, *values]
