"""The result of a study: verdicts, analyses and the files written from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from headtohead.api.frames import curve_row, data_frame
from headtohead.common import VERSION
from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.files import digest, digest_file, open_regular, write_atomic, write_json
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.explanations import ArmExplanation
from headtohead.study.judge.runs_csv import run_rows, runs_csv
from headtohead.study.judge.stability import Stability
from headtohead.study.judge.transfer_matrix import Cell
from headtohead.study.judge.trends import Trend
from headtohead.study.judge.verdict import Verdict, headlines, sentence, study_verdicts
from headtohead.study.run.execute import Summary
from headtohead.study.run.slurm import WrittenJob
from headtohead.study.store.history import Comparison, History, study_marks
from headtohead.study.store.manifest import Manifest
from headtohead.study.store.result import RunResult
from headtohead.study.store.run_store import Store

CLAIMS = "claims.json"
"""The judged claims of a paper, in the study's directory."""


@dataclass
class StudyResult:
    """A study's verdicts and its directory."""

    path: Path
    manifest: Manifest
    verdicts: list[Verdict]
    summary: Summary = field(default_factory=Summary)
    tuning: bool = False
    """Whether it was stopped while its learning rates were tuned; the manifest is that of the tuning then."""
    report: Path | None = None
    """Path of the page, if it was written."""
    results: dict[str, RunResult] = field(default_factory=dict, repr=False)
    """result.json of every finished run, by run id."""
    damage: list[str] = field(default_factory=list)
    """Files that could not be read and were skipped."""
    added_seeds: frozenset[int] = frozenset()
    """Seeds added after results were available."""
    phases: dict[str, float] = field(default_factory=dict, repr=False)
    """Seconds of this execution by phase."""
    job: WrittenJob | None = None
    """The SLURM job that runs what is left."""

    @cached_property
    def analysis(self) -> Analysis:
        """What is computed from the results: trends, matrix, stability, explanations."""
        return Analysis(self.manifest, self.verdicts, self.results, Store(self.path))

    def write(self, quiet: bool = False, only_if_changed: bool = False) -> None:
        """Write verdicts.json, trends.json and matrix.json if there are any, runs.csv and the page.

        Without the chart library the page is skipped with a message. `only_if_changed` keeps an up-to-date page.
        """
        contests = self.manifest.contests()
        with History.changing(self.path) as history:
            history.report(
                [
                    Comparison(contest.title, row.label, row.baseline_label, row.p)
                    for row in self.verdicts
                    for contest in contests
                    if row.of(contest) and row.p is not None
                ]
            )
        rows = [row.as_dict() for row in self.verdicts]
        write_json(self.path / "verdicts.json", rows)
        if trends := self.analysis.trends:
            write_json(self.path / "trends.json", [trend.as_dict() for trend in trends])
        if cells := self.analysis.matrix:
            write_json(self.path / "matrix.json", [cell.as_dict() for cell in cells])
        page = self.path / "report.html"
        stamp = _stamp(self.path, self.manifest, rows, self.results)
        if only_if_changed and _carries(page, stamp) and (self.path / "runs.csv").is_file():
            self.report = page
            return
        table = runs_csv(Store(self.path), self.manifest, self.results, self.added_seeds)
        write_atomic(self.path / "runs.csv", table)
        try:
            from headtohead.report.page import write_report
        except ImportError as error:
            report_skipped(error, quiet)
            return
        self.report = write_report(self.path, self.analysis, self.damage, stamp)

    def write_charts(self, quiet: bool = False) -> list[Path]:
        """Write every chart as SVG, PDF and PNG into the study's folder `charts`; return the files."""
        try:
            from headtohead.report.figures import write_charts
        except ImportError as error:
            raise UserError(f"charts need {error.name}: pip install altair vl-convert-python") from None
        with progress_bar("drawing", quiet) as progress:
            return write_charts(self.path, self.analysis, progress)

    def table(self, form: str = "markdown") -> str:
        """Return the verdicts with intervals and costs as a table; `form` is latex, markdown or csv."""
        from headtohead.report.tables import verdict_text

        return verdict_text(self.path, self.analysis, form)

    def sentences(self) -> list[str]:
        """Return each verdict in one sentence."""
        return [sentence(row, self.verdicts) for row in self.verdicts]

    def headlines(self) -> list[str]:
        """Return one sentence per arm, over all contests."""
        return [text for _, text in headlines(self.verdicts)]

    def trends(self) -> list[Trend]:
        """Return how each arm's gap changes with size, tokens per parameter and context, if the study has several."""
        return self.analysis.trends

    def stability(self) -> list[Stability]:
        """Return divergence rates, loss spikes and sample efficiency per arm, from the runs' training curves."""
        return [row for rows in self.analysis.stability.values() for row in rows]

    def matrix(self) -> list[Cell]:
        """Return the scores of arms trained on one corpus and tested on another, if the probe `corpora` was run."""
        return self.analysis.matrix

    def explained(self) -> list[ArmExplanation]:
        """Return the attention of each arm on its task, over seeds, if the probe `explain` was run."""
        return self.analysis.explanations

    def verdicts_frame(self) -> Any:
        """Return the verdicts as a pandas data frame, one row per arm and contest."""
        return data_frame([row.as_dict() for row in self.verdicts])

    def to_pandas(self) -> Any:
        """Return `verdicts_frame()`; the name until version 0.2."""
        return self.verdicts_frame()

    def runs(self) -> Any:
        """Return the runs as a pandas data frame with the columns of runs.csv, one row per arm, seed and contest."""
        columns, rows = run_rows(Store(self.path), self.manifest, self.results, self.added_seeds)
        return data_frame(rows, columns)

    def curves(self) -> Any:
        """Return the training curves as a pandas data frame, one row per run and logged step.

        Rows of an evaluation have `valid_` and `test_` columns instead of the training loss. Damaged curves are left out
        and named in `damage`.
        """
        rows = []
        for entry in self.manifest.entries:
            place = {name: value for name, value in entry.contest.place.items() if value}
            about = {"run": entry.run, "label": entry.label, "seed": entry.seed, **place}
            try:
                curve = Store(self.path).run(entry.run).curve(self.results.get(entry.run))
            except UnreadableFile as error:
                self.damage += [str(error)] if str(error) not in self.damage else []
                continue
            rows += [about | curve_row(row) for row in curve]
        return data_frame(rows)

    def __repr__(self) -> str:
        done = sum(result.status == "done" for result in self.results.values())
        runs = f"{done} of {len({entry.run for entry in self.manifest.entries})} runs done"
        verdicts = "; ".join(f"{row.label} {row.verdict}" for row in self.verdicts[:4])
        more = f"; {len(self.verdicts) - 4} more" if len(self.verdicts) > 4 else ""
        return f"StudyResult({str(self.path)!r}: {runs}; {verdicts or 'no verdicts'}{more})"

    def _repr_html_(self) -> str | None:
        """Return the verdicts as a styled table for notebooks; None, and so the plain text, without the template library."""
        try:
            from headtohead.report.templates import asset, verdict_table
        except ImportError:
            return None
        table = verdict_table(self.manifest, self.verdicts)
        return f'<div class="h2h-verdicts"><style>{asset("notebook.css")}</style>{table}</div>'


