"""Tables of runs: write a study's runs.csv, and judge tables of runs trained elsewhere."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headtohead.common.errors import MissingFile, UnreadableFile, UserError, unknown
from headtohead.common.files import digest, read_text
from headtohead.common.numbers import is_number
from headtohead.evaluation.tasks import MARGINS
from headtohead.study.judge.verdict import Verdict, study_verdicts, untrained_line
from headtohead.study.store.history import Marks
from headtohead.study.store.manifest import METRIC, Contest, Entry, Manifest, Measure
from headtohead.study.store.result import STATUSES, RunResult, Score
from headtohead.study.store.run_store import Store

_SCORES = ("nats", "perplexity", "bits_per_byte")
_BEFORE = ("status", "parameters", "flops_per_token", "cache_bytes_per_token", "tokens")
_AFTER = ("train_seconds", "tokens_per_second", "untrained")
"""`untrained` is the score of an untrained model: the bigram line, or the best of a task's trivial answers."""


def _split_columns(scores: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{split}_{name}" for split in ("valid", "test") for name in scores)


COLUMNS = (
    *("run", "arm", "label", "seed", "added_later", "corpus", "size", "shape", "length", "numerics"),
    *(*_BEFORE, *_split_columns(_SCORES), *_AFTER),
)
_SOME_COLUMNS = ("context", "branch")
"""After `length`, in studies that have several."""
CONTEST_COLUMNS = ("corpus", "size", "shape", "length", "context", "branch", "numerics")
MARGIN = 0.005
"""In bits per byte. Other metrics have no default margin."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MAX_BYTES = 64 * 2**20


def runs_csv(
    store: Store, manifest: Manifest, results: Mapping[str, RunResult], added_seeds: frozenset[int]
) -> str:
    """Return a study's runs as CSV, one row per arm, seed and contest; unknown values are empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    columns, rows = run_rows(store, manifest, results, added_seeds)
    writer.writerow(columns)
    writer.writerows([csv_cell(row.get(column)) for column in columns] for row in rows)
    return stream.getvalue()


def run_rows(
    store: Store, manifest: Manifest, results: Mapping[str, RunResult], added_seeds: frozenset[int]
) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return the columns of a study's runs and one row per arm, seed and contest; unknown values are None or missing."""
    extra = [name for name in _SOME_COLUMNS if any(getattr(contest, name) for contest in manifest.contests())]
    after = COLUMNS.index("length") + 1
    scores = _scores(manifest, results)
    columns = (*COLUMNS[:after], *extra, "numerics", *_BEFORE, *_split_columns(scores), *_AFTER)
    texts = {label: text for text, label in manifest.arms}
    rows = []
    for contest in manifest.contests():
        for label, text in texts.items():
            facts: dict[str, Any] = {}
            for seed, run_id in manifest.runs(contest, label).items():
                run = store.run(run_id)
                # These facts are the same for all seeds of an arm, so one record is enough.
                facts = facts or _facts(store, run_id)
                result = results.get(run_id)
                cost = run.costs(result)
                row: dict[str, Any] = {
                    "run": run_id,
                    "arm": text,
                    "label": label,
                    "seed": seed,
                    "added_later": int(seed in added_seeds),
                    **contest.place,
                    "status": "not finished" if result is None else result.status,
                    "tokens": None if result is None else result.tokens,
                    "train_seconds": cost.train_seconds,
                    "tokens_per_second": cost.tokens_per_second,
                    "untrained": untrained_line(manifest, contest),
                } | facts
                for split in ("valid", "test"):
                    score = None if result is None else getattr(result, split)
                    row |= {f"{split}_{name}": score and score.values.get(name) for name in scores}
                rows.append(row)
    return columns, rows


def _scores(manifest: Manifest, results: Mapping[str, RunResult]) -> tuple[str, ...]:
    """Return the score columns of a study; for tasks, every metric that occurs in a result."""
    if not manifest.measures:
        return _SCORES
    tests = [test for result in results.values() if (test := result.tested) is not None]
    return ("nats", *(name for name in MARGINS if any(name in test.values for test in tests)))


def _facts(store: Store, run_id: str) -> dict[str, Any]:
    try:
        spec = store.run(run_id).spec()
    except UnreadableFile:
        return {}
    return {name: getattr(spec, name) for name in ("parameters", "flops_per_token", "cache_bytes_per_token")}


def csv_cell(value: Any) -> str:
    """Return a cell; text that a spreadsheet would read as a formula is prefixed with an apostrophe."""
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith((*_FORMULA, "'")) else value
    known = isinstance(value, bool) or (is_number(value) and math.isfinite(value))
    return repr(value) if known else ""


def _text(cell: str) -> str:
    """Invert `csv_cell`."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith((*_FORMULA, "'")) else cell


@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns."""

    arm: str
    seed: str
    metric: str
    by: tuple[str, ...] | None = None
    """Columns that separate contests; None: those of corpus, size, shape, length, context and branch in the table.

    A column `numerics` always separates them: runs with different numerics are never compared."""


@dataclass(frozen=True)
class Judged:
    """A table of runs with its verdicts."""

    manifest: Manifest
    results: dict[str, RunResult]
    verdicts: list[Verdict]
    measure: Measure


def judge_table(
    path: Path,
    columns: Columns,
    *,
    baseline: str = "",
    primary: str = "",
    margin: float | None = None,
    better: Literal["lower", "higher"] = "lower",
) -> Judged:
    """Return the verdicts of a table of runs. The first arm is the baseline by default.

    No comparison counts as planned unless `primary` names its arm.
    """
    header, rows = _read(path)
    # Reading back the column of a study's own metric gives the study's own verdicts.
    measure = Measure(METRIC if columns.metric == f"test_{METRIC}" else columns.metric, better)
    manifest, results, added = _manifest(path, header, rows, columns, measure)
    labels = [label for _, label in manifest.arms]
    for role, name in (("baseline", baseline), ("primary", primary)):
        if name and name not in labels:
            raise unknown(f"arm given as {role}", name, labels)
    chosen = baseline or labels[0]
    if len(labels) < 2:
        raise UserError(
            f"{path}: column '{columns.arm}' has only one arm, '{labels[0]}'; two or more are needed"
        )
    if primary == chosen:
        raise UserError(f"the primary arm '{primary}' is the baseline; it cannot be compared with itself")
    known = columns.metric.endswith(METRIC)
    manifest = dataclasses.replace(
        manifest,
        baseline=chosen,
        primary=primary or None,
        margin=margin if margin is not None else MARGIN if known else 0.0,
    )
    verdicts = study_verdicts(manifest, results, Marks(added_seeds=added), measure)
    for row, contest in zip(
        verdicts, [c for c in manifest.contests() for _ in range(len(labels) - 1)], strict=True
    ):
        row.notes += _unpaired(manifest, contest, row, results)
        if not row.margin:
            row.notes.append("no margin was given, so nothing can be equivalent")
    return Judged(manifest, results, verdicts, measure)


def _unpaired(
    manifest: Manifest, contest: Contest, row: Verdict, results: Mapping[str, RunResult]
) -> list[str]:
    """Return notes on seeds that only one side has, and on seeds for which the baseline has no number."""
    ours, theirs = (set(manifest.runs(contest, label)) for label in (row.label, row.baseline_label))
    base = manifest.runs(contest, row.baseline_label)
    done = {run for run, result in results.items() if result.status == "done"}
    empty = {seed for seed in ours & theirs if base[seed] not in done}
    found = (
        (ours - theirs, f"of {row.label} without a partner: left out"),
        (theirs - ours, f"of {row.baseline_label} without a partner: left out"),
        (empty, f"of {row.baseline_label} without a number: left out"),
    )
    return [f"{_seeds(seeds)} {note}" for seeds, note in found if seeds]


def _seeds(seeds: set[int]) -> str:
    shown = ", ".join(map(str, sorted(seeds)[:10])) + (", ..." if len(seeds) > 10 else "")
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {shown}"


@dataclass(frozen=True)
class _Row:
    """One row of a table: where it is, and its cells by column."""

    path: Path
    number: int
    """As in a spreadsheet, where the header is row 1."""
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """Return the text of a cell; empty without such a column."""
        return _text(self.cells.get(column, "").strip())

    def value(self, column: str, what: str = "a number") -> float:
        """Return the number in a cell."""
        try:
            return float(self.cells[column])
        except ValueError:
            raise self.wrong(column, what) from None

    def seed(self, column: str) -> int:
        """Return the seed in a cell; a whole number may be written as 3.0."""
        value = self.value(column, "a whole number as seed")
        if not math.isfinite(value) or value != int(value) or abs(value) > 2**53:
            raise self.wrong(column, "a whole number as seed")
        return int(value)

    def result(self, column: str, metric: str) -> RunResult | None:
        """Return the result, or None if it has none; NaN and infinity mean that the run diverged."""
        for status in STATUSES:
            if self.text("status") == status != "done":
                return RunResult(status=status)
        if not self.text(column):
            return None
        value = self.value(column)
        if not math.isfinite(value):
            return RunResult(status="diverged")
        return RunResult(status="done", test=Score({metric: value}, metric))

    def wrong(self, column: str, what: str) -> UserError:
        """Return the error for a cell that is not `what`."""
        return UserError(f"{self}, column '{column}': expected {what}, got '{self.cells[column][:40]}'")

    def __str__(self) -> str:
        return f"{self.path}, row {self.number}"


def _read(path: Path) -> tuple[list[str], list[_Row]]:
    """Return a table's header and rows."""
    try:
        text = read_text(path, _MAX_BYTES, links=True).removeprefix("\ufeff")
    except MissingFile:
        raise UserError(f"no such table: {path}") from None
    delimiter = max((",", ";", "\t"), key=text.partition("\n")[0].count)
    try:
        found = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise UserError(f"table {path} is not CSV: {error}") from None
    if not found or not any(found[0]):
        raise UserError(f"table {path} has no header; the first row must name the columns")
    header, rows = [cell.strip() for cell in found[0]], []
    for number, cells in enumerate(found[1:], 2):
        row = _Row(path, number, dict(zip(header, cells, strict=False)))
        if any(cell.strip() for cell in cells):
            rows.append(row)
            if len(cells) != len(header):
                raise UserError(f"{row}: {len(cells)} cells, but the header has {len(header)} columns")
    if not rows:
        raise UserError(f"table {path} has no rows below its header")
    return header, rows


def _contest_columns(path: Path, header: Sequence[str], columns: Columns) -> tuple[str, ...]:
    """Return the columns that separate contests; raise UserError for a column that is missing or ambiguous."""
    chosen = (columns.arm, columns.seed, columns.metric)
    if columns.by is None:
        by = tuple(name for name in CONTEST_COLUMNS if name in header and name not in chosen)
    else:
        apart = "numerics" in header and "numerics" not in (*chosen, *columns.by)
        by = (*columns.by, *(("numerics",) if apart else ()))
    names = (*chosen, *by)
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"column '{name}' is given twice; arm, seed, metric and by take one column each")
    for name in names:
        if name not in header:
            raise unknown(f"column of {path}", name, header)
        if header.count(name) > 1:
            raise UserError(f"{path} has {header.count(name)} columns named '{name}'; rename all but one")
    return by


