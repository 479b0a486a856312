"""Learning rates by circuit: rules that multiply the rate of some parameters, constant or scheduled over the run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from headtohead.common.choices import check_choices
from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import is_number
from headtohead.mechanisms.contract.base import TAGS, Circuit
from headtohead.model.decoder import MODEL_TAGS

CIRCUITS = (*TAGS, *MODEL_TAGS)
_VALUES = {
    "constant": ("factor",),
    "ramp": ("start", "end", "until"),
    "hold_return": ("factor", "hold", "back"),
}
STORED = ("rates", "circuit_lr", "circuit_decay")
"""The keys under which stored settings hold rules."""
_SHORT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)x(?:\.\.([0-9.]+(?:e[+-]?[0-9]+)?)x)?\s*")
_BLOCK = re.compile(r"blocks\.([0-9]+)\.")


@dataclass(frozen=True)
class Rule:
    """The ratio of some parameters' learning rate to the run's learning rate, at every step."""

    tag: str = ""
    """a circuit; includes the parameters of tag `own` that follow it."""
    parameters: str = ""
    """instead of a circuit: a glob pattern of parameter names, such as *.mechanism.q.*"""
    layers: tuple[int | float, int | float] | None = None
    """first and last layer (integers, from 1), or two fractions of the depth (floats); all when None."""
    kind: Literal["constant", "ramp", "hold_return"] = "constant"
    """constant; ramp: linear from start to end; hold_return: factor, then linearly back to 1."""
    factor: float = 1.0
    """the ratio, under constant and hold_return."""
    start: float = 1.0
    """the ratio at the first step, under ramp."""
    end: float = 1.0
    """the final ratio of a ramp."""
    until: float = 1.0
    """fraction of the run after which a ramp has reached its end."""
    hold: float = 0.0
    """fraction of the run for which hold_return holds its factor."""
    back: float = 0.0
    """fraction of the run over which it then returns to 1."""

    def __post_init__(self) -> None:
        check_choices(self)
        if bool(self.tag) == bool(self.parameters):
            raise UserError("a circuit_lr rule needs either a tag or a parameters pattern, not both")
        if self.tag and self.tag not in CIRCUITS:
            raise unknown("circuit in circuit_lr", self.tag, CIRCUITS)
        for name in ("factor", "start", "end", "until", "hold", "back"):
            if not 0 <= getattr(self, name) < math.inf:
                what = "finite number >= 0" if name in ("factor", "start", "end") else "fraction of the run"
                raise UserError(f"{self._label}: {name}={getattr(self, name):g} is not a {what}")
        if self.until == 0 or self.until > 1:
            raise UserError(
                f"{self._label}: the ramp ends at {self.until:g} of the run; above 0 and up to 1 is allowed"
            )
        if self.hold + self.back > 1 + 1e-12:
            raise UserError(
                f"{self._label}: hold={self.hold:g} and back={self.back:g} go beyond the run's end; "
                "their sum may be at most 1"
            )

    @property
    def _label(self) -> str:
        return f"circuit_lr of {self.tag or self.parameters}"

    @property
    def _whole(self) -> bool:
        """Whether `layers` are numbers of layers and not fractions of the depth."""
        return self.layers is not None and all(type(value) is int for value in self.layers)

    @property
    def _range(self) -> str:
        low, high = self.layers or (0.0, 1.0)
        return f"layers {low} to {high}" if self._whole else f"layers {low:g} to {high:g}"

    def ratio(self, step: int, steps: int) -> float:
        """Return the ratio at step 0..steps-1."""
        if self.kind == "constant":
            return self.factor
        if self.kind == "ramp":
            return self.start + (self.end - self.start) * min(1.0, step / (self.until * steps))
        if step < self.hold * steps:
            return self.factor
        if step < (self.hold + self.back) * steps:
            share = (step - self.hold * steps) / (self.back * steps)
            return self.factor + (1 - self.factor) * share
        return 1.0

    @property
    def idle(self) -> bool:
        """Whether the ratio is 1 at every step."""
        return self.start == self.end == 1 if self.kind == "ramp" else self.factor == 1

    def span(self, depth: int) -> range:
        """Return the selected layers, counted from 0; raise if the range is outside a model of that depth."""
        if self.layers is None:
            return range(depth)
        low, high = self.layers
        if self._whole:
            if not 1 <= low <= high <= depth:
                outside = f"{self._range} are outside the model, whose layers are 1 to {depth}"
                raise UserError(f"{self._label}: {outside}")
            return range(int(low) - 1, int(high))
        if not 0 <= low < high <= 1:
            raise UserError(
                f"{self._label}: {self._range} are not fractions of the depth between 0.0 and 1.0"
            )
        chosen = range(math.floor(low * depth + 1e-9), math.floor(high * depth + 1e-9))
        if not chosen:
            raise UserError(f"{self._label}: {self._range} of the depth {depth} contain no layer")
        return chosen

    def words(self) -> str:
        """Return a readable description of the rule."""
        if self.kind == "constant":
            what = f"x{self.factor:g}"
        elif self.kind == "ramp":
            by = "over the run" if self.until == 1 else f"over the first {self.until:.3g} of the run"
            what = f"x{self.start:g} to x{self.end:g} {by}"
        else:
            what = f"x{self.factor:g} for {self.hold:.3g} of the run, back to x1 over {self.back:.3g}"
        where = "" if self.layers is None else f" in {self._range}" + ("" if self._whole else " of the depth")
        return f"{self.tag or self.parameters} {what}{where}"

    def as_dict(self) -> dict[str, Any]:
        """Return the rule as JSON-ready values; values that its kind does not use are left out."""
        names = [name for name in ("tag", "parameters", "layers") if getattr(self, name)]
        record = {name: getattr(self, name) for name in (*names, "kind", *_VALUES[self.kind])}
        return record | ({"layers": list(self.layers)} if self.layers is not None else {})


DECAY_WORDS = {
    "equal": "weight decay divided by the ratio: lr x decay is equal in all circuits",
    "coupled": "weight decay not divided: lr x decay scales with the ratio",
}


def parse_rules(given: Any) -> tuple[Rule, ...]:
    """Return the rules given as a list of tables, or as a table of short forms by circuit: 30x, or 1x..40x for a ramp."""
    if isinstance(given, Mapping):
        return tuple(_short(str(tag), text) for tag, text in given.items())
    if not isinstance(given, list | tuple):
        raise UserError(f"circuit_lr takes a list of rules, or a table such as {{qk = '30x'}}; got {given!r}")
    return tuple(rule if isinstance(rule, Rule) else _rule(rule) for rule in given)


def _short(tag: str, text: Any) -> Rule:
    match = _SHORT.fullmatch(text) if isinstance(text, str) else None
    try:
        numbers = [float(number) for number in match.groups() if number is not None] if match else []
    except ValueError:  # such as 1.2.3
        numbers = []
    if not numbers:
        raise UserError(
            f"circuit_lr of {tag} takes a ratio such as 30x or 0.5x, or a ramp such as 1x..40x; got '{text}'"
        )
    if len(numbers) == 1:
        return Rule(tag, factor=numbers[0])
    return Rule(tag, kind="ramp", start=numbers[0], end=numbers[1])


def _rule(given: Any) -> Rule:
    if not isinstance(given, Mapping):
        raise UserError(f"a circuit_lr rule is a table such as {{tag = 'qk', factor = 30}}; got {given!r}")
    kind = given.get("kind", "constant")
    if kind not in _VALUES:
        raise unknown("kind of rule in circuit_lr", str(kind), _VALUES)
    allowed = ("tag", "parameters", "layers", "kind", *_VALUES[kind])
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in allowed:
            raise unknown(f"value of a {kind} rule in circuit_lr", str(name), allowed)
        if name == "layers":
            value = _layers(value)
        elif name in ("tag", "parameters", "kind"):
            if not isinstance(value, str):
                raise UserError(f"circuit_lr: {name} takes a string, got {value!r}")
        elif not is_number(value):
            raise UserError(f"circuit_lr: {name} takes a number, got {value!r}")
        else:
            value = float(value)
        values[name] = value
    needed = [name for name in _VALUES[kind] if name != "until"]
    for name in needed:
        if name not in values:
            raise UserError(f"a {kind} rule of circuit_lr needs {', '.join(needed)}; {name} is missing")
    return Rule(**values)


def _layers(given: Any) -> tuple[float, float]:
    """Return a range of layers: integers are layers, floats fractions of the depth; a mixed pair is read as fractions."""
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(map(is_number, given)):
        raise UserError(f"circuit_lr: layers takes two numbers, such as [4, 6] or [0.5, 1.0]; got {given!r}")
    low, high = given
    return (low, high) if type(low) is int and type(high) is int else (float(low), float(high))


def rules_of_rates(text: str) -> tuple[Rule, ...]:
    """Return the constant rules of a run stored as `rates`, such as qk=3,ffn=0.5."""
    parts = (part.partition("=") for part in text.split(",")) if text else ()
    return tuple(Rule(tag.strip(), factor=float(value)) for tag, _, value in parts)


def rates_of_rules(rules: Sequence[Rule]) -> str | None:
    """Return the text that `rules_of_rates` parses, or None if a rule is not a constant for a whole circuit."""
    plain = [f"{rule.tag}={rule.factor:g}" for rule in rules if rule == Rule(rule.tag, factor=rule.factor)]
    return ",".join(plain) if len(plain) == len(rules) and rules else None


def assign(rules: Sequence[Rule], circuits: Sequence[Circuit], depth: int) -> dict[str, Rule]:
    """Return the rule of every parameter whose rate changes; raise if rules overlap or match no parameter.

    A group of tag `own` obeys a rule for `own`, otherwise the rule of the circuit it follows. A ratio of 1 counts as no
    rule: a separate parameter group would change the order of summation.
    """
    found: dict[str, Rule] = {}
    spans = [rule.span(depth) for rule in rules]
    unused = set(range(len(rules)))
    for circuit in circuits:
        for name in circuit.parameters:
            matches = [
                index for index, rule in enumerate(rules) if _matches(rule, spans[index], circuit, name)
            ]
            if circuit.tag == "own" and any(rules[index].tag == "own" for index in matches):
                matches = [index for index in matches if rules[index].tag != circuit.follows]
            if len(matches) > 1:
                one, other = (rules[index].words() for index in matches[:2])
                raise UserError(f"two rules of circuit_lr act on {name}: '{one}' and '{other}'")
            unused.difference_update(matches)
            if matches and not rules[matches[0]].idle:
                found[name] = rules[matches[0]]
    if unused:
        words, have = rules[min(unused)].words(), dict.fromkeys(circuit.tag for circuit in circuits)
        raise UserError(
            f"the rule '{words}' matches no parameter of this model (its circuits: {', '.join(have)})"
        )
    return found


def _matches(rule: Rule, span: range, circuit: Circuit, name: str) -> bool:
    if rule.layers is not None and block_of(name) not in span:
        return False
    if rule.parameters:
        return fnmatchcase(name, rule.parameters)
    return rule.tag == circuit.tag or (circuit.tag == "own" and rule.tag == circuit.follows)


def block_of(name: str) -> int | None:
    """Return the layer of a parameter, counted from 0, or None if it is in no block."""
    block = _BLOCK.match(name)
    return int(block[1]) if block else None


def with_words(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings with the rules, if any, and their decay setting as readable text."""
    shown = {key: value for key, value in record.items() if key not in STORED}
    rules, decay = recorded_rules(record)
    if rules:
        shown["circuit_lr"] = f"{'; '.join(rule.words() for rule in rules)} ({DECAY_WORDS[decay]})"
    return shown


def recorded_rules(record: Mapping[str, Any]) -> tuple[tuple[Rule, ...], str]:
    """Return the stored rules of a run and its `circuit_decay`; runs with `rates` are always coupled."""
    if record.get("rates"):
        return rules_of_rates(record["rates"]), "coupled"
    return parse_rules(record.get("circuit_lr", ())), record.get("circuit_decay", "equal")
