"""The settings of a study: their types as an editor shows them, and each with type, default and one line.

Names, defaults and descriptions come from the classes that read the settings; the types of `StudySettings` are those of
the values that `Study(...)` takes. Tests compare the two.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypedDict, Union

import msgspec
from msgspec import Meta

from headtohead.common.errors import unknown
from headtohead.common.numbers import exact_count
from headtohead.mechanisms.contract.base import Bias, Positions
from headtohead.mechanisms.contract.score import Score
from headtohead.model.sizes import Settings, find_size
from headtohead.study.config.spec import GivenSettings, LengthRule, ShapeRule, Tune
from headtohead.training.circuit_rates import Rule
from headtohead.training.settings import DEFAULTS, TrainSettings, defaults_of

Count = Annotated[int | str, Meta(title="count")]
"""120000, 120k or 65M."""
Names = str | Sequence[str]
Ratios = Mapping[str, str] | Sequence[Mapping[str, Any]]
"""{qk = "30x"}, or a list of rules."""


class ModelSettings(TypedDict, total=False):
    """The table `model`."""

    positions: Positions
    bias: Bias
    norm: Literal["rms", "layer"]
    ffn: Literal["swiglu", "gelu"]
    tied: bool
    dropout: float
    init_std: float
    rope_theta: float
    norm_eps: float


class TuneSettings(TypedDict, total=False):
    """The table `tune`."""

    lr: Sequence[float]
    tokens: Count
    seeds: int


class TrainingSettings(TypedDict, total=False):
    """Settings of training, for the study or for one arm."""

    tokens: Count
    batch: Count
    lr: float
    schedule: Literal["cosine", "wsd", "constant"]
    warmup: float
    floor: float
    decay_share: float
    weight_decay: float
    beta1: float
    beta2: float
    clip: float
    smoothing: float
    precision: Literal["float32", "bf16"]
    evaluations: Count
    circuit_lr: Ratios
    circuit_decay: Literal["equal", "coupled"]


class ArmSettings(TrainingSettings, total=False):
    """An arm with settings of its own."""

    arm: typing.Required[str | type | Score]
    name: str
    model: ModelSettings
    init_from: str


Arms = str | type | Score | ArmSettings | Sequence[str | type | Score | ArmSettings]


class StudySettings(TrainingSettings, total=False):
    """The settings of a study except its arms, as keyword arguments of `Study`."""

    name: str
    corpus: Names
    size: Names
    seeds: int | str | Sequence[int]
    shape: ShapeRule | Sequence[ShapeRule]
    cache_at: Count
    length: LengthRule | Sequence[LengthRule]
    baseline: str
    primary: str
    margin: float | None
    tokenizer: str
    context: Count | Sequence[Count]
    branches: Sequence[Count]
    model: ModelSettings
    tune: TuneSettings
    bytes: Count
    probes: Names
    log_circuits: bool
    tasks: Names
    causal: bool
    answer: Literal["write", "point"]
    metric: str
    init_from: str


class RuleSettings(TypedDict, total=False):
    """One rule of `circuit_lr`."""

    tag: str
    parameters: str
    layers: Sequence[float]
    kind: Literal["constant", "ramp", "hold_return"]
    factor: float
    start: float
    end: float
    until: float
    hold: float
    back: float


@dataclass(frozen=True)
class Setting:
    """One setting of a study."""

    name: str
    """As `--set` takes it, such as `tokens` or `model.dropout`."""
    type: str
    default: str
    """Empty: none."""
    about: str
    group: str = ""
    """The table it belongs to: model, tune, circuit_lr; empty for a setting of the study."""

    def as_dict(self) -> dict[str, str]:
        """Return its fields."""
        return dataclasses.asdict(self)


@cache
def study_settings() -> tuple[Setting, ...]:
    """Return every setting of a study, in the order of the classes that read them."""
    hints = {"arms": Arms} | typing.get_type_hints(StudySettings, include_extras=True)
    sized = {name for values in DEFAULTS.values() for name in values}
    nano = defaults_of(find_size("nano"))

    def default(name: str, value: Any) -> str:
        return f"by size; nano: {_value_text(nano[name], hints[name])}" if name in sized else ""

    return (
        *_settings(GivenSettings, hints, "", default),
        *_settings(TrainSettings, hints, "", default),
        *_settings(Settings, typing.get_type_hints(ModelSettings, include_extras=True), "model"),
        *_settings(Tune, typing.get_type_hints(TuneSettings, include_extras=True), "tune"),
        *_settings(Rule, typing.get_type_hints(RuleSettings, include_extras=True), "circuit_lr"),
    )


def find_settings(name: str) -> list[Setting]:
    """Return the setting of that name, or all of a group; raise UserError for an unknown one."""
    known = study_settings()
    named = [one for one in known if one.name == name]
    inside = [one for one in known if one.group == name] if name else []
    last = [one for one in known if one.group and one.name.rpartition(".")[2] == name]
    if found := named + inside or last:
        return found
    raise unknown("study setting", name, [one.name for one in known])


def _settings(
    kind: type,
    hints: Mapping[str, Any],
    group: str,
    special: Callable[[str, Any], str] = lambda name, value: "",
) -> list[Setting]:
    """Return the settings that a dataclass or Struct reads, as members of a group."""
    about = field_descriptions(kind)
    rows = []
    for field, name, value in _fields(kind):
        text = special(name, value) or _value_text(value, hints[name])
        rows.append(
            Setting(f"{group}.{name}" if group else name, type_text(hints[name]), text, about[field], group)
        )
    return rows


def _fields(kind: type) -> list[tuple[str, str, Any]]:
    """Return attribute, name and default of each field; None without a default."""
    if dataclasses.is_dataclass(kind):
        absent = dataclasses.MISSING
        return [
            (field.name, field.name, None if field.default is absent else field.default)
            for field in dataclasses.fields(kind)
        ]
    return [
        (field.name, field.encode_name, None if field.default is msgspec.NODEFAULT else field.default)
        for field in msgspec.structs.fields(kind)
    ]


def field_descriptions(kind: type) -> dict[str, str]:
    """Return the line below each field of a class, without its final period."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[field.target.id] = str(after.value.value).removesuffix(".")
    return found


_WORDS: dict[Any, str] = {
    str: "string",
    type: "class",
    Score: "score function",
    int: "integer",
    float: "number",
    bool: "true|false",
}


def type_text(hint: Any) -> str:
    """Return a type in a few words: `string or list`, `count`, `cosine|wsd|constant`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next((mark.title for mark in arguments[1:] if isinstance(mark, Meta)), None) or type_text(
            arguments[0]
        )
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        parts = [type_text(part) for part in arguments if part is not types.NoneType]
        return " or ".join(dict.fromkeys(parts))
    if typing.is_typeddict(hint) or origin in (dict, Mapping, typing.get_origin(Mapping[str, str])):
        return "table"
    return "list" if origin is not None else _WORDS[hint]


def _value_text(value: Any, hint: Any) -> str:
    """Return a default as it is written in a study file; empty for none."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value in ("", (), {}) or (value == 0 and type_text(hint).startswith("count")):
        return ""
    if isinstance(value, int) and type_text(hint).startswith("count"):
        return exact_count(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
