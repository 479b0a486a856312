"""Paper files: a paper's claims with their criteria, and the studies that decide them at several scales.

    [paper]                 title, about, unit and bytes_per_unit of its numbers (default: bits per byte)
    [study]                 the settings of a study, as in any study file
    [scale.smoke]           settings that differ at that scale; likewise small and paper, and tiny if the paper has it
    [also.NAME]             the settings of another study, of corpora or tasks, if the paper has several
    [also.NAME.smoke]       settings that differ at that scale; without this table the study is not run at the scale;
                            from = "also.OTHER", of the study or of an arm: models start from the only run of another
                            study of the paper
    [toy.smoke]             runs of the toy, seeds, and the loss at which they end, if the paper has a toy
    [[claim]]               id, statement, published (its numbers, as text), at (corpus, size, tokens), criteria

A claim is supported if all of its criteria are. Numbers are differences arm - baseline, of a loss (below 0 is better) or
of a task's metric (above 0 is better).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import parse_count
from headtohead.papers.faster_qk.work import ToyPlan
from headtohead.study.claims import kinds, numbers, toy  # noqa: F401  (registers the kinds)
from headtohead.study.claims.criteria import MAIN, At, Criterion, Text, decode, read_criterion
from headtohead.study.config.shipped import shipped_studies
from headtohead.study.config.spec import (
    StudySpec,
    build_study,
    changed_settings,
    read_study,
    with_stored_names,
)
from headtohead.study.config.validation import (
    as_number,
    as_table,
    as_text,
    as_texts,
    check_known,
)

SCALES = ("smoke", "tiny", "small", "paper")
_REQUIRED = ("smoke", "small", "paper")
TOY = "toy"
"""Name of the toy among several studies."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SISTER = "also."
# Names that are used for other folders and tables.
_TAKEN = (MAIN, TOY, "runs", "charts")


@dataclass(frozen=True)
class Claim:
    """One published statement."""

    id: str
    statement: str
    published: str
    criteria: tuple[Criterion, ...]
    at: At = field(default_factory=At)
    """Corpora, sizes and tokens of the published numbers; unknown ones are left out."""
    ours: bool = False
    """Whether the question is ours; the paper does not state it."""


@dataclass(frozen=True)
class Paper:
    """A paper's claims, and the settings of its studies at each scale."""

    name: str
    scales: dict[str, dict[str, Any]]
    claims: tuple[Claim, ...]
    toy: dict[str, ToyPlan] = field(default_factory=dict)
    """The plan of the toy at each scale."""
    also: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """The settings of its other studies, by name and scale."""

    def studies(self, scale: str) -> dict[str, dict[str, Any]]:
        """Return the settings of all its studies at a scale by name, [study] first."""
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

    def starts(self, scale: str, study: str) -> list[str]:
        """Return the names of the studies from whose runs a study's models start."""
        return sisters(self.settings(scale, study))


