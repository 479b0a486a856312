"""Run the studies of a paper, its toy model among them, and judge its claims."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtohead.api.checked import checked
from headtohead.api.result import CLAIMS, StudyResult, report_skipped
from headtohead.api.study import Study, open_study, plain, processes
from headtohead.common.deprecation import old_names
from headtohead.common.errors import DamagedFile, MissingFile, UserError, unknown
from headtohead.common.files import write_json
from headtohead.common.numbers import parse_duration
from headtohead.common.progress import progress_bar
from headtohead.common.schema import read_document, write_document
from headtohead.common.terminal import say
from headtohead.data.available import check_available, lacking
from headtohead.papers.faster_qk.work import Toy, ToyPlan, read_toy, work_toy
from headtohead.study.claims import ClaimResult, judge_claims
from headtohead.study.claims.criteria import MAIN
from headtohead.study.claims.paper import TOY, Paper, find_paper, read_paper, sister, sisters
from headtohead.study.config.folder import given_folder
from headtohead.study.config.spec import with_stored_names
from headtohead.study.environment import choose_device
from headtohead.study.plan.planner import study_data
from headtohead.study.run.execute import Summary
from headtohead.study.store.copies import Source
from headtohead.study.store.run_store import Store

PLAN = "plan.json"
"""The settings of a paper's studies when the first of their runs was started."""


@dataclass
class Reproduction:
    """The judged claims of a paper, with its studies and their directory."""

    scale: str
    claims: list[ClaimResult]
    path: Path
    """Path of claims.json."""
    studies: dict[str, StudyResult]
    """By name: the studies that were run or already finished; `study` is the one of [study]."""
    ran: list[str] = field(default_factory=list)
    """The studies run by this call."""
    toy: Toy | None = None
    """The results of the paper's toy model, if it has one at this scale."""
    summary: Summary = field(default_factory=Summary)
    """The combined summary of all studies."""
    trouble: dict[str, str] = field(default_factory=dict)
    """Studies that could not be run, and why."""
    unstarted: list[str] = field(default_factory=list)
    """Unfinished studies that were not started because an earlier one was stopped."""
    absent: dict[str, str] = field(default_factory=dict)
    """Why studies without verdicts have none."""

    @property
    def study(self) -> StudyResult:
        """The study of [study]; raises if it has no verdicts yet."""
        if MAIN not in self.studies:
            state = self.absent.get(MAIN, f"has not been run in {self.path.parent}")
            others = f"; available: {', '.join(self.studies)}" if self.studies else ""
            raise UserError(f"study '{MAIN}' {state}{others}")
        return self.studies[MAIN]


@old_names(seconds="time_limit", stack="population")
@checked
def reproduce(
    paper: str | Path,
    *,
    scale: str = "smoke",
    out: str | Path | None = None,
    only: str = "",
    **execution: Any,
) -> Reproduction:
    """Run the studies of a paper at a scale (smoke, tiny, small, paper) and judge each claim.

    `paper` is the name of a shipped study or a TOML file; the other arguments are those of `Study.run`. `only` runs a single
    study, and the one it initializes from if any: a name, `study` for the one of [study], or `toy`. The study of
    [study] is stored in `out`, every other one in a subdirectory of its name. A second call runs only what is missing.
    Runs that several studies of the paper share are trained once and copied.
    The claims, judged by all finished studies, are written to `claims.json` in `out` and to the page.
    """
    if execution.get("on", "local") == "slurm":
        raise UserError("reproduce does not write SLURM jobs; give its studies to h2h race --on slurm")
    known = read_paper(find_paper(paper))
    folder = Path("races") / f"{known.name}-{scale}" if out is None else given_folder(out)
    work = _Work(known, scale, folder, execution)
    parts = [*known.studies(scale), *([TOY] if scale in known.toy else [])]
    if only and only not in parts:
        raise unknown(f"study of {known.name} at scale {scale}", only, parts)
    work.check_place()
    wanted = {only or name for name in parts}
    if only and only != TOY:
        wanted |= set(known.starts(scale, only))
    work.check_data([name for name in parts if name in wanted], alone=bool(only))
    work.keep_plan()
    for name in parts:
        (work.run if name in wanted else work.read)(name, alone=bool(only))
    return work.judged(quiet=bool(execution.get("quiet")))


