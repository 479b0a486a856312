"""Criteria of claims: their kinds, the settings of each kind, and reading one from a TOML table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import exact_count, parse_count
from headtohead.papers.faster_qk.findings import CHECKS
from headtohead.papers.faster_qk.runs import LOSSES, RUNS
from headtohead.study.config.validation import (
    as_choice,
    as_list,
    as_number,
    as_table,
    as_text,
    as_texts,
    check_known,
)
from headtohead.study.judge.trends import OVER
from headtohead.study.probes import check_probes_apply, probe_names

MAIN = "study"
"""Name of the study in [study] among several."""
PLACE = ("corpus", "size", "context", "branch", "shape", "length")
QUANTITIES = ("parameters", "cache", "flops")
TOY_QUANTITIES = ("alpha", "qk", "ov")
STEPS = ("last", "best")
COMPARED_AS = ("difference", "ratio", "value")
_TRAINED = {"kind", "study", "at", *PLACE}
_COMPARED = {"arm", "against"} | _TRAINED
# What each kind of criterion states, and its settings.
KINDS: dict[str, set[str]] = {
    # the arm is better or worse than another; effect, at_least and at_most are about the size of the difference
    "difference": _COMPARED | {"expect", "effect", "at_least", "at_most", "step"},
    # the arm differs from another by less than a margin; with expect, on one side of it
    "equivalence": _COMPARED | {"margin", "expect", "effect", "step"},
    # the first arm is better than each of the others
    "order": {"first", "then"} | _TRAINED,
    # the difference changes between two values of `over`, given in `values`
    "change": _COMPARED | {"over", "values", "expect", "effect"},
    # the difference changes with size, tokens per parameter or context; numbers are per doubling
    "trend": _COMPARED | {"over", "expect", "effect", "margin"},
    # the arm has a larger variance over seeds than another
    "spread": _COMPARED,
    # the arm's median over seeds is better or worse than another's
    "median": _COMPARED | {"expect"},
    # the difference differs from that of another pair of arms, control - control_against, or from a share of that
    "interaction": _COMPARED | {"control", "control_against", "share", "expect", "effect"},
    # a number at `path` in a probe's result; compared as difference, ratio, or the arm's own value
    "probe": _COMPARED
    | {"probe", "path", "compare", "expect", "effect", "at_least", "at_most", "margin", "guard"},
    # the cost of an arm by formula, as a ratio to another; needs no training
    "cost": {"kind", "arm", "against", "size", "quantity", "ratio", "tolerance"},
    # the arm's mean over all tasks of a study is better or worse than another's
    "tasks": {"kind", "study", "at", "arm", "against", "expect", "effect", "at_least", "at_most"},
    # a quantity of the toy's runs increases from each to the next by more than a margin, at each given loss
    "toy": {"kind", "quantity", "order", "losses", "margins"},
    # tables and theory of the toy are reproduced
    "toy_check": {"kind", "checks"},
    # cannot be decided yet
    "open": {"kind", "reason"},
}
_NEEDED: dict[str, set[str]] = {
    "difference": {"arm", "expect"},
    "equivalence": {"arm", "margin"},
    "order": {"first", "then"},
    "change": {"arm", "over", "values", "expect"},
    "trend": {"arm", "over", "expect"},
    "spread": {"arm"},
    "median": {"arm", "expect"},
    "interaction": {"arm", "control", "expect"},
    "probe": {"arm", "probe", "path"},
    "cost": {"arm", "size", "quantity", "ratio"},
    "tasks": {"study", "arm", "expect"},
    "toy": {"quantity", "order", "losses"},
    "toy_check": {"checks"},
    "open": {"reason"},
}
_WITHIN = ("level", "no higher")
_BOUNDED = ("no lower", "no higher")
_EXPECTED = {
    "equivalence": ("no better", "no worse"),
    "change": ("lower", "higher"),
    "interaction": ("lower", "higher"),
    "probe": ("lower", "higher", *_BOUNDED),
    "trend": ("lower", "higher", *_WITHIN),
}
TRAINED = frozenset(KINDS) - {"cost", "toy", "toy_check", "open"}


@dataclass(frozen=True)
class Criterion:
    """A condition of a claim. Numbers are in bits per byte or a task's metric, except ratios of costs and probe results."""

    kind: str
    study: str = MAIN
    """The study of the paper that it is about."""
    arm: str = ""
    against: str = ""
    """Empty: the baseline."""
    expect: str = ""
    """better or worse; for a change, interaction, probe or trend: lower or higher; for a trend also level or no higher."""
    effect: tuple[float, float] | None = None
    """The published difference, as a range."""
    at_least: float | None = None
    at_most: float | None = None
    margin: float = 0.0
    first: str = ""
    then: tuple[str, ...] = ()
    over: str = ""
    values: tuple[str, ...] = ()
    quantity: str = ""
    ratio: float = 1.0
    tolerance: float = 0.005
    reason: str = ""
    order: tuple[str, ...] = ()
    """Runs of the toy."""
    losses: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    checks: tuple[str, ...] = ()
    control: str = ""
    control_against: str = ""
    """Empty: the baseline."""
    step: str = "last"
    """The step of a run: the last, or the best on valid for tasks that are evaluated during training."""
    share: float = 1.0
    """Factor on the control's difference: 0.5 for half of a gain."""
    probe: str = ""
    path: str = ""
    compare: str = "difference"
    guard: tuple[str, float] | None = None
    """A path and the minimum of the baseline's number there; below it the criterion stays open, as when all arms guess."""
    place: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Corpus, size, shape rule and length rule: the first value that the study has. Default: the study's first."""
    at: dict[str, Any] = field(default_factory=dict)
    """Where its own numbers were published; replaces the claim's `at`."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms it names; the default baseline is not included."""
        return tuple(
            filter(
                None, (self.first or self.arm, self.against, *self.then, self.control, self.control_against)
            )
        )