def sisters(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of other studies of the paper in the `from` of a study and of its arms, each once."""
    arms = [arm for arm in settings.get("arms", ()) if isinstance(arm, Mapping)]
    return list(dict.fromkeys(filter(None, map(sister, (settings, *arms)))))


def sister(settings: Mapping[str, Any]) -> str:
    """Return the name of another study of the paper in the `from` of a study or an arm, or an empty string."""
    given = str(with_stored_names(settings).get("from", ""))
    return given.removeprefix(_SISTER) if given.startswith(_SISTER) else ""


def find_paper(given: str | Path) -> Path:
    """Return the paper file: a path, or the name of a shipped study with claims."""
    name, shipped = str(given), shipped_studies()
    if name.endswith(".toml"):
        return Path(given)
    if name not in shipped:
        raise unknown("paper", name, {name for name, path in shipped.items() if _has_claims(path)})
    return shipped[name]


def _has_claims(path: Path) -> bool:
    try:
        return "claim" in read_study(path)
    except UserError:
        return False


def read_paper(path: Path) -> Paper:
    """Return the paper in a TOML file; errors name the file and the claim."""
    values = read_study(path)
    try:
        return _paper(path.stem, values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _paper(name: str, values: Mapping[str, Any]) -> Paper:
    if "claim" not in values:
        raise UserError("no [[claim]] found; run a study without claims with: h2h race")
    check_known(values, {"paper", "study", "scale", "also", "toy", "claim"}, "table")
    about = decode(_About, as_table(values.get("paper", {}), "paper"), "[paper]")
    tables = as_table(values.get("scale"), "scale")
    check_known(tables, set(SCALES), "scale")
    for scale in _REQUIRED:
        if scale not in tables:
            raise UserError(f"[scale.{scale}] is missing; a paper needs {', '.join(_REQUIRED)}")
    main = _Study(f"{name}, ", "scale", as_table(values.get("study"), "study"), tables)
    also = _also(name, as_table(values.get("also", {}), "also"))
    _check_starts({MAIN: main} | also)
    claims: list[Claim] = []
    for entry in values["claim"] if isinstance(values["claim"], list) else [values["claim"]]:
        claim = _claim(as_table(entry, "claim"), about.factor, {MAIN: main} | also)
        if any(claim.id == other.id for other in claims):
            raise UserError(f"claim {claim.id} is given twice")
        claims.append(claim)
    others = {key: study.scales for key, study in also.items()}
    plans = _toy(as_table(values.get("toy", {}), "toy"))
    return Paper(name, main.scales, tuple(claims), plans, others)


PerUnit = Annotated[float, Meta(ge=1e-3, le=1e6, description="a number from 0.001 to 1,000,000")]


@dataclass(frozen=True)
class _About:
    """The table [paper]."""

    title: Text = ""
    about: Text = ""
    unit: Literal["bits_per_byte", "nats_per_token", "nats_per_word"] = "bits_per_byte"
    """The unit of the numbers in criteria."""
    bytes_per_unit: PerUnit | None = None

    def __post_init__(self) -> None:
        if (self.unit == "bits_per_byte") != (self.bytes_per_unit is None):
            raise UserError(
                f"unit={self.unit}: nats_per_token and nats_per_word need bytes_per_unit; bits_per_byte takes none"
            )

    @property
    def factor(self) -> float:
        """The factor from nats per unit to bits per byte."""
        return 1.0 if self.bytes_per_unit is None else 1 / (math.log(2) * self.bytes_per_unit)


class _Study:
    """The settings of one study by scale, and as a study at each scale."""

    def __init__(self, name: str, place: str, common: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        self.scales: dict[str, dict[str, Any]] = {}
        self.specs: list[StudySpec] = []
        for scale in (name for name in SCALES if name in tables):
            settings = changed_settings(common, as_table(tables[scale], f"{place}.{scale}"))
            self.scales[scale] = {"name": f"{name}{scale}"} | settings
            try:
                self.specs.append(build_study(self.scales[scale]))
            except UserError as error:
                raise UserError(f"{place}.{scale}: {error}") from None
        if len({bool(spec.tasks) for spec in self.specs}) > 1:
            raise UserError(
                f"{place}: some scales use tasks, others corpora; all scales must use the same kind"
            )


def _also(paper: str, given: Mapping[str, Any]) -> dict[str, _Study]:
    """Return the paper's other studies by name."""
    studies = {}
    for name, entry in given.items():
        table, place = as_table(entry, f"also.{name}"), f"also.{name}"
        if not _NAME.fullmatch(name) or name in _TAKEN:
            raise UserError(
                f"[{place}]: a study name has lower-case letters, digits and _, and is none of {', '.join(_TAKEN)}"
            )
        common = {key: value for key, value in table.items() if key not in SCALES}
        scales = {key: value for key, value in table.items() if key in SCALES}
        if not scales:
            raise UserError(f"[{place}] has no scale; add [{place}.small]")
        studies[name] = _Study(f"{paper}, {name}, ", place, common, scales)
    return studies


def _check_starts(studies: Mapping[str, _Study]) -> None:
    """Check that models start from an earlier study that exists at their scale and has one run."""
    for index, (name, study) in enumerate(studies.items()):
        before = list(studies)[:index]
        for scale, settings in study.scales.items():
            where = f"scale.{scale}" if name == MAIN else f"also.{name}.{scale}"
            for needed in sisters(settings):
                _check_start(f"{where}: from = '{_SISTER}{needed}'", scale, needed, before, studies)


def _check_start(
    where: str, scale: str, needed: str, before: Sequence[str], studies: Mapping[str, _Study]
) -> None:
    if needed not in before:
        raise UserError(
            f"{where}: no earlier study has this name; earlier studies: {', '.join(before) or 'none'}"
        )
    if scale not in studies[needed].scales:
        raise UserError(f"{where}: that study has no scale {scale}")
    first = build_study(studies[needed].scales[scale])
    parts = ("arms", "seeds", "sizes", "corpora", "tasks", "shapes", "lengths", "contexts", "branches")
    if any(len(getattr(first, part)) > 1 for part in parts):
        raise UserError(f"{where}: that study has several runs; it must have one arm, one seed and one size")


def _toy(tables: Mapping[str, Any]) -> dict[str, ToyPlan]:
    """Return the plans of the toy by scale."""
    check_known(tables, set(SCALES), "scale of the toy")
    plans = {}
    for scale, entry in tables.items():
        try:
            table = dict(as_table(entry, "it"))
            check_known(table, {"runs", "seeds", "until", "stepped", "long"}, "setting")
            table["runs"] = as_texts(table.get("runs"), "runs")
            for key in ("until", "stepped"):
                if key in table:
                    table[key] = as_number(table[key], key)
            table["seeds"] = parse_count(table.get("seeds", 1), "seeds")
            long = as_table(table.get("long", {}), "long")
            table["long"] = {name: parse_count(count, name) for name, count in long.items()}
            plans[scale] = ToyPlan(**table)
        except UserError as error:
            raise UserError(f"toy.{scale}: {error}") from None
    return plans


def _claim(entry: Mapping[str, Any], factor: float, studies: Mapping[str, _Study]) -> Claim:
    name = as_text(entry.get("id"), "a claim's id")
    if not name.strip():
        raise UserError(f"a claim's id is empty; its statement is {entry.get('statement', '')!r:.80}")
    try:
        check_known(entry, {"id", "statement", "published", "at", "criteria", "ours"}, "claim setting")
        at = decode(At, as_table(entry.get("at", {}), "at"), "at")
        given = entry.get("criteria")
        if not isinstance(given, list) or not given:
            raise UserError(
                "criteria takes a list of tables such as {kind = 'difference', arm = ..., expect = ...}"
            )
        specs = {name: study.specs for name, study in studies.items()}
        tables = [as_table(part, "a criterion") for part in given]
        criteria = tuple(read_criterion(table, factor, specs) for table in tables)
        if not any(criterion.decides for criterion in criteria):
            raise UserError("decides = false in every criterion leaves nothing to judge; remove it from one")
        texts = (as_text(entry.get("statement"), "statement"), as_text(entry.get("published"), "published"))
        ours = entry.get("ours", False)
        if not isinstance(ours, bool):
            raise UserError(f"ours is true or false, got {ours!r}")
        return Claim(name, *texts, criteria, at, ours)
    except UserError as error:
        raise UserError(f"claim {name}: {error}") from None