@old_names(seconds="time_limit")
@checked
def run_toy(
    plan: ToyPlan | str,
    out: str | Path,
    *,
    device: str = "auto",
    workers: int = 0,
    time_limit: float | str = math.inf,
    quiet: bool = False,
) -> Toy:
    """Run what is missing of the toy in `out`, write toy.json, toy.html and the charts there, and return the result.

    `plan` may be a scale of `faster_qk`: smoke, small or paper.

    >>> run_toy(ToyPlan(runs=("FAFO", "FACO"), seeds=2, until=0.1), "races/toy").findings
    """
    limit = parse_duration(time_limit)
    if isinstance(plan, str):
        scales = read_paper(find_paper("faster_qk")).toy
        if plan not in scales:
            raise unknown("scale of the toy", plan, scales)
        plan = scales[plan]
    chosen = choose_device(device)
    toy = work_toy(plan, Path(out), chosen, processes([chosen], workers), limit, quiet)
    try:
        from headtohead.report.toy import write_toy
    except ImportError as error:
        report_skipped(error, quiet)
        return toy
    with progress_bar("drawing", quiet) as progress:
        try:
            write_toy(Path(out), toy, progress)
        except OSError as error:
            raise UserError(f"cannot write the toy's page to {out}: {error.strerror}") from None
    return toy


