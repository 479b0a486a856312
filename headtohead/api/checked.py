"""Check the types of arguments: a wrong one is a UserError of one line instead of an error deep inside."""

from __future__ import annotations

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Union

from headtohead.common.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")
_ACCEPTED: dict[Any, tuple[type, ...]] = {
    int: (Integral,),
    float: (Real,),
    Path: (os.PathLike,),
}
"""What is accepted for a type besides its instances; NumPy has numbers of its own."""
_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    types.NoneType: "None",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with a check of its arguments against their annotations.

    Plain types, paths, sequences and unions of them are checked; other annotations accept anything.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            hint = _hints(function).get(name, Any)
            if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD and not _fits(
                value, hint
            ):
                raise UserError(f"{name} takes {_words(hint)}, got {value!r:.80}")
        return function(*args, **kwargs)

    return wrapper


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: object, hint: Any) -> bool:
    return any(_fits_one(value, member) for member in _members(hint))


def _fits_one(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Sequence:
        (item,) = typing.get_args(hint)
        return isinstance(value, list | tuple) and all(_fits(part, item) for part in value)
    if origin is Literal:
        return isinstance(value, str)  # the function names the allowed ones
    if hint not in _WORDS:
        return True
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (hint, *_ACCEPTED.get(hint, ())))


def _words(hint: Any) -> str:
    """Return what a parameter takes: a path or a list of paths."""
    members = _members(hint)
    if Path in members:
        members = tuple(member for member in members if member is not str)
    listed = [
        f"a list of {_words(typing.get_args(member)[0]).removeprefix('a ')}s"
        if typing.get_origin(member) is Sequence
        else "a text"
        if typing.get_origin(member) is Literal
        else _WORDS[member]
        for member in members
    ]
    return " or ".join(listed)
