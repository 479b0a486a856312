"""Criteria of claims: the base classes of the kinds, and reading one from a TOML table.

A kind is one subclass of `Criterion`. Its fields are its TOML keys with their types, and `judge` decides it. `kinds.py`
has the kinds about runs and costs, `toy.py` those about the toy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from msgspec import Meta

from headtohead.common import typed
from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import exact_count, parse_count
from headtohead.papers.faster_qk.work import Toy
from headtohead.study.claims.outcome import (
    CONTRADICTED,
    NOT_RUN,
    NOT_TESTED,
    OPEN,
    PUBLISHED,
    REDUCED,
    SMOKE,
    SUPPORTED,
    Expected,
    Part,
)
from headtohead.study.config.spec import StudySpec
from headtohead.study.config.validation import as_choice, as_texts
from headtohead.study.store.manifest import Contest

if TYPE_CHECKING:
    from headtohead.study.claims.evidence import Evidence

T = TypeVar("T")
MAIN = "study"
"""Name of the study in [study] among several."""
PLACE = ("corpus", "size", "context", "branch", "shape", "length")
BetterOrWorse = Literal["better", "worse"]
LowerOrHigher = Literal["lower", "higher"]

Text = Annotated[str, Meta(description="a string")]
Texts = Annotated[tuple[str, ...], Meta(min_length=1, description="a string or a list of strings")]
Choices = Annotated[
    tuple[Annotated[tuple[str, ...], Meta(min_length=1)], ...],
    Meta(description="a list of values, each a string or a list of strings of which the study has one"),
]
Number = Annotated[float, Meta(gt=-1e300, lt=1e300, description="a number")]
Margin = Annotated[float, Meta(ge=0, lt=1e300, description="a number, zero or more")]
Factor = Annotated[float, Meta(gt=0, le=1000, description="a number above 0, at most 1000")]
Optimizer = Annotated[
    str,
    Meta(
        pattern=r"^([^:]*|adamw:0(\.[0-9]*[1-9])?/0(\.[0-9]*[1-9])?)$",
        description="a name such as sgd or adamw, or adamw with its betas: adamw:0.9/0.95",
    ),
]
Numbers = Annotated[tuple[Number, ...], Meta(min_length=1, description="a list of numbers")]
Range = Annotated[
    tuple[Number, ...], Meta(min_length=1, max_length=2, description="a number or a range [low, high]")
]
Branches = Annotated[Texts, Meta(description="a number of tokens or a list of them")]
Count = Annotated[int, Meta(ge=0, description="a whole number")]
Guard = Annotated[tuple[Text, Number], Meta(description="a path and a number")]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


_NORMALIZED = (
    (Texts, _listed),
    (Choices, lambda value: [_listed(one) for one in _listed(value)]),
    (Range, _listed),
    (
        Branches,
        lambda value: [exact_count(parse_count(word, "branch")) for word in as_texts(value, "branch")],
    ),
    (Count, parse_count),
)
"""How values of these types are normalized before they are checked."""


def decode(kind: type[T], table: Mapping[str, Any], name: str) -> T:
    """Return a dataclass from a TOML table; `name` is that of the table in errors."""
    try:
        return typed.decode(kind, _normalized(kind, table))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _normalized(kind: type, table: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    values = dict(table)
    for key, value in table.items():
        if hints.get(key) is At and isinstance(value, Mapping):
            values[key] = _normalized(At, value)
        for hint, function in _NORMALIZED:
            if hints.get(key) is hint:
                values[key] = function(value)
    return values


@dataclass(frozen=True)
class At:
    """The setting in which numbers were published. Empty fields are not compared, except the length: 0 is unknown."""

    corpus: Texts = ()
    size: Texts = ()
    tokens: Count = 0
    epochs: Margin = 0.0
    """How often the text was seen; 0: unknown."""
    tokenizer: Text = ""
    """bytes, or the name of the published one; `unknown` if the paper does not say."""
    optimizer: Optimizer = ""
    """adamw, adamw:BETA1/BETA2 or another name; `unknown` if the paper does not say."""


@dataclass(frozen=True)
class Basis:
    """Everything that claims are judged by."""

    scale: str
    baseline: str
    """The baseline arm of the main study, as text; costs are relative to it."""
    studies: Mapping[str, Evidence]
    absent: Mapping[str, str]
    """The reason why a study of this scale is missing."""
    toy: Toy | None


KINDS: dict[str, type[Criterion]] = {}


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A condition of a claim."""

    decides: bool = True
    """False: shown with the claim, without effect on its outcome."""
    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind
        if kind:
            KINDS[kind] = cls

    def judge(self, basis: Basis, at: At) -> Part:
        """Return the outcome; `at` is where the numbers of the claim were published."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RunCriterion(Criterion):
    """A criterion about the trained runs of a study. Numbers are in bits per byte or a task's metric."""

    study: Text = MAIN
    """The study of the paper that it is about."""
    at: At = field(default_factory=At)
    """Where its own numbers were published; replaces the claim's."""
    needs_tasks: ClassVar[bool] = False

    @property
    def unchanged(self) -> float | None:
        """The number that means no difference, or None if its numbers are not differences."""
        return 0.0

    @property
    def place(self) -> dict[str, tuple[str, ...]]:
        """The fields of its contest that are given."""
        return {key: value for key in PLACE if (value := getattr(self, key, ()))}

    @property
    def places(self) -> list[dict[str, tuple[str, ...]]]:
        """The places of all its contests."""
        return [self.place]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms it names; an empty name is the baseline and is not included."""
        one = [getattr(self, key, "") for key in ("first", "arm", "against", "control", "control_against")]
        return tuple(filter(None, (*one, *getattr(self, "then", ()))))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The comparisons of arms that it adds to Holm's correction in its contest."""
        return []

    @property
    def opponents(self) -> list[tuple[str, str]]:
        """The arms that it compares with each other; an empty name is the baseline."""
        return self.pairs

    @property
    def alone(self) -> bool:
        """Whether it is about the named arms only, without the baseline of the study."""
        return bool(getattr(self, "against", ""))

    @property
    def judged_arms(self) -> tuple[str, ...]:
        """The arms whose runs it is judged by; an empty name is the baseline."""
        return self.arms if self.alone else (*self.arms, "")

    @property
    def expected(self) -> Expected:
        """What it expects of the difference."""
        given = {
            key: value
            for key in Expected.__dataclass_fields__
            if (value := getattr(self, key, None)) is not None
        }
        if "effect" in given:
            given["effect"] = (min(given["effect"]), max(given["effect"])) if given["effect"] else None
        return Expected(**given)

    def scaled(self, factor: float) -> RunCriterion:
        """Return it with its differences multiplied by `factor`, which converts them to bits per byte."""
        given = {key: getattr(self, key, None) for key in ("at_least", "at_most", "margin")}
        changes: dict[str, Any] = {key: value * factor for key, value in given.items() if value is not None}
        if effect := getattr(self, "effect", ()):
            changes["effect"] = tuple(end * factor for end in effect)
        return replace(self, **changes)

    def check_study(self, of_tasks: bool) -> None:
        """Raise UserError if it does not apply to a study of tasks or of corpora."""
        if self.needs_tasks and not of_tasks:
            raise UserError(
                f"a {self.kind} criterion needs a study of tasks; study '{self.study}' has no tasks"
            )

    def check_numbers(self, of_tasks: bool) -> None:
        """Raise UserError if no difference has the expected direction and is within the limits."""
        expected, none = self.expected, self.unchanged
        if getattr(self, "margin", None) == 0 and expected.expect in ("", "level"):
            raise UserError("margin = 0 on both sides can never be supported; give a margin above 0")
        least = -math.inf if expected.at_least is None else expected.at_least
        most = math.inf if expected.at_most is None else expected.at_most
        low, high = expected.effect or (least, most)
        if least > most:
            raise UserError(f"at_least = {least:g} is above at_most = {most:g}")
        if low > most or high < least:
            raise UserError(f"effect = {_range(low, high)} is outside at_least and at_most")
        above = {"higher": True, "lower": False, "better": of_tasks, "worse": not of_tasks}.get(
            expected.expect
        )
        if none is None or above is None:
            return
        if min(high, most) <= none if above else max(low, least) >= none:
            side = f"{'ratio' if none else 'difference'} {'above' if above else 'below'} {none:g}"
            judged = f" {'for a task' if of_tasks else 'for a loss'}" * (
                expected.expect in ("better", "worse")
            )
            given = f"effect = {_range(low, high)}"
            if expected.effect is None:
                given = f"at_most = {most:g}" if above else f"at_least = {least:g}"
            raise UserError(f"expect = '{expected.expect}' means a {side}{judged}, got {given}")

    def check_arms(self, spec: StudySpec) -> None:
        """Raise UserError if it compares an arm of a study with itself."""
        labels = {name: arm.label for arm in reversed(spec.arms) for name in (arm.text, arm.label)}
        labels[""] = spec.baseline_arm.label
        for arm, other in self.opponents:
            if arm in labels and labels[arm] == labels.get(other):
                against = f"'{other}'" if other else f"the baseline '{labels['']}'"
                raise UserError(f"arm '{arm}' is compared with itself: {against} is the same arm")

    def outcome(self, evidence: Evidence, contests: Sequence[Contest]) -> Part:
        """Return the outcome from the runs of its contests."""
        raise NotImplementedError

    def lacks(self, evidence: Evidence) -> str:
        """Return what the study does not measure at its scale, or an empty string."""
        return ""

    def judged_contests(self, evidence: Evidence, found: list[Contest]) -> list[Contest]:
        """Return the contests it is judged by, from those at its places."""
        return found

    def untrained(self, evidence: Evidence, contests: Sequence[Contest]) -> str:
        """Return a message if all compared arms are untrained, else an empty string."""
        return max(evidence.untrained(contest, self.judged_arms) for contest in contests)

    def unfinished(self, evidence: Evidence, contests: Sequence[Contest]) -> bool:
        """Return whether a run that it is judged by has no result."""
        return any(run not in evidence.results for run in evidence.runs(contests, self.judged_arms))

    def judge(self, basis: Basis, at: At) -> Part:
        """Return the outcome; what is missing at this scale leaves it open."""
        absent = f"is not part of scale {basis.scale}"
        if self.study in basis.absent:
            return Part(OPEN, None, NOT_RUN, f"study {self.study} {basis.absent[self.study]}")
        if self.study not in basis.studies:
            return Part(OPEN, None, NOT_TESTED, f"study {self.study} {absent}")
        evidence = basis.studies[self.study]
        for arm in self.arms:
            if evidence.label(arm) is None:
                return Part(OPEN, None, NOT_TESTED, f"arm {arm} {absent}")
        if lacking := self.lacks(evidence):
            return Part(OPEN, None, NOT_TESTED, f"{lacking} {absent}")
        found = []
        for place in self.places:
            if (contest := evidence.contest(place)) is None:
                words = ", ".join(f"{key} {' or '.join(value)}" for key, value in place.items())
                return Part(OPEN, None, NOT_TESTED, f"{words or 'no contest'} {absent}")
            found.append(contest)
        contests = self.judged_contests(evidence, found)
        part = self.outcome(evidence, contests)
        names = {key: "corpus_label" if key == "corpus" else key for key in PLACE}
        where = {"study": self.study} | {key: _joined(contests, name) for key, name in names.items()}
        part.measured = [row | where for row in part.measured]
        if not any(row["n"] for row in part.measured) and self.unfinished(evidence, contests):
            part.scale = NOT_RUN
            return part
        part.marks = evidence.marks(contests, self.judged_arms)
        differs = evidence.other_scale(self.at if self.at != At() else at, contests, self.arms[0])
        part.scale, part.differs = REDUCED if differs else PUBLISHED, differs
        if {part.direction, part.size} & {SUPPORTED, CONTRADICTED} and (
            untrained := self.untrained(evidence, contests)
        ):
            part.direction, part.size = OPEN, None if part.size is None else OPEN
            part.reason += f"; {untrained}"
        if basis.scale == "smoke":
            part.direction, part.size, part.reason = OPEN, OPEN, SMOKE
        elif differs:
            part.reason += f" ({differs})"
        return part


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"[{low:g}, {high:g}]"


