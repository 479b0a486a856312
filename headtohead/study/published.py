"""What a paper says, as data: its claims, how each is decided, and the studies of three scales that decide them.

    [paper]                 title, about, unit and bytes_per_unit of its numbers; bits per byte when not said
    [study]                 the settings of a study, as in any study file
    [scale.smoke]           what is different at that scale; small and paper likewise
    [also.NAME]             the settings of another study, of corpora or tasks, where the paper has several
    [also.NAME.smoke]       what is different at that scale; at a scale that is left out there is no such study;
                            from = "also.OTHER": its models start from the one run of another study of the paper
    [toy.smoke]             runs of the toy, seeds, and until which loss, where the paper has a toy
    [[claim]]               id, statement, published (its numbers, in words), at (corpus, size, tokens), criteria

A claim holds when all of its criteria do. Numbers are differences, arm - baseline: of a loss, where below 0 is better, or
of a task's metric, where above 0 is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import exact_count, is_number, parse_count
from headtohead.study.probes import probe_names, refuse_unserved
from headtohead.study.spec import build_study, changed_settings, read_study
from headtohead.study.trends import OVER
from headtohead.toy.findings import CHECKS
from headtohead.toy.runs import LOSSES, RUNS
from headtohead.toy.work import ToyPlan

SCALES = ("smoke", "small", "paper")
UNITS = ("bits_per_byte", "nats_per_token", "nats_per_word")
PLACE = ("corpus", "size", "context", "branch", "shape", "length")
QUANTITIES = ("parameters", "cache", "flops")
TOY_QUANTITIES = ("alpha", "qk", "ov")
COMPARED_AS = ("difference", "ratio", "value")
MAIN, TOY = "study", "toy"
"""What the study of [study] and the toy are called where one of several is named."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SISTER = "also."
# Folders and tables that stand beside the other studies.
_TAKEN = (MAIN, TOY, "runs", "charts")

