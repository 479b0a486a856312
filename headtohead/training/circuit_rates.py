"""Learning rates by circuit: rules that multiply the rate of some parameters, constant or over the run."""

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
_SHORT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)x(?:\.\.([0-9.]+(?:e[+-]?[0-9]+)?)x)?\s*")
_BLOCK = re.compile(r"blocks\.([0-9]+)\.")


@dataclass(frozen=True)
class Rule:
    """The ratio of some parameters' learning rate to the run's, at every step."""

    tag: str = ""
    """a circuit; its own parameters that follow it move with it."""
    parameters: str = ""
    """in place of a circuit: a pattern of parameter names, such as *.mechanism.q.*"""
    layers: tuple[float, float] | None = None
    """first and last layer counted from 1, or two shares of the depth written with a point; all when None."""
    kind: Literal["constant", "ramp", "hold_return"] = "constant"
    """constant; ramp: linear from start to end; hold_return: factor, then linearly back to 1."""
    factor: float = 1.0
    """the ratio, under constant and hold_return."""
    start: float = 1.0
    """the ratio at the first step, under ramp."""
    end: float = 1.0
    """the ratio that a ramp comes to, and keeps."""
    until: float = 1.0
    """share of the run after which a ramp has come to its end."""
    hold: float = 0.0
    """share of the run for which hold_return holds."""
    back: float = 0.0
    """share of the run over which it then returns."""

    def __post_init__(self) -> None:
        check_choices(self)
        if bool(self.tag) == bool(self.parameters):
            raise UserError("a rule of circuit_lr names a tag or a pattern of parameters, one of the two")
        if self.tag and self.tag not in CIRCUITS:
            raise unknown("circuit in circuit_lr", self.tag, CIRCUITS)
        for name in ("factor", "start", "end"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{self._place}: {name}={getattr(self, name):g} is negative or no number")
        for name in ("until", "hold", "back"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{self._place}: {name}={getattr(self, name):g} is no share of the run")
        if self.until == 0 or self.until > 1:
            raise UserError(
                f"{self._place}: the ramp ends at {self.until:g} of the run; above 0 and up to 1 is allowed"
            )
        if self.hold + self.back > 1 + 1e-12:
            raise UserError(
                f"{self._place}: hold={self.hold:g} and back={self.back:g} go beyond the run's end; "
                "together they are at most 1"
            )

    @property
    def _place(self) -> str:
        return f"circuit_lr of {self.tag or self.parameters}"

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
        """Return the layers meant, counted from 0; a range outside a model of that depth is refused."""
        if self.layers is None:
            return range(depth)
        low, high = self.layers
        if all(type(value) is int for value in self.layers):
            if not 1 <= low <= high <= depth:
                raise UserError(
                    f"{self._place}: layers {low} to {high} are outside the model, whose layers are 1 to {depth}"
                )
            return range(int(low) - 1, int(high))
        if not 0 <= low < high <= 1:
            raise UserError(
                f"{self._place}: layers {low:g} to {high:g} are no shares of the depth; 0.0 to 1.0 are"
            )
        chosen = range(math.floor(low * depth + 1e-9), math.floor(high * depth + 1e-9))
        if not chosen:
            raise UserError(f"{self._place}: layers {low:g} to {high:g} of the depth {depth} hold no layer")
        return chosen

    def words(self) -> str:
        """Return the rule as people read it."""
        if self.kind == "constant":
            what = f"x{self.factor:g}"
        elif self.kind == "ramp":
            by = "over the run" if self.until == 1 else f"over the first {self.until:.3g} of the run"
            what = f"x{self.start:g} to x{self.end:g} {by}"
        else:
            what = f"x{self.factor:g} for {self.hold:.3g} of the run, back to x1 over {self.back:.3g}"
        where = ""
        if self.layers is not None:
            low, high = (f"{value}" if type(value) is int else f"{value:g}" for value in self.layers)
            whole = all(type(value) is int for value in self.layers)
            where = f" in layers {low} to {high}" if whole else f" in layers {low} to {high} of the depth"
        return f"{self.tag or self.parameters} {what}{where}"

    def as_dict(self) -> dict[str, Any]:
        """Return what the rule says, JSON-ready; values of other kinds are left out."""
        names = [name for name in ("tag", "parameters", "layers") if getattr(self, name)]
        record = {name: getattr(self, name) for name in (*names, "kind", *_VALUES[self.kind])}
        return record | ({"layers": list(self.layers)} if self.layers is not None else {})


DECAY_WORDS = {
    "equal": "weight decay divided by the ratio: lr x decay is equal in all circuits",
    "coupled": "weight decay not divided: lr x decay moves with the ratio",
}


def parse_rules(given: Any) -> tuple[Rule, ...]:
    """Return the rules of a list of tables, or of a table from circuits to short forms: 30x, or 1x..40x for a ramp."""
    if isinstance(given, Mapping):
        return tuple(_short(str(tag), text) for tag, text in given.items())
    if not isinstance(given, list | tuple):
        raise UserError(f"circuit_lr takes a list of rules, or a table such as {{qk = '30x'}}; got {given!r}")
    return tuple(rule if isinstance(rule, Rule) else _rule(rule) for rule in given)


def _short(tag: str, text: Any) -> Rule:
    match = _SHORT.fullmatch(text) if isinstance(text, str) else None
    try:
        numbers = [float(number) for number in match.groups() if number is not None] if match else []
    except ValueError:
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
        raise UserError(f"a rule of circuit_lr is a table such as {{tag = 'qk', factor = 30}}; got {given!r}")
    kind = given.get("kind", "constant")
    if kind not in _VALUES:
        raise unknown("kind of rule in circuit_lr", str(kind), _VALUES)
    allowed = ("tag", "parameters", "layers", "kind", *_VALUES[kind])
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in allowed:
            raise unknown(f"value of a {kind} rule in circuit_lr", str(name), allowed)
        if name in ("tag", "parameters", "kind"):
            if not isinstance(value, str):
                raise UserError(f"circuit_lr: {name} takes a word, got {value!r}")
        elif name == "layers":
            if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(is_number, value)):
                raise UserError(
                    f"circuit_lr: layers takes two numbers, such as [4, 6] or [0.5, 1.0]; got {value!r}"
                )
            # Layers 1 to 3 are not the shares 1.0 to 3.0; one number of each kind is taken for two shares.
            whole = all(type(number) is int for number in value)
            value = tuple(number if whole else float(number) for number in value)
        elif not is_number(value):
            raise UserError(f"circuit_lr: {name} takes a number, got {value!r}")
        else:
            value = float(value)
        values[name] = value
    needed = {"constant": ("factor",), "ramp": ("start", "end"), "hold_return": ("factor", "hold", "back")}
    for name in needed[kind]:
        if name not in values:
            raise UserError(f"a {kind} rule of circuit_lr needs {', '.join(needed[kind])}; {name} is missing")
    return Rule(**values)


def rules_of_rates(text: str) -> tuple[Rule, ...]:
    """Return the rules of a run recorded as `rates`, such as qk=3,ffn=0.5: all constant."""
    parts = (part.partition("=") for part in text.split(",")) if text else ()
    return tuple(Rule(tag.strip(), factor=float(value)) for tag, _, value in parts)


def rates_of_rules(rules: Sequence[Rule]) -> str | None:
    """Return what `rules_of_rates` reads, or None where a rule says more than that can hold."""
    plain = [f"{rule.tag}={rule.factor:g}" for rule in rules if rule == Rule(rule.tag, factor=rule.factor)]
    return ",".join(plain) if len(plain) == len(rules) and rules else None


def assign(rules: Sequence[Rule], circuits: Sequence[Circuit], depth: int) -> dict[str, Rule]:
    """Return the rule of every parameter whose rate it changes; rules that overlap or find nothing are refused.

    A group of tag `own` obeys a rule that names `own`, else the one of the circuit it follows. A ratio of 1 is as no rule:
    parameters grouped apart would be summed in another order.
    """
    found: dict[str, Rule] = {}
    used: set[int] = set()
    spans = [rule.span(depth) for rule in rules]
    for circuit in circuits:
        for name in circuit.parameters:
            places = [
                place
                for place, (rule, span) in enumerate(zip(rules, spans, strict=True))
                if _names(rule, circuit, name) and _stands_in(rule, span, name)
            ]
            if circuit.tag == "own" and any(rules[place].tag == "own" for place in places):
                places = [place for place in places if rules[place].tag != circuit.follows]
            if len(places) > 1:
                one, other = (rules[place].words() for place in places[:2])
                raise UserError(f"two rules of circuit_lr act on {name}: '{one}' and '{other}'")
            if places:
                used.add(places[0])
                if not rules[places[0]].idle:
                    found[name] = rules[places[0]]
    for place, rule in enumerate(rules):
        if place not in used:
            have = ", ".join(dict.fromkeys(circuit.tag for circuit in circuits))
            raise UserError(
                f"the rule '{rule.words()}' acts on no parameter of this model (its circuits: {have})"
            )
    return found


def _names(rule: Rule, circuit: Circuit, name: str) -> bool:
    if rule.parameters:
        return fnmatchcase(name, rule.parameters)
    return rule.tag == circuit.tag or (circuit.tag == "own" and rule.tag == circuit.follows)


def _stands_in(rule: Rule, span: range, name: str) -> bool:
    block = _BLOCK.match(name)
    return rule.layers is None or (block is not None and int(block[1]) in span)


def with_words(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings with the rules, if any, as people read them, and the rule of the decay beside them."""
    shown = {
        key: value for key, value in record.items() if key not in ("rates", "circuit_lr", "circuit_decay")
    }
    rules, decay = recorded_rules(record)
    if rules:
        shown["circuit_lr"] = f"{'; '.join(rule.words() for rule in rules)} ({DECAY_WORDS[decay]})"
    return shown


def recorded_rules(record: Mapping[str, Any]) -> tuple[tuple[Rule, ...], str]:
    """Return the rules that a run's record holds, and its rule of the decay; `rates` were never divided out of it."""
    if record.get("rates"):
        return rules_of_rates(record["rates"]), "coupled"
    return parse_rules(record.get("circuit_lr", ())), record.get("circuit_decay", "equal")