def _joined(contests: Sequence[Contest], name: str) -> str:
    return ", ".join(dict.fromkeys(getattr(contest, name) for contest in contests))


@dataclass(frozen=True, kw_only=True)
class PlacedCriterion(RunCriterion):
    """A criterion about one contest: the first of the given values that the study has, by default the study's first."""

    corpus: Texts = ()
    size: Texts = ()
    context: Texts = ()
    branch: Branches = ()
    shape: Texts = ()
    length: Texts = ()


def _values(spec: StudySpec, key: str) -> Sequence[str]:
    """Return the values of one field of the contests of a study, as in `Contest`."""
    several = spec.contexts if len(spec.contexts) > 1 else ()
    return {
        "corpus": spec.corpora or spec.tasks,
        "size": spec.sizes,
        "context": [str(context) for context in several],
        "branch": [exact_count(tokens) for tokens in spec.branches],
        "shape": spec.shapes,
        "length": spec.lengths,
    }[key]


def read_criterion(
    part: Mapping[str, Any], factor: float, studies: Mapping[str, Sequence[StudySpec]]
) -> Criterion:
    """Return the criterion in a table; `factor` converts its numbers to bits per byte.

    `studies`: each study of the paper at all of its scales.
    """
    kind = as_choice(part.get("kind"), "kind of criterion", tuple(KINDS))
    table = {key: value for key, value in part.items() if key != "kind"}
    criterion = decode(KINDS[kind], table, f"a {kind} criterion")
    if not isinstance(criterion, RunCriterion):
        return criterion
    study = as_choice(criterion.study, "study of the paper", tuple(studies))
    specs = studies[study]
    of_tasks = bool(specs[0].tasks)
    criterion.check_study(of_tasks)
    known = {name for spec in specs for arm in spec.arms for name in (arm.text, arm.label)}
    for arm in criterion.arms:
        if arm not in known:
            raise unknown("arm", arm, known)
    for place in criterion.places:
        for key, names in place.items():
            allowed = {value for spec in specs for value in _values(spec, key)}
            if allowed.isdisjoint(names):  # of several, one is enough
                raise unknown(f"{key} of {study}", names[0], allowed)
    for spec in specs:
        criterion.check_arms(spec)
    criterion.check_numbers(of_tasks)
    return criterion if of_tasks else criterion.scaled(factor)