_TRAINED = {"kind", "study", "at", *PLACE}
_COMPARED = {"arm", "against"} | _TRAINED
# What each kind of criterion is decided by, and the settings it takes.
KINDS: dict[str, set[str]] = {
    # the arm is better or worse than another; effect, at_least and at_most are about the size of the difference
    "difference": _COMPARED | {"expect", "effect", "at_least", "at_most"},
    # the arm differs from another by less than a margin; with expect, on one side of it
    "equivalence": _COMPARED | {"margin", "expect", "effect"},
    # the first arm is better than each of the others
    "order": {"first", "then"} | _TRAINED,
    # the difference itself differs between two places: `over` names what, `values` the two
    "change": _COMPARED | {"over", "values", "expect", "effect"},
    # the difference moves with size, tokens per parameter or context; numbers are per doubling of it
    "trend": _COMPARED | {"over", "expect", "effect", "margin"},
    # the arm's seeds lie wider apart than another's
    "spread": _COMPARED,
    # the arm's median over seeds is better or worse than another's
    "median": _COMPARED | {"expect"},
    # the difference differs from that of another pair of arms, control - control_against, or from a share of that
    "interaction": _COMPARED | {"control", "control_against", "share", "expect", "effect"},
    # a number that a probe found: `path` says which; compared as difference, ratio, or the arm's own value
    "probe": _COMPARED
    | {"probe", "path", "compare", "expect", "effect", "at_least", "at_most", "margin", "guard"},
    # what an arm costs by formula, as a ratio to another: no training
    "cost": {"kind", "arm", "against", "size", "quantity", "ratio", "tolerance"},
    # the arm's mean over all tasks of a study is better or worse than another's
    "tasks": {"kind", "study", "at", "arm", "against", "expect", "effect", "at_least", "at_most"},
    # a quantity of the toy's runs rises from each to the next by more than a margin, at each of some losses
    "toy": {"kind", "quantity", "order", "losses", "margins"},
    # tables and theory of the toy are reproduced
    "toy_check": {"kind", "checks"},
    # what cannot be decided yet
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
    """One thing that must hold for a claim to hold; numbers in bits per byte or a task's metric, except a cost's ratio and a probe's own."""

    kind: str
    study: str = MAIN
    """Which of the paper's studies it is about."""
    arm: str = ""
    against: str = ""
    """The baseline when empty."""
    expect: str = ""
    """better or worse; lower or higher for a change, an interaction, a probe and a trend, which may also be level or no higher."""
    effect: tuple[float, float] | None = None
    """The published difference; two numbers where it is known only to lie between them."""
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
    """The baseline when empty."""
    share: float = 1.0
    """How much of the control's difference counts: half of a gain is share 0.5."""
    probe: str = ""
    path: str = ""
    compare: str = "difference"
    guard: tuple[str, float] | None = None
    """A path, and what the baseline's number there must reach: below it the study cannot tell, as where all guess."""
    place: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Corpus, size, shape rule and length rule, where they are not the study's first; the first of them that it has."""
    at: dict[str, Any] = field(default_factory=dict)
    """Where its own numbers were published, in place of the claim's."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms it speaks of, the baseline left out where it is not named."""
        return tuple(
            filter(
                None, (self.first or self.arm, self.against, *self.then, self.control, self.control_against)
            )
        )


@dataclass(frozen=True)
class Claim:
    """One published statement."""

    id: str
    statement: str
    published: str
    criteria: tuple[Criterion, ...]
    at: dict[str, Any] = field(default_factory=dict)
    """Corpora, sizes and tokens of the published numbers; what is not known is left out."""


@dataclass(frozen=True)
class Paper:
    """A paper's claims, and the settings of its studies at each scale."""

    name: str
    title: str
    about: str
    unit: str
    bytes_per_unit: float
    scales: dict[str, dict[str, Any]]
    claims: tuple[Claim, ...]
    toy: dict[str, ToyPlan] = field(default_factory=dict)
    """What of the toy is done at each scale."""
    also: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """The settings of its other studies, by name and scale."""

    def studies(self, scale: str) -> dict[str, dict[str, Any]]:
        """Return the settings of all its studies at a scale by name, the one of [study] first."""
        if scale not in self.scales:
            raise unknown("scale", scale, self.scales)
        others = {name: scales[scale] for name, scales in self.also.items() if scale in scales}
        return {MAIN: self.scales[scale]} | others

    def settings(self, scale: str, study: str = MAIN) -> dict[str, Any]:
        """Return a study's settings at a scale."""
        known = self.studies(scale)
        if study not in known:
            raise unknown(f"study of {self.name} at scale {scale}", study, known)
        return known[study]

    def start(self, scale: str, study: str) -> str:
        """Return the name of the study from whose run a study's models start, or nothing."""
        return sister(self.settings(scale, study))


def sister(settings: Mapping[str, Any]) -> str:
    """Return the name that a study's `from` gives to another study of the paper, or nothing."""
    given = str(settings.get("from", ""))
    return given.removeprefix(_SISTER) if given.startswith(_SISTER) else ""


def find_paper(name: str) -> Path:
    """Return the file of a paper's claims: a path, or a name in `studies/` here or beside the package."""
    if name.endswith(".toml"):
        return Path(name)
    folders = [Path("studies"), Path(__file__).parents[2] / "studies"]
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    known = {path.stem for folder in folders for path in folder.glob("*.toml") if _has_claims(path)}
    raise unknown("paper", name, known)


def _has_claims(path: Path) -> bool:
    try:
        return "claim" in read_study(path)
    except UserError:
        return False


def read_paper(path: Path) -> Paper:
    """Return the claims and scales of a TOML file; a mistake is named with its file and claim."""
    values = read_study(path)
    try:
        return _paper(path.stem, values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _paper(name: str, values: Mapping[str, Any]) -> Paper:
    if "claim" not in values:
        raise UserError("no [[claim]] in it: h2h race runs a study without claims")
    _known(values, {"paper", "study", "scale", "also", "toy", "claim"}, "table")
    about = _table(values.get("paper", {}), "paper")
    _known(about, {"title", "about", "unit", "bytes_per_unit"}, "paper setting")
    unit = _choice(about.get("unit", "bits_per_byte"), "unit", UNITS)
    length = _number(about.get("bytes_per_unit", 1.0), "bytes_per_unit")
    if length <= 0 or (unit != "bits_per_byte") != ("bytes_per_unit" in about):
        raise UserError(
            f"unit={unit}: bytes_per_unit, above 0, goes with nats_per_token and nats_per_word alone"
        )
    # nats / unit to bits / byte
    factor = 1.0 if unit == "bits_per_byte" else 1 / (math.log(2) * length)
    tables = _table(values.get("scale"), "scale")
    _known(tables, set(SCALES), "scale")
    for scale in SCALES:
        if scale not in tables:
            raise UserError(f"[scale.{scale}] is missing; a paper has {', '.join(SCALES)}")
    main = _Study(f"{name}, ", "scale", _table(values.get("study"), "study"), tables)
    also = _also(name, _table(values.get("also", {}), "also"))
    claims: list[Claim] = []
    for entry in values["claim"] if isinstance(values["claim"], list) else [values["claim"]]:
        claim = _claim(_table(entry, "claim"), factor, {MAIN: main} | also)
        if any(claim.id == other.id for other in claims):
            raise UserError(f"claim {claim.id} is given twice")
        claims.append(claim)
    words = (_text(about.get("title", name), "title"), _text(about.get("about", ""), "about"))
    others = {key: study.scales for key, study in also.items()}
    return Paper(name, *words, unit, length, main.scales, tuple(claims), _toy(values.get("toy", {})), others)


class _Study:
    """The settings of one study by scale, and what criteria about it may name."""

    def __init__(self, name: str, place: str, common: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        self.scales: dict[str, dict[str, Any]] = {}
        self.arms: set[str] = set()
        kinds: set[bool] = set()
        for scale in (word for word in SCALES if word in tables):
            settings = changed_settings(common, _table(tables[scale], f"{place}.{scale}"))
            self.scales[scale] = {"name": f"{name}{scale}"} | settings
            try:
                spec = build_study(self.scales[scale])
            except UserError as error:
                raise UserError(f"{place}.{scale}: {error}") from None
            self.arms |= {word for arm in spec.arms for word in (arm.text, arm.label)}
            kinds.add(bool(spec.tasks))
        if len(kinds) > 1:
            raise UserError(f"{place}: some of its scales are of tasks, others of corpora; it is of one kind")
        self.of_tasks = True in kinds


def _also(paper: str, given: Mapping[str, Any]) -> dict[str, _Study]:
    """Return the paper's other studies by name."""
    studies = {}
    for name, entry in given.items():
        table, place = _table(entry, f"also.{name}"), f"also.{name}"
        if not _NAME.fullmatch(name) or name in _TAKEN:
            raise UserError(
                f"[{place}]: a study's name is of small letters, digits and _, and none of {', '.join(_TAKEN)}"
            )
        common = {key: value for key, value in table.items() if key not in SCALES}
        scales = {key: value for key, value in table.items() if key in SCALES}
        if not scales:
            raise UserError(f"[{place}] has no scale: [{place}.small] gives it one")
        studies[name] = _Study(f"{paper}, {name}, ", place, common, scales)
    _check_starts(studies)
    return studies


def _check_starts(studies: Mapping[str, _Study]) -> None:
    """Refuse models that start from a study which is not there at their scale, comes later, or has several runs."""
    for place, (name, study) in enumerate(studies.items()):
        for scale, settings in study.scales.items():
            if not (needed := sister(settings)):
                continue
            where, before = f"also.{name}.{scale}: from = 'also.{needed}'", list(studies)[:place]
            if needed not in before:
                raise UserError(f"{where}: no study of that name stands before it; there are {before}")
            if scale not in studies[needed].scales:
                raise UserError(f"{where}: it has no scale {scale}")
            spec = build_study(studies[needed].scales[scale])
            grounds = len(spec.corpora) + len(spec.tasks)
            if len(spec.arms) * len(spec.seeds) * len(spec.sizes) * grounds > 1:
                raise UserError(f"{where}: it has several runs; one arm, one seed and one size give one")


def _toy(given: Any) -> dict[str, ToyPlan]:
    tables = _table(given, "toy")
    _known(tables, set(SCALES), "scale of the toy")
    plans = {}
    for scale, entry in tables.items():
        try:
            table = dict(_table(entry, "it"))
            _known(table, {"runs", "seeds", "until", "stepped", "long"}, "setting")
            table["runs"] = _texts(table.get("runs"), "runs")
            for key in ("until", "stepped"):
                if key in table:
                    table[key] = _number(table[key], key)
            table["seeds"] = parse_count(table.get("seeds", 1), "seeds")
            long = _table(table.get("long", {}), "long")
            table["long"] = {name: parse_count(count, name) for name, count in long.items()}
            plans[scale] = ToyPlan(**table)
        except UserError as error:
            raise UserError(f"toy.{scale}: {error}") from None
    return plans


def _claim(entry: Mapping[str, Any], factor: float, studies: Mapping[str, _Study]) -> Claim:
    name = _text(entry.get("id"), "a claim's id")
    try:
        _known(entry, {"id", "statement", "published", "at", "criteria"}, "claim setting")
        places = _at(entry.get("at", {}))
        given = entry.get("criteria")
        if not isinstance(given, list) or not given:
            raise UserError(
                "criteria takes a list of tables such as {kind = 'difference', arm = ..., expect = ...}"
            )
        criteria = tuple(_criterion(_table(part, "a criterion"), factor, studies) for part in given)
        words = (_text(entry.get("statement"), "statement"), _text(entry.get("published"), "published"))
        return Claim(name, *words, criteria, places)
    except UserError as error:
        raise UserError(f"claim {name}: {error}") from None


def _at(given: Any) -> dict[str, Any]:
    """Return where something was published: corpora, sizes, and tokens."""
    at = _table(given, "at")
    _known(at, {"corpus", "size", "tokens"}, "setting of at")
    places: dict[str, Any] = {key: _texts(at[key], f"at.{key}") for key in ("corpus", "size") if key in at}
    if "tokens" in at:
        places["tokens"] = parse_count(at["tokens"], "at.tokens")
    return places


def _criterion(part: Mapping[str, Any], factor: float, studies: Mapping[str, _Study]) -> Criterion:
    kind = _choice(part.get("kind"), "kind of criterion", tuple(KINDS))
    _known(part, KINDS[kind], f"setting of a {kind} criterion")
    for key in sorted(_NEEDED[kind] - part.keys()):
        raise UserError(f"a {kind} criterion needs {key}")
    place = {key: _texts(part[key], key) for key in PLACE if key in part}
    if "branch" in place:
        place["branch"] = tuple(exact_count(parse_count(word, "branch")) for word in place["branch"])
    name = _choice(part.get("study", MAIN), "study of the paper", tuple(studies))
    study = studies[name]
    values: dict[str, Any] = {"kind": kind, "place": place, "study": name, "at": _at(part.get("at", {}))}
    if kind == "tasks" and not study.of_tasks:
        raise UserError(f"a tasks criterion is about a study of tasks; {name} has none")
    factor = 1.0 if kind == "probe" or study.of_tasks else factor
    for key in ("arm", "against", "first", "reason", "control", "control_against", "path"):
        if key in part:
            values[key] = _text(part[key], key)
    for key in ("then", "values"):
        if key in part:
            values[key] = _texts(part[key], key)
    for key in ("at_least", "at_most", "margin"):
        if key in part:
            values[key] = _number(part[key], key) * factor
    for key in ("ratio", "tolerance", "share"):
        if key in part:
            values[key] = _number(part[key], key)
    if values.get("share", 1.0) <= 0:
        raise UserError(f"share is above 0, got {part['share']!r}")
    if "effect" in part:
        effect = part["effect"]
        ends = [_number(end, "effect") * factor for end in (effect if isinstance(effect, list) else [effect])]
        if len(ends) not in (1, 2):
            raise UserError(f"effect takes a number, or the two it lies between, got {effect!r}")
        values["effect"] = (min(ends), max(ends))
    if "expect" in part:
        values["expect"] = _choice(part["expect"], "expect", _EXPECTED.get(kind, ("better", "worse")))
        if kind == "trend" and (values["expect"] in _WITHIN) != ("margin" in part):
            raise UserError(
                f"a trend takes a margin where it is expected {' or '.join(_WITHIN)}, and only there"
            )
    if kind == "trend":
        values["over"] = _choice(part["over"], "over", tuple(OVER))
    elif "over" in part:
        values["over"] = _choice(part["over"], "over", PLACE)
        if len(values["values"]) != 2:
            raise UserError(f"values takes two words of {values['over']}, got {list(values['values'])}")
    if "quantity" in part:
        allowed = TOY_QUANTITIES if kind == "toy" else QUANTITIES
        values["quantity"] = _choice(part["quantity"], "quantity", allowed)
    if kind in ("toy", "toy_check"):
        values |= _toy_settings(part)
    if "compare" in part:
        values["compare"] = _choice(part["compare"], "compare", COMPARED_AS)
    if kind == "probe":
        (values["probe"],) = probe_names([_text(part["probe"], "probe")])
        refuse_unserved([values["probe"]], "tasks" if study.of_tasks else "corpora")
        if (part.get("expect", _BOUNDED[0]) in _BOUNDED) != ("margin" in part):
            raise UserError(
                "a probe criterion takes expect, or the margin within which it counts as equal; "
                f"both where {' or '.join(_BOUNDED)} by more than that is expected"
            )
        if "guard" in part:
            guard = part["guard"]
            if not isinstance(guard, list) or len(guard) != 2:
                raise UserError(f"guard takes a path and a number, got {guard!r}")
            values["guard"] = (_text(guard[0], "guard"), _number(guard[1], "guard"))
        ratios = [*values.get("effect", ()), values.get("at_least", 1.0), values.get("at_most", 1.0)]
        if values.get("compare") == "ratio" and min(ratios) <= 0:
            raise UserError("ratios are above 0")
    criterion = Criterion(**values)
    # A cost needs no training, so its arms need not stand in the study.
    for arm in criterion.arms if kind in TRAINED else ():
        if arm not in study.arms:
            raise unknown("arm", arm, study.arms)
    return criterion


def _toy_settings(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a criterion about the toy."""
    if "checks" in part:
        return {"checks": tuple(_choice(word, "check", CHECKS) for word in _texts(part["checks"], "checks"))}
    order = _texts(part["order"], "order")
    for name in order:
        _choice(name, "toy run", tuple(RUNS))
    losses = tuple(_number(bound, "losses") for bound in _listed(part["losses"], "losses"))
    for bound in losses:
        _choice(bound, "loss of the toy", LOSSES)
    margins = tuple(_number(margin, "margins") for margin in _listed(part.get("margins", [0]), "margins"))
    if len(margins) == 1:
        margins *= len(order) - 1
    if len(order) < 2 or len(margins) != len(order) - 1:
        raise UserError(f"order takes two runs or more and a margin between each two, got {len(margins)}")
    return {"order": order, "losses": losses, "margins": margins}


def _known(values: Mapping[str, Any], known: set[str], kind: str) -> None:
    for key in values:
        if key not in known:
            raise unknown(kind, str(key), known)


def _table(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name} takes a table, got {value!r}")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} takes a text, got {value!r}")
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise UserError(f"{name} takes a text or a list of texts, got {value!r}")
    return tuple(_text(word, name) for word in given)


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{name} takes a list of numbers, got {value!r}")
    return value


def _number(value: Any, name: str) -> float:
    if not is_number(value) or not math.isfinite(value):
        raise UserError(f"{name} takes a number, got {value!r}")
    return float(value)


def _choice(value: Any, name: str, allowed: tuple[Any, ...]) -> str:
    if value not in allowed:
        raise unknown(name, str(value), map(str, allowed))
    return str(value)