def _manifest(
    path: Path, header: Sequence[str], rows: Sequence[_Row], columns: Columns, measure: Measure
) -> tuple[Manifest, dict[str, RunResult], frozenset[int]]:
    by = _contest_columns(path, header, columns)
    line_name = "bigram" if measure.better == "lower" else "majority class"
    references: dict[str, dict[str, float]] = {}
    entries: list[Entry] = []
    results: dict[str, RunResult] = {}
    seen: dict[tuple[Contest, str, int], int] = {}
    added = set()
    for row in rows:
        label, seed = row.text(columns.arm), row.seed(columns.seed)
        if not label:
            raise UserError(f"{row}, column '{columns.arm}': no arm")
        contest = _contest({name: row.text(name) for name in by})
        if (first := seen.setdefault((contest, label, seed), row.number)) != row.number:
            where = f" in {contest.title}" if contest.title else ""
            raise UserError(
                f"{row}: arm '{label}', seed {seed}{where} is already in row {first}; "
                "remove one of them, or give the columns that distinguish them with --by"
            )
        run_id = digest(f"{path.name}:{row.number}")[:16]
        entries.append(Entry(run_id, label, seed, contest))
        if row.text("added_later") == "1":
            added.add(seed)
        if row.text("untrained"):
            if not math.isfinite(line := row.value("untrained")):
                raise row.wrong("untrained", "a number")
            references[contest.corpus_label] = {line_name: line}
        if (result := row.result(columns.metric, measure.name)) is not None:
            results[run_id] = result
    labels = dict.fromkeys(entry.label for entry in entries)
    manifest = Manifest(
        name=path.stem,
        arms=tuple((label, label) for label in labels),
        baseline=next(iter(labels)),
        primary=None,
        margin=0.0,
        seeds=tuple(sorted({entry.seed for entry in entries})),
        entries=tuple(entries),
        references=references,
    )
    return manifest, results, frozenset(added)


def _contest(values: dict[str, str]) -> Contest:
    known = {name: values.get(name, "") for name in CONTEST_COLUMNS}
    others = [f"{name} {value}" for name, value in values.items() if name not in CONTEST_COLUMNS]
    corpus = ", ".join(filter(None, (known["corpus"], *others)))
    return Contest(corpus, corpus, **{name: known[name] for name in CONTEST_COLUMNS[1:]})
