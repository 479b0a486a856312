"""Score functions: one elementwise function of the attention score, the head and the positions is a whole mechanism.

    @h2h.score
    def softcap(s, head, i, j, cap: float = 30.0):
        return cap * torch.tanh(s / cap)

`s` is the score q_i . k_j / sqrt(d), `head` the index of the query head, `i` and `j <= i` the positions of query and key:
tensors that broadcast. The other arguments are options, learned tensors, or facts of the model: `heads` and `context`.
A pair is hidden by -inf, depending on head, i and j only; a query's own key cannot be hidden.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headtohead.common.errors import UserError, first_line, unknown
from headtohead.common.stop import STOPS
from headtohead.kernels.attention.scored import NORMALIZATIONS, Change, numbered, visible_to_itself
from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.user_code import located, user_frame, user_place

ARGUMENTS = ("s", "head", "i", "j")
FACTS = ("heads", "context")
"""Arguments without a default that are given from the model's shape."""
_EXACT, _ROWS = 2048, 256
"""Contexts up to the first length are counted pair by pair, longer ones on a sample of rows."""
_KEYS, _NEAR = 8192, 2048
"""Rows with more keys than the first number are counted on their first and last `_NEAR` keys and a sample of the others."""
_MAX_NUMBERS = 2**28
"""Numbers in one learned tensor: 1 GiB for each layer."""


class Learned(Tensor):
    """The annotation of a learned tensor: `table: h2h.Learned = h2h.learned("heads", 128)`."""