class Named(Protocol):
    """The parts of a study that a criterion may name."""

    arms: set[str]
    of_tasks: bool


def read_at(given: Any) -> dict[str, Any]:
    """Return the published setting: corpora, sizes and tokens."""
    at = as_table(given, "at")
    check_known(at, {"corpus", "size", "tokens"}, "setting of at")
    places: dict[str, Any] = {key: as_texts(at[key], f"at.{key}") for key in ("corpus", "size") if key in at}
    if "tokens" in at:
        places["tokens"] = parse_count(at["tokens"], "at.tokens")
    return places


def read_criterion(part: Mapping[str, Any], factor: float, studies: Mapping[str, Named]) -> Criterion:
    """Return the criterion in a table; `factor` converts its numbers to bits per byte."""
    kind = as_choice(part.get("kind"), "kind of criterion", tuple(KINDS))
    check_known(part, KINDS[kind], f"setting of a {kind} criterion")
    for key in sorted(_NEEDED[kind] - part.keys()):
        raise UserError(f"a {kind} criterion needs {key}")
    place = {key: as_texts(part[key], key) for key in PLACE if key in part}
    if "branch" in place:
        place["branch"] = tuple(exact_count(parse_count(word, "branch")) for word in place["branch"])
    name = as_choice(part.get("study", MAIN), "study of the paper", tuple(studies))
    study = studies[name]
    values: dict[str, Any] = {"kind": kind, "place": place, "study": name, "at": read_at(part.get("at", {}))}
    if kind == "tasks" and not study.of_tasks:
        raise UserError(f"a tasks criterion needs a study of tasks; study '{name}' has no tasks")
    factor = 1.0 if kind == "probe" or study.of_tasks else factor
    for key in ("arm", "against", "first", "reason", "control", "control_against", "path"):
        if key in part:
            values[key] = as_text(part[key], key)
    for key in ("then", "values"):
        if key in part:
            values[key] = as_texts(part[key], key)
    for key in ("at_least", "at_most", "margin"):
        if key in part:
            values[key] = as_number(part[key], key) * factor
    for key in ("ratio", "tolerance", "share"):
        if key in part:
            values[key] = as_number(part[key], key)
    if values.get("share", 1.0) <= 0:
        raise UserError(f"share must be above 0, got {part['share']!r}")
    if "effect" in part:
        effect = part["effect"]
        ends = [
            as_number(end, "effect") * factor for end in (effect if isinstance(effect, list) else [effect])
        ]
        if len(ends) not in (1, 2):
            raise UserError(f"effect takes a number or a range [low, high], got {effect!r}")
        values["effect"] = (min(ends), max(ends))
    if "expect" in part:
        values["expect"] = as_choice(part["expect"], "expect", _EXPECTED.get(kind, ("better", "worse")))
        if kind == "trend" and (values["expect"] in _WITHIN) != ("margin" in part):
            raise UserError(f"a trend takes a margin if and only if expect is {' or '.join(_WITHIN)}")
    if kind == "trend":
        values["over"] = as_choice(part["over"], "over", tuple(OVER))
    elif "over" in part:
        values["over"] = as_choice(part["over"], "over", PLACE)
        if len(values["values"]) != 2:
            raise UserError(f"values takes two values of {values['over']}, got {list(values['values'])}")
    if "quantity" in part:
        allowed = TOY_QUANTITIES if kind == "toy" else QUANTITIES
        values["quantity"] = as_choice(part["quantity"], "quantity", allowed)
    if kind in ("toy", "toy_check"):
        values |= _toy_settings(part)
    if "step" in part:
        values["step"] = as_choice(part["step"], "step", STEPS)
        if not study.of_tasks:
            raise UserError(f"step applies to studies of tasks; study '{name}' has no tasks")
    if "compare" in part:
        values["compare"] = as_choice(part["compare"], "compare", COMPARED_AS)
    if kind == "probe":
        (values["probe"],) = probe_names([as_text(part["probe"], "probe")])
        check_probes_apply([values["probe"]], "tasks" if study.of_tasks else "corpora")
        if (part.get("expect", _BOUNDED[0]) in _BOUNDED) != ("margin" in part):
            raise UserError(
                "a probe criterion takes either expect or the margin for equality; "
                f"with expect {' or '.join(_BOUNDED)} it takes both"
            )
        if "guard" in part:
            guard = part["guard"]
            if not isinstance(guard, list) or len(guard) != 2:
                raise UserError(f"guard takes a path and a number, got {guard!r}")
            values["guard"] = (as_text(guard[0], "guard"), as_number(guard[1], "guard"))
        ratios = [*values.get("effect", ()), values.get("at_least", 1.0), values.get("at_most", 1.0)]
        if values.get("compare") == "ratio" and min(ratios) <= 0:
            raise UserError("effect, at_least and at_most must be above 0 with compare = 'ratio'")
    criterion = Criterion(**values)
    # A cost needs no training, so its arms need not be in the study.
    for arm in criterion.arms if kind in TRAINED else ():
        if arm not in study.arms:
            raise unknown("arm", arm, study.arms)
    return criterion


def _toy_settings(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a criterion about the toy."""
    if "checks" in part:
        return {
            "checks": tuple(as_choice(name, "check", CHECKS) for name in as_texts(part["checks"], "checks"))
        }
    order = as_texts(part["order"], "order")
    for name in order:
        as_choice(name, "toy run", tuple(RUNS))
    losses = tuple(as_number(bound, "losses") for bound in as_list(part["losses"], "losses"))
    for bound in losses:
        as_choice(bound, "loss of the toy", LOSSES)
    margins = tuple(as_number(margin, "margins") for margin in as_list(part.get("margins", [0]), "margins"))
    if len(margins) == 1:
        margins *= len(order) - 1
    if len(order) < 2 or len(margins) != len(order) - 1:
        raise UserError(
            f"order takes two or more runs and a margin between each two, got {len(order)} runs, {len(margins)} margins"
        )
    return {"order": order, "losses": losses, "margins": margins}
