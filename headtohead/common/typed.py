"""Plain values of TOML and JSON as typed objects, by msgspec; a mistake is a UserError of one line."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, inspect

from headtohead.common.errors import UserError, unknown

T = TypeVar("T")
LARGEST = 10**15
"""Upper bound of counts and scores in a file; larger values and NaN are invalid."""
Text = Annotated[str, Meta(max_length=10_000)]
Count = Annotated[int, Meta(ge=0, lt=LARGEST)]
Amount = Count | Annotated[float, Meta(ge=0, lt=LARGEST)]
Number = Annotated[int, Meta(gt=-LARGEST, lt=LARGEST)] | Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]")
_CONSTRAINT = re.compile(r"` ((?:>|<|of length).*)")
_WORDS: dict[type[inspect.Type], tuple[str, str]] = {
    inspect.StrType: ("a string", "strings"),
    inspect.IntType: ("a whole number", "whole numbers"),
    inspect.FloatType: ("a number", "numbers"),
    inspect.BoolType: ("true or false", "values true or false"),
    inspect.StructType: ("a table", "tables"),
    inspect.DataclassType: ("a table", "tables"),
    inspect.DictType: ("a table", "tables"),
}


def decode(kind: type[T], value: Any, where: str = "") -> T:
    """Return `value` as a dataclass, a Struct or any type that msgspec reads; its classes check themselves when built.

    `where` is the name of the value, such as `model` or `scale.small`. The error names the setting, what it takes and
    what was given; that of an unknown key names the closest one.
    """
    known: Any = getattr(kind, "__struct_encode_fields__", ())
    if dataclasses.is_dataclass(kind):
        known = [field.name for field in dataclasses.fields(kind)]
    if known and isinstance(value, dict):
        for key in value:
            if key not in known:
                raise unknown(f"{where} setting".strip(), str(key), known)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _readable(str(error), inspect.type_info(kind), value, where) from None


def _readable(message: str, info: inspect.Type, value: Any, where: str) -> UserError:
    """Return the error for a message of msgspec such as: Expected `str`, got `int` - at `$.name`."""
    problem, _, path = message.partition(" - at `$")
    name = where
    described, given = "", value
    for key, index in _STEP.findall(path):
        members = _members(info)
        if key:
            name = f"{name}.{key}" if name else key
            fields = next((member.fields for member in members if hasattr(member, "fields")), ())
            info = next((field.type for field in fields if field.encode_name == key), inspect.AnyType())
            value, described = value[key], _description(info)
            given = value
        elif index == "...":  # msgspec names no keys of a dict
            name = f"a value of {name}"
            info = next((member.value_type for member in members if hasattr(member, "value_type")), info)
        else:
            info = next((member.item_type for member in members if hasattr(member, "item_type")), info)
            value = value[int(index)]
    if missing := re.match("Object missing required field `(.*)`", problem):
        return UserError(f"{'.'.join(filter(None, (name, missing[1])))} is missing")
    if described:
        return UserError(f"{name} takes {described}, got {given!r}")
    choices = [choice for member in _members(info) for choice in getattr(member, "values", ())]
    if choices and isinstance(value, str):
        return unknown(f"value for {name}", value, map(str, choices))
    bound = _CONSTRAINT.search(problem)
    return UserError(f"{name} takes {_words(info)}{f' {bound[1]}' if bound else ''}, got {value!r}")


def _members(info: inspect.Type) -> list[inspect.Type]:
    """Return the types of a union, or the type itself, without their descriptions."""
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    return [member.type if isinstance(member, inspect.Metadata) else member for member in members]


def _description(info: inspect.Type) -> str:
    """Return the description in `Annotated[..., Meta(description=...)]`, or an empty string."""
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    schemas = [member.extra_json_schema or {} for member in members if isinstance(member, inspect.Metadata)]
    return next((str(schema["description"]) for schema in schemas if "description" in schema), "")


def _words(info: inspect.Type) -> str:
    """Return what a type takes: a string or a list of strings."""
    if isinstance(info, inspect.UnionType):
        return " or ".join(
            dict.fromkeys(_words(one) for one in info.types if not isinstance(one, inspect.NoneType))
        )
    if isinstance(info, inspect.LiteralType):
        return "one of " + ", ".join(map(str, info.values))
    if item := getattr(info, "item_type", None):
        return f"a list of {_WORDS.get(type(item), ('', 'values'))[1]}"
    return _WORDS.get(type(info), ("another value", ""))[0]
