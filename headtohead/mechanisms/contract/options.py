"""Options of a mechanism: a frozen dataclass with documented fields, validated on construction."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import parse_number


def option(
    default: Any,
    explanation: str,
    *,
    choices: Sequence[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    parse: Callable[[str], Any] | None = None,
    added_later: bool = False,
) -> Any:
    """Return a dataclass field with a one-line description and its allowed values.

    An option that is `added_later` to a mechanism with recorded runs has the behavior before as its default, and is part of
    a run's identity only with another value: the ids of those runs stay valid.
    """
    metadata = {"help": explanation, "choices": choices, "low": low, "high": high, "parse": parse}
    metadata["added_later"] = added_later
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of a mechanism's options; without fields, the mechanism has no options."""

    cases: ClassVar[str] = ""
    """Settings for `examples`, written as in arms and separated by spaces: `window=3 kv_heads=1,window=5`."""
    selector: ClassVar[str] = ""
    """The option that selects one of `variants`; an arm may write its value alone: `flex:softcap`."""
    state_rows: ClassVar[str] = ""
    """The option that sets the rows of a state of fixed size, 0 if unset; `shape = cache` with `cache_at` solves it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_value(field, getattr(self, field.name))
        self.validate()

    def validate(self) -> None:
        """Raise an error that gives the reason if values contradict each other."""

    @classmethod
    def variants(cls) -> Mapping[str, type[Options]]:
        """Return the class of options for each value of `selector`: this one, or derived with further fields."""
        return {}

    @classmethod
    def examples(cls) -> list[Options]:
        """Return the settings that `h2h check` runs: the default, then the `cases`, or every other listed value once."""
        settings: list[dict[str, Any]] = [{}]
        settings += [dict(_ASSIGNED.findall(case)) for case in cls.cases.split()]
        for field in () if cls.cases else dataclasses.fields(cls):
            values = field.metadata.get("choices") or ((False, True) if field.type in (bool, "bool") else ())
            settings += [{field.name: value} for value in values if value != field.default]
        return [build_options(cls.__name__, cls, setting) for setting in settings]


def build_options(owner: str, cls: type, given: Mapping[str, Any]) -> Any:
    """Return `cls(**given)` with strings parsed; errors name the option and the allowed values."""
    if getattr(cls, "selector", ""):
        owner, cls, given = _select(owner, cls, given)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in given.items():
        if name not in fields:
            raise unknown(f"option of {owner}", name, fields)
        parsed = isinstance(value, str)
        values[name] = _parse_value(owner, fields[name], hints[name], value) if parsed else value
    absent = dataclasses.MISSING
    needed = [name for name, field in fields.items() if field.default is field.default_factory is absent]
    missing = [name for name in needed if name not in values]
    if missing:
        raise UserError(f"{owner} needs its option '{missing[0]}': write {owner}:{missing[0]}=...")
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f"{owner}: {error}") from None


def _select(
    owner: str, cls: type[Options], given: Mapping[str, Any]
) -> tuple[str, type[Options], dict[str, Any]]:
    """Return the selected variant with its name, and the options; `softcap=30` sets the first option of `softcap`."""
    variants, given = cls.variants(), dict(given)
    usual: Any = next(field.default for field in dataclasses.fields(cls) if field.name == cls.selector)
    if cls.selector not in given and (short := next((name for name in given if name in variants), None)):
        own = variant_fields(cls, variants[short])
        if not own:
            raise UserError(f"{owner}: {short} has no options of its own; write {owner}:{short}")
        value = given.pop(short)
        if own[0].name in given:
            raise UserError(f"{owner}: option '{own[0].name}' of {short} is given twice")
        given |= {cls.selector: short, own[0].name: value}
    if cls.selector in given:
        chosen = given[cls.selector]
        if chosen not in variants:
            raise unknown(f"{cls.selector} of {owner}", value_text(chosen), variants)
        return f"{owner}:{chosen}", variants[chosen], given
    names = {field.name for field in dataclasses.fields(variants[usual])}
    if other := next((name for name in given if name not in names), None):
        owners = [
            value for value, one in variants.items() if any(other == f.name for f in variant_fields(cls, one))
        ]
        if owners:
            written = f"{owner}:{owners[0]},{other}={value_text(given[other])}"
            raise UserError(f"{owner}: {other} is an option of {', '.join(owners)}; write {written}")
        raise unknown(f"option or {cls.selector} of {owner}", other, {*names, *variants})
    return owner, variants[usual], given


def variant_fields(cls: type[Options], variant: type[Options]) -> list[dataclasses.Field[Any]]:
    """Return the fields that a variant adds to its class."""
    usual = {field.name for field in dataclasses.fields(cls)}
    return [field for field in dataclasses.fields(variant) if field.name not in usual]


def options_as_dict(options: Any) -> dict[str, Any]:
    """Return every option with its value, JSON-ready."""
    return {name: _listed(value) for name, value in _items(options)}


def identifying_options(options: Any) -> dict[str, Any]:
    """Return the options that are part of a run's identity: all but those added later that have their default."""
    fields, changed = dataclasses.fields(options), changed_options(options)
    silent = {field.name for field in fields if field.metadata.get("added_later")} - changed.keys()
    return {name: value for name, value in options_as_dict(options).items() if name not in silent}