class _Work:
    """A paper at one scale: runs or reads its studies one by one, then judges them together."""

    def __init__(self, paper: Paper, scale: str, folder: Path, execution: dict[str, Any]) -> None:
        self.paper, self.scale, self.folder, self.execution = paper, scale, folder, execution
        self.settings = paper.studies(scale)
        self.end = time.monotonic() + parse_duration(execution.get("time_limit", math.inf))
        self.found = Reproduction(scale, [], folder / CLAIMS, {})

    def _place(self, name: str) -> Path:
        return self.folder if name == MAIN else self.folder / name

    def check_place(self) -> None:
        """Raise if the folder holds another study, whose page and claims would be overwritten."""
        place, name = self.folder / "study.json", self.settings[MAIN]["name"]
        try:
            there = _recorded(place).get("name", name)
        except (MissingFile, DamagedFile):  # running the study writes it again
            return
        if there != name:
            raise UserError(
                f"{self.folder} holds the study '{there}', not '{name}'; give another folder as out"
            )

    def check_data(self, names: list[str], alone: bool) -> None:
        """Raise if the study of [study], or the only one, lacks data; for the others, say what they lack."""
        specs = {name: Study(**self.settings[name]).spec for name in names if name != TOY}
        data_dir = self.execution.get("data_dir")
        try:
            check_available([given for spec in specs.values() for given in study_data(spec)], data_dir)
        except MissingFile as error:
            first = [study_data(spec) for name, spec in specs.items() if alone or name == MAIN]
            if any(lacking(given, data_dir) for given in first):
                raise
            if not self.execution.get("quiet"):
                say(str(error), flush=True)

    def run(self, name: str, alone: bool) -> None:
        """Run a study or the toy; a study that cannot be run is recorded, and the remaining ones still run."""
        found = self.found
        if found.summary.stopped:
            self.read(name, alone)
            if not self._complete(name):
                found.unstarted.append(name)
            return
        left = max(0.0, self.end - time.monotonic())
        if name == TOY:
            shared = {
                key: self.execution[key] for key in ("device", "workers", "quiet") if key in self.execution
            }
            found.toy = run_toy(self.paper.toy[self.scale], self.folder, time_limit=left, **shared)
            found.summary.left += found.toy.left
            found.summary.stopped = found.summary.stopped or found.toy.left > 0
            return
        try:
            study = Study(**self._started(name))
            study.planned_with = [
                Source(Store(self._place(other)), same_plan=self._planned_together(name, other))
                for other in self.settings
                if other != name
            ]
            result = study.run(self._place(name), **(self.execution | {"time_limit": left}))
        except UserError as error:
            if alone or name == MAIN:
                raise
            self.found.absent[name] = f"could not be run: {error}"
            found.trouble[name] = str(error)
            return
        if result.tuning:
            self.found.absent[name] = "is still being tuned"
        else:
            found.studies[name] = result
        found.ran.append(name)
        found.summary.done += result.summary.done
        found.summary.left += result.summary.left
        found.summary.stopped = found.summary.stopped or result.summary.stopped
        found.summary.trouble += result.summary.trouble

    def read(self, name: str, alone: bool) -> None:
        """Read a study or the toy from its folder."""
        place = self._place(name) / "study.json"
        try:
            if name == TOY:
                self.found.toy = read_toy(self.paper.toy[self.scale], self.folder)
            elif not place.is_file():
                return
            elif not self._same(_recorded(place), name):
                self.found.absent[name] = f"was run with other settings in {place.parent}; run it again"
            else:
                self.found.studies[name] = open_study(place.parent)
        except UserError as error:  # the other studies are still judged
            self.found.absent[name] = f"cannot be read: {error}"
            self.found.trouble[name] = str(error)

    def keep_plan(self) -> None:
        """Record the settings of all studies, until one of them has a run."""
        if any(Store(self._place(name)).runs() for name in self.settings):
            return
        studies = {name: self._plain(name) for name in self.settings}
        Store(self.folder).make()
        write_document(self.folder / PLAN, {"studies": studies})

    def _planned_together(self, name: str, other: str) -> bool:
        """Return whether two studies have the settings that were recorded before any results."""
        try:
            studies = read_document(self.folder / PLAN)["studies"]
            if any(studies.get(one) != self._plain(one) for one in (name, other)):
                return False
            place = self._place(other) / "study.json"  # written when its learning rates are tuned
            return not place.is_file() or self._same(_recorded(place), other)
        except (UserError, KeyError, AttributeError, TypeError):
            return False

    def _plain(self, name: str) -> dict[str, Any]:
        return plain(Study(**self.settings[name]).values)

    def _complete(self, name: str) -> bool:
        """Return whether a study or the toy that was read has every result."""
        if name == TOY:
            return self.found.toy is not None and not self.found.toy.left
        study = self.found.studies.get(name)
        return study is not None and all(entry.run in study.results for entry in study.manifest.entries)

    def _started(self, name: str) -> dict[str, Any]:
        """Return a study's settings, with the folders of the runs its models are initialized from."""
        settings = self.settings[name]
        if not sisters(settings):
            return settings
        return _with_starts(settings, lambda given: self._trained_run(name, given))

    def _trained_run(self, name: str, given: Mapping[str, Any]) -> str:
        """Return the folder of the finished run of the study in a `from`."""
        if not (needed := sister(given)):
            return str(given["from"])
        place, there = self._place(needed), self.found.studies.get(needed)
        done = [run for run, result in (there.results if there else {}).items() if result.status == "done"]
        if not done:
            raise UserError(
                f"study {name} initializes its models from study {needed}, which has no finished run in {place}"
            )
        return str(place / "runs" / done[0])

    def _same(self, recorded: dict[str, Any], name: str) -> bool:
        """Return whether a stored study has these settings; the runs it initializes from may have moved with it."""
        if sisters(self.settings[name]):
            recorded = _with_starts(
                recorded, lambda given: f"also.{''.join(Path(str(given['from'])).parts[-3:-2])}"
            )
        return bool(recorded == self._plain(name))

    def judged(self, quiet: bool) -> Reproduction:
        """Judge the claims by all available studies; write claims.json, and the page of [study] if it has verdicts."""
        found = self.found
        studies = {name: result.analysis for name, result in found.studies.items()}
        found.claims = judge_claims(self.paper, self.scale, studies, toy=found.toy, absent=found.absent)
        write_json(found.path, [claim.as_dict() for claim in found.claims])
        if MAIN in found.studies and found.study.verdicts:  # adds the claims to the page
            found.study.write(quiet=quiet, only_if_changed=True)
        return found


def _with_starts(settings: Mapping[str, Any], resolve: Callable[[Mapping[str, Any]], str]) -> dict[str, Any]:
    """Return settings with each `from`, of the study and of its arms, replaced by what `resolve` gives for its table."""

    def resolved(table: Any) -> Any:
        return {**table, "from": resolve(table)} if isinstance(table, Mapping) and "from" in table else table

    found: dict[str, Any] = resolved(with_stored_names(settings))
    return {**found, "arms": [resolved(arm) for arm in found["arms"]]}


def _recorded(place: Path) -> dict[str, Any]:
    """Return the settings in a study.json."""
    record = read_document(place)
    if not isinstance(record, dict) or not isinstance(record.get("settings"), dict):
        raise DamagedFile(f"damaged file {place}: no settings; run the study again to rewrite it")
    settings: dict[str, Any] = record["settings"]
    return settings