@dataclasses.dataclass(frozen=True)
class LearnedSpec:
    """A learned tensor of a score function: its dimensions and initial values."""

    dims: tuple[int | str, ...]
    """Numbers, `heads`, `context`, or names of the function's int options."""
    init: float
    std: float

    def size(self, sizes: dict[str, Any]) -> tuple[int, ...]:
        """Return the dimensions as numbers."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


def learned(*dims: int | str, init: float = 0.0, std: float = 0.0) -> Any:
    """Return the default of a learned argument: a parameter of the layer, initially `init` plus normal values of `std`.

    A dimension is a number, `"heads"`, `"context"` or the name of an int option of the function.
    """
    return LearnedSpec(dims, float(init), float(std))


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A decorated score function; `call` it with its options."""

    name: str
    """The function's name, or the name by which the file of a user has it."""
    function: Callable[..., Any]
    normalize: str
    fields: tuple[tuple[str, type, Any], ...]
    """Name, type and dataclass field of each option."""
    learned: dict[str, LearnedSpec]
    facts: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<score function {self.name}>"

    @property
    def place(self) -> str:
        """File and line of the function."""
        return _place(self.function)

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        words = inspect.getdoc(self.function) or f"Attention with the scores of {self.name}."
        return words.splitlines()[0]

    def options_class(self, base: type[Options]) -> type[Options]:
        """Return a class derived from `base` with the function's options, and the function as its `function`."""
        for name, _, _ in self.fields:
            if hasattr(base, name) or name in base.__annotations__:
                raise UserError(
                    f"{self.place}: {self.name} cannot have an option '{name}': its options have an attribute of that "
                    f"name; rename it, such as {name}_"
                )
        # A copy: a field object belongs to one dataclass.
        fields = [
            (name, kind, dataclasses.field(default=field.default, metadata=field.metadata))
            for name, kind, field in self.fields
        ]
        title = "".join(word.title() for word in self.name.split("_")) + "Options"
        made = dataclasses.make_dataclass(
            title, fields, bases=(base,), frozen=True, namespace={"function": self}
        )
        made.__module__, made.__doc__ = self.function.__module__, f"Options of {self.name}."
        return made

    def shapes(self, options: Any, heads: int, context: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each learned tensor."""
        sizes = {name: getattr(options, name) for name, kind, _ in self.fields if kind is int}
        sizes |= {"heads": heads, "context": context}
        shapes = {name: spec.size(sizes) for name, spec in self.learned.items()}
        for name, shape in shapes.items():
            if math.prod(shape) > _MAX_NUMBERS:
                raise UserError(
                    f"{self.place}: learned {name} of {self.name} has the shape {shape}; at most {_MAX_NUMBERS:,} "
                    "numbers are allowed"
                )
        return shapes

    def __call__(self, s: Tensor, head: Tensor, i: Tensor, j: Tensor, **given: Any) -> Tensor:
        """Return the changed scores; options that are not given have their defaults."""
        usual = {name: field.default for name, _, field in self.fields}
        scores: Tensor = self.function(s, head, i, j, **(usual | given))
        return scores


@typing.overload
def score(function: Callable[..., Any]) -> Score: ...
@typing.overload
def score(*, normalize: str = "softmax") -> Callable[[Callable[..., Any]], Score]: ...
def score(
    function: Callable[..., Any] | None = None, *, normalize: str = "softmax", **others: Any
) -> Score | Callable[[Callable[..., Any]], Score]:
    """Return a score function, raced as `./FILE.py:NAME`; `normalize` is softmax, or sigmoid of each score by itself."""
    for name in others:
        raise UserError(f"{user_place()}: {unknown('argument of h2h.score', name, ['normalize'])}")
    if function is None:
        return lambda function: declare(function, normalize)
    return declare(function, normalize)


def declare(function: Callable[..., Any], normalize: str) -> Score:
    """Return the declaration of a function; an error names the argument and what is allowed."""
    _check_function(function)
    place = _place(function)
    if normalize not in NORMALIZATIONS:
        raise UserError(f"{place}: {unknown('normalization', str(normalize), NORMALIZATIONS)}")
    name = function.__name__ if function.__name__.isidentifier() else "score"  # a lambda
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = tuple(parameter.name for parameter in parameters[:4] if parameter.kind in positional)
    if given != ARGUMENTS:
        shown = inspect.Signature(
            [one.replace(default=one.empty, annotation=one.empty) for one in parameters]
        )
        raise UserError(
            f"{place}: {name}{shown} must begin with (s, head, i, j); options follow: cap: float = 30.0"
        )
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise UserError(f"{place}: an annotation of {name} cannot be read: {first_line(error)}") from error
    found = Score(name, function, normalize, (), {}, ())
    for parameter in parameters[4:]:
        found = _with_argument(found, parameter, hints.get(parameter.name), place)
    known = {*FACTS, *(name for name, kind, _ in found.fields if kind is int)}
    for argument, spec in found.learned.items():
        for dim in spec.dims:
            if not (dim in known if isinstance(dim, str) else type(dim) is int and dim > 0):
                allowed = ", ".join(sorted(known))
                raise UserError(
                    f"{place}: dimension {dim!r} of learned {argument} is not a number above 0 or one of {allowed}"
                )
    found = _with_positive_dimensions(found)
    options = found.options_class(Options)
    try:
        options()
    except UserError as error:
        raise UserError(f"{place}: default of {name}: {error}") from None
    return found


def _check_function(function: Any) -> None:
    """Raise UserError unless this is an ordinary function."""
    reason = ""
    if isinstance(function, Score):
        reason = f"{function.name} is a score function already; write @h2h.score once"
    elif isinstance(function, str):
        reason = f"h2h.score takes a function; write @h2h.score(normalize={function!r})"
    elif not inspect.isfunction(function):
        given = (
            f"the class {function.__name__}" if inspect.isclass(function) else f"a {type(function).__name__}"
        )
        reason = f"h2h.score takes a function, def or lambda, not {given}; its options are arguments: cap: float = 30.0"
    elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        reason = f"{function.__name__} is async; a score function is written with def alone"
    if reason:
        raise UserError(f"{user_place()}: {reason}")


def _with_positive_dimensions(found: Score) -> Score:
    """Return the declaration with a lower limit of 1 on each option that is a dimension."""
    dims = {dim for spec in found.learned.values() for dim in spec.dims}
    fields = []
    for name, kind, field in found.fields:
        if name in dims:
            metadata = {**field.metadata, "low": max(1, field.metadata.get("low") or 1)}
            field = dataclasses.field(default=field.default, metadata=metadata)
        fields.append((name, kind, field))
    return dataclasses.replace(found, fields=tuple(fields))


def _with_argument(found: Score, parameter: inspect.Parameter, hint: Any, place: str) -> Score:
    """Return the declaration with one more argument: a fact, a learned tensor or an option."""
    name, default = parameter.name, parameter.default
    where = f"{place}: argument {name} of {found.name}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise UserError(f"{where} is variable; name each option: cap: float = 30.0")
    if name in FACTS and default is not parameter.empty:
        raise UserError(f"{where} is a number of the model; write it without a default, or rename the option")
    if isinstance(default, LearnedSpec):
        if hasattr(nn.ParameterDict(), name):
            raise UserError(
                f"{where} cannot be learned under a name that torch uses; rename it, such as {name}_"
            )
        if not (math.isfinite(default.init) and 0 <= default.std < math.inf):
            raise UserError(
                f"{where} has init={default.init:g}, std={default.std:g}; allowed are finite numbers, std >= 0"
            )
        return dataclasses.replace(found, learned={**found.learned, name: default})
    if default is parameter.empty:
        if name in FACTS:
            return dataclasses.replace(found, facts=(*found.facts, name))
        raise UserError(f"{where} has no default; write {name}: float = 1.0 (without one: heads and context)")
    field = default if isinstance(default, dataclasses.Field) else option(default, f"option of {found.name}")
    kind, choices = _kind_of(hint, field.default, where)
    value = _default(kind, choices, field.default, where)
    metadata = {**field.metadata, **({"choices": choices} if choices else {})}
    made = dataclasses.field(default=value, metadata=metadata)
    return dataclasses.replace(found, fields=(*found.fields, (name, kind, made)))


def _kind_of(hint: Any, default: Any, where: str) -> tuple[type, tuple[str, ...] | None]:
    """Return the type of an option and its choices, from its annotation or else its default."""
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if all(isinstance(choice, str) for choice in choices):
            return str, choices
    kind = type(default) if hint is None else hint
    if kind in (int, float, bool):
        return kind, None
    shown = getattr(kind, "__name__", None) or str(kind)
    raise UserError(
        f"{where} has type {shown}; allowed are int, float, bool, Literal of texts, and h2h.Learned = h2h.learned(...)"
    )


def _default(kind: type, choices: tuple[str, ...] | None, default: Any, where: str) -> Any:
    if choices and default in choices:
        return default
    if not choices and (type(default), kind) in ((kind, kind), (int, float)):
        return kind(default)
    allowed = " or ".join(choices) if choices else f"a {kind.__name__}"
    raise UserError(f"{where} has the default {default!r}; it must be {allowed}")


# A function with its options, and what is verified of it.


@cache
def bind(options: Any, heads: int, context: int) -> Change:
    """Return (s, head, i, j, *learned) -> scores with options and facts filled in; one object for equal options.

    It never sees j > i, so that a logarithm or a table of i - j needs no special case for pairs that are masked.
    """
    found: Score = options.function
    facts = {"heads": heads, "context": context}
    fixed = {name: getattr(options, name) for name, _, _ in found.fields}
    fixed |= {name: facts[name] for name in found.facts}
    names, function = tuple(found.learned), found.function

    def change(s: Tensor, head: Tensor, i: Tensor, j: Tensor, *tables: Tensor) -> Tensor:
        given = dict(zip(names, tables, strict=True))
        scores: Tensor = function(s, head, i, torch.minimum(j, i), **fixed, **given)
        return scores

    def checked(s: Tensor, head: Tensor, i: Tensor, j: Tensor, *tables: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return change(s, head, i, j, *tables)
        try:
            scores = change(s, head, i, j, *tables)
        except (torch.OutOfMemoryError, MemoryError, UserError, *STOPS):
            raise
        except BaseException as error:
            if (frame := user_frame(error)) is None:
                raise
            raise UserError(located(error, frame)) from error
        return _checked(found, s, scores)

    checked.__name__ = found.name
    return numbered(checked)


def _checked(found: Score, s: Tensor, scores: Any) -> Tensor:
    """Return the scores in the precision of s, or raise if they have another shape or are no numbers."""
    if not isinstance(scores, Tensor):
        raise UserError(
            f"{found.place}: {found.name} returned a {type(scores).__name__}, not a tensor of scores"
        )
    if scores.shape != s.shape:
        raise UserError(
            f"{found.place}: {found.name} returned shape {tuple(scores.shape)} for s {tuple(s.shape)}; "
            "it must keep the shape of s"
        )
    if not scores.is_floating_point():
        kind = str(scores.dtype).removeprefix("torch.")
        raise UserError(f"{found.place}: {found.name} returned {kind}; it must return floating-point scores")
    return scores.to(s.dtype)


@cache
def verify(options: Any, heads: int, context: int) -> None:
    """Raise in one line if the function is not elementwise, or returns values that are not allowed.

    It is called on a few pairs of positions up to the context, and on single pairs, as FlexAttention calls it.
    """
    found: Score = options.function
    where, change = f"{found.place}: {found.name}", bind(options, heads, context)
    with torch.device("cpu"), torch.no_grad():
        places = torch.tensor(sorted({0, 1, 2, 3, 5, context // 2, context - 1} & set(range(context))))
        tables = _sample_tables(found, options, heads, context)
        count = len(places)
        s = torch.linspace(-3.0, 3.0, 2 * heads * count * count).view(2, heads, count, count)
        head, i, j = torch.arange(heads).view(-1, 1, 1), places.unsqueeze(-1), places
        given = (s, head, i, j, *tables)
        before = [one.clone() for one in given]
        scores = change(*given)
        if not all(map(torch.equal, given, before)):
            raise UserError(f"{where} changes its arguments in place; it must return a new tensor")
        others = change(-4 * s, head, i, j, *tables)
        with torch.enable_grad():
            trained = change(s, head, i, j, *tables).requires_grad
        if trained:
            raise UserError(
                f"{where} uses a parameter that is not an argument and would not be trained; declare it as one: "
                "table: h2h.Learned = h2h.learned(...)"
            )
        for index in _pairs(heads, count):
            _, h, row, column = index
            pair = f"head {h}, i={int(places[row])}, j={int(places[column])}"
            value, other = scores[index], others[index]
            for one in (value, other):
                if torch.isnan(one) or one == math.inf:
                    allowed = "allowed are numbers, and -inf to hide a pair"
                    raise UserError(f"{where} returned {one:g} at {pair}; {allowed}")
            if torch.isneginf(value) != torch.isneginf(other):
                raise UserError(f"{where} hides {pair} for some scores only; head, i and j alone may decide")
            alone = change(s[index], torch.tensor(h), places[row], places[column], *tables)
            if not torch.allclose(alone, value, rtol=1e-4, atol=1e-5):
                raise UserError(
                    f"{where} returned {value:g} at {pair} and {alone:g} for the same pair alone; "
                    "it must be elementwise and keep no state"
                )


def _pairs(heads: int, count: int) -> list[tuple[int, int, int, int]]:
    """Return sequence, head, row and column of the verified pairs: all causal ones of the first and last head."""
    return [
        (head % 2, head, row, column)
        for head in sorted({0, heads - 1})
        for row in range(count)
        for column in range(row + 1)
    ]


def _sample_tables(found: Score, options: Any, heads: int, context: int) -> list[Tensor]:
    """Return each learned tensor near its initial value, with different entries."""
    return [
        found.learned[name].init
        + 0.1 * torch.sin(torch.arange(math.prod(shape), dtype=torch.float32)).view(shape)
        for name, shape in found.shapes(options, heads, context).items()
    ]


@cache
def visible_keys(options: Any, heads: int, trained: int, context: int) -> float:
    """Return the mean number of keys that a query attends to in a context, over queries and heads.

    `trained` is the context that the model was built for. A longer context than `_EXACT` is counted on `_ROWS` rows, one
    drawn from each stretch of equal length, and on at most `_KEYS` keys of each.
    """
    change = bind(options, heads, trained)
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        if context > _EXACT:
            drawn = torch.rand(_ROWS, generator=generator)
            rows = ((torch.arange(_ROWS) + drawn) * (context / _ROWS)).long().clamp_max(context - 1)
        else:
            rows = torch.arange(context)
        tables = _sample_tables(options.function, options, heads, trained)
        head, total = torch.arange(heads).view(-1, 1, 1), 0.0
        for part in rows.split(max(1, 2**22 // (heads * min(context, _KEYS)))):
            i = part.unsqueeze(-1)
            j, weights = _counted_keys(i, context, generator)
            s = torch.zeros(heads, len(part), j.shape[-1])
            scores = visible_to_itself(s, change(s, head, i, j, *tables), i == j)
            total += float((((scores != -math.inf) & (j <= i)) * weights).sum())
    return total / (heads * len(rows))


def _counted_keys(i: Tensor, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the keys on which rows i (rows, 1) are counted, (rows, keys) or (keys,), and how many keys each represents.

    A window and a prefix are at the ends of a row, which are counted key by key. Between them one key is drawn from each
    stretch of equal length, which is 1 for rows of up to `_KEYS` keys.
    """
    if context <= _KEYS:
        return torch.arange(context), torch.ones(1, dtype=torch.float64)
    end, drawn = torch.arange(_NEAR), _KEYS - 2 * _NEAR
    count = (i + 1).clamp_min(_KEYS)
    length = (count - 2 * _NEAR) / drawn
    places = torch.arange(drawn) + torch.rand(len(i), drawn, generator=generator, dtype=torch.float64)
    between = _NEAR + (places * length).long().clamp_max(count - 2 * _NEAR - 1)
    j = torch.cat((end.expand(len(i), -1), between, count - _NEAR + end), dim=-1)
    weights = torch.ones(j.shape, dtype=torch.float64)
    weights[:, _NEAR:-_NEAR] = length
    return j, weights


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else "score function"