def changed_options(options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return {name: value for name, value in _items(options) if value != defaults[name]}


def describe_options(cls: type) -> list[dict[str, Any]]:
    """Return name, type, default, choices and description of each option, for `h2h list`.

    The option that selects a variant is first, the options of variants are last.
    """
    selector = getattr(cls, "selector", "")
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.name != selector)
    rows = [_described(field) for field in fields]
    for value, variant in cls.variants().items() if issubclass(cls, Options) else ():
        for field in variant_fields(cls, variant):
            row = _described(field)
            rows.append(row | {"help": f"of {value}: {row['help']}"})
    return rows


def describe_variant_options(cls: type[Options], value: str) -> list[dict[str, Any]]:
    """Return the same for one variant, without those of others: its own options are first, the selector is left out."""
    own = variant_fields(cls, cls.variants()[value])
    shared = [field for field in dataclasses.fields(cls) if field.name != cls.selector]
    return [_described(field) for field in (*own, *shared)]


def _described(field: dataclasses.Field[Any]) -> dict[str, Any]:
    kind, default, choices = field.type, field.default, field.metadata.get("choices")
    return {
        "name": field.name,
        "type": kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)),
        "default": None if default is dataclasses.MISSING else _listed(default),
        "choices": list(choices) if choices else None,
        "help": field.metadata.get("help", ""),
    }


def value_text(value: Any) -> str:
    """Return an option's value as it is written in an arm."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "(" + ",".join(value_text(item) for item in value) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _items(options: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(options, field.name)) for field in dataclasses.fields(options)]


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    choices, low, high = (field.metadata.get(key) for key in ("choices", "low", "high"))
    if choices and value not in choices:
        raise unknown(f"value for {field.name}", value_text(value), map(value_text, choices))
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{field.name}={value_text(value)} must be finite")
    if isinstance(value, int):
        low, high = -_LARGEST if low is None else low, _LARGEST if high is None else high
    if low is not None and value < low:
        raise UserError(f"{field.name}={value_text(value)} is too small; at least {low} is allowed")
    if high is not None and value > high:
        raise UserError(f"{field.name}={value_text(value)} is too large; at most {high} is allowed")


def _parse_value(owner: str, field: dataclasses.Field[Any], hint: Any, text: str) -> Any:
    if parse := field.metadata.get("parse"):
        return parse(text)
    wanted = [kind for kind in _kinds(hint) if kind is not type(None)]
    for kind in (bool, int, float):
        if kind in wanted:
            try:
                return _BOOLS[text.lower()] if kind is bool else parse_number(text, kind)
            except (ValueError, KeyError):
                continue
    if str in wanted:
        return text
    allowed = " or ".join("true or false" if kind is bool else f"a {kind.__name__}" for kind in wanted)
    raise UserError(f"{owner}: option {field.name} takes {allowed}, got '{text}'")


def _kinds(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return (str,)
    return (hint,)


_BOOLS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_LARGEST = 2**31 - 1
"""No dimension or position is larger, and tensors of indices may have 32 bits."""
_ASSIGNED = re.compile(r"(\w+)=(\([^)]*\)|[^,]*)")