def judge_study(
    store: Store, manifest: Manifest, added: frozenset[int], known: dict[str, RunResult]
) -> StudyResult:
    """Return the verdicts of a study; results in `known` are not read again."""
    damage: dict[str, str] = {}
    others = sorted({entry.run for entry in manifest.entries if entry.run not in known})
    results = known | store.results(others, damage)
    marks = study_marks(store.path, manifest, added)
    verdicts = study_verdicts(manifest, results, marks)
    return StudyResult(
        *(store.path, manifest, verdicts),
        results=results,
        damage=list(damage.values()),
        added_seeds=marks.added_seeds,
    )


def _stamp(path: Path, manifest: Manifest, rows: list[dict[str, Any]], results: dict[str, RunResult]) -> str:
    """Return a digest of everything the page shows."""
    checksums = sorted((run, result.checksum or "None") for run, result in results.items())
    claims = digest_file(path / CLAIMS) if (path / CLAIMS).is_file() else ""
    return digest(json.dumps([VERSION, manifest.as_dict(), rows, checksums, claims], sort_keys=True))[:32]


def _carries(page: Path, stamp: str) -> bool:
    try:
        with open_regular(page) as stream:
            return stamp.encode() in stream.read(1000)
    except (OSError, UnreadableFile):
        return False


def report_skipped(error: ImportError, quiet: bool) -> None:
    if not quiet:
        say(
            f"page not written: {(error.name or '').partition('.')[0]} is not installed (pip install altair vl-convert-python jinja2)"
        )
