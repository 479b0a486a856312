"""What `import headtohead` offers: studies and everything around a run. The shell adds nothing to it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headtohead.common.errors import UserError, unknown
from headtohead.common.files import digest, write_atomic, write_json
from headtohead.common.numbers import parse_duration
from headtohead.common.progress import choose_display, piece_of_work
from headtohead.common.version import VERSION
from headtohead.data.tasks import ALL, Task, chosen_tasks, find_task
from headtohead.data.tokenizers import Tokenizer
from headtohead.integrations.follow import followed
from headtohead.integrations.sinks import Sink, find_sinks
from headtohead.measure.cost import arm_cost
from headtohead.measure.loss import Score, score_split
from headtohead.measure.zeroshot import TaskScore, score_examples
from headtohead.mechanisms.base import Mechanism
from headtohead.mechanisms.find import Kind
from headtohead.mechanisms.terms import Composed, Term
from headtohead.model.check import Verification, check_composed
from headtohead.model.decoder import Decoder
from headtohead.model.generation import Sampling, generate
from headtohead.model.layout import parse_layout, skipped_layers
from headtohead.model.sizes import find_size
from headtohead.study import doctor
from headtohead.study.claims import ClaimResult, judge_claims
from headtohead.study.doctor import Finding
from headtohead.study.environment import choose_device
from headtohead.study.execute import Summary, execute
from headtohead.study.forecast import Forecast, forecast_plan, seen_spread
from headtohead.study.lock import frozen_seconds, planned_seeds
from headtohead.study.outline import Outline, read_outline
from headtohead.study.pace import LockedPace
from headtohead.study.perform import Conditions, layers_of
from headtohead.study.plan import Plan, Rates, plan_study
from headtohead.study.published import find_paper, read_paper
from headtohead.study.records import size_of
from headtohead.study.resume import forget_failed, reuse_notes, sound_results
from headtohead.study.spec import StudySpec, build_study, read_study
from headtohead.study.stability import Stability, study_stability
from headtohead.study.store import RunDirectory, Store, find_run
from headtohead.study.table import Columns, Judged, judge_table, runs_csv
from headtohead.study.tuning import Tuning, tune_study
from headtohead.study.verdict import Verdict, headlines, sentence, study_verdicts
from headtohead.training.checkpoint import read_tensors, tensor_shapes


class Study:
    """Arms x seeds x corpora x sizes x rules; `run` does what is missing and gives the verdicts.

    >>> Study(arms=["standard", "sharing:tie=kv"], tokens="500k").run(out="races/mine").verdicts
    """

    def __init__(self, arms: Sequence[Any] | None = None, **settings: Any) -> None:
        given = [arms] if isinstance(arms, str) else arms
        self.values: dict[str, Any] = dict(settings) | ({} if given is None else {"arms": list(given)})
        self.spec: StudySpec = build_study(self.values)

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> Study:
        """Return the study of a TOML file, with some of its settings changed."""
        values = read_study(Path(path))
        for key, value in changes.items():
            both_tables = isinstance(value, Mapping) and isinstance(values.get(key), Mapping)
            values[key] = {**values[key], **value} if both_tables else value
        return cls(**{"name": Path(path).stem, **values})

    def run(
        self,
        out: str | Path | None = None,
        *,
        device: str = "auto",
        workers: int = 0,
        threads: int = 1,
        data_dir: str | Path | None = None,
        seconds: float | str = math.inf,
        retry_failed: bool = False,
        keep_weights: bool = True,
        save_every: float = 60.0,
        compile: bool = False,
        quiet: bool = False,
        track: str | Sink | Sequence[str | Sink] = (),
    ) -> StudyResult:
        """Do every run that has no result, then judge and report.

        `workers` 0 means one process per core on CPU and one on a GPU; `seconds` stops cleanly after that time.
        `track` names trackers (`tensorboard`, `wandb`), or is one; none of them can make a run fail.
        """
        sinks = find_sinks(track)
        store = Store(Path(out) if out is not None else Path("races") / self.spec.name)
        limit = parse_duration(seconds) if isinstance(seconds, str) else seconds
        chosen = choose_device(device)
        display = choose_display(quiet)
        conditions = Conditions(
            device=str(chosen),
            threads=threads,
            data_dir=str(Path(data_dir).resolve()) if data_dir else os.environ.get("H2H_DATA", ""),
            save_every=save_every,
            keep_weights=keep_weights,
            compile=compile,
        )
        count = _processes(chosen, workers)
        end = time.monotonic() + limit

        def planned(spec: StudySpec, rates: Rates | None = None) -> Plan:
            with piece_of_work("preparing", quiet) as progress:
                pace = LockedPace(store.path, conditions, progress=progress)
                return plan_study(spec, data_dir=data_dir, rates=rates, progress=progress, pace=pace)

        def done(plan: Plan) -> Summary:
            left = max(0.0, end - time.monotonic())
            with followed(display, store, self.spec.name, sinks) as shown:
                return execute(
                    store, plan.distinct(), conditions, shown, workers=max(1, count // threads), seconds=left
                )

        tuning = Tuning()
        if self.spec.tune is not None:
            store.make()
            found = _tuned(self.spec, store, planned, done, display.note)
            if isinstance(found, StudyResult):
                return found
            tuning = found
        plan = planned(self.spec, tuning.rates())
        store.make()
        runs = plan.distinct()
        if retry_failed:
            forget_failed(store, [run.id for run in runs])
        known, notes = sound_results(store, [run.id for run in runs])
        for words in [*notes, *tuning.warnings(), *reuse_notes(store, plan, known)]:
            display.note(words)
        added = planned_seeds(store.path, plan, started=bool(known))
        outline = dataclasses.replace(plan.outline(), tuning=tuning.rows)
        record = {
            "outline": outline.as_dict(),
            "added_seeds": sorted(added),
            "settings": _plain(self.values),
            "seconds": frozen_seconds(store.path),
        }
        write_json(store.path / "study.json", record, indent=None)
        summary = done(plan)
        result = _judged(store, outline, added, known)
        result.summary = summary
        try:
            result.write(quiet=quiet, only_if_changed=not summary.done and not summary.left)
        except OSError as error:  # the runs are what counts; h2h report writes the rest when there is room
            summary.trouble.append(f"cannot write the report to {store.path}: {error.strerror}")
            display.note(summary.trouble[-1])
        return result


@dataclass
class StudyResult:
    """A study's verdicts and where they stand."""

    path: Path
    outline: Outline
    verdicts: list[Verdict]
    summary: Summary = field(default_factory=Summary)
    report: Path | None = None
    """The page, when it was made."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """result.json of every finished run, by its name."""
    damage: list[str] = field(default_factory=list)
    """Files that could not be read, and are left out."""
    added_seeds: frozenset[int] = frozenset()
    """Seeds added after results could be looked at."""

    def write(self, quiet: bool = False, only_if_changed: bool = False) -> None:
        """Write verdicts.json, runs.csv and the page; without the chart library the page is skipped, and said to be.

        `only_if_changed` leaves a page that shows these very results as it is.
        """
        rows = [row.as_dict() for row in self.verdicts]
        write_json(self.path / "verdicts.json", rows)
        page = self.path / "report.html"
        stamp = _stamp(self.outline, rows, self.results)
        if only_if_changed and _carries(page, stamp) and (self.path / "runs.csv").is_file():
            self.report = page
            return
        table = runs_csv(Store(self.path), self.outline, self.results, self.added_seeds)
        write_atomic(self.path / "runs.csv", table)
        try:
            from headtohead.report.page import write_report
        except ImportError as error:
            _say_skipped(error, quiet)
            return
        self.report = write_report(self.path, self.outline, self.verdicts, self.results, self.damage, stamp)

    def write_charts(self, quiet: bool = False) -> list[Path]:
        """Write every chart as SVG and PNG into the study's folder `charts`; return the files."""
        try:
            from headtohead.report.pictures import write_charts
        except ImportError as error:
            raise UserError(f"charts need {error.name}: pip install altair vl-convert-python") from None
        with piece_of_work("drawing", quiet) as progress:
            return write_charts(self.path, self.outline, self.verdicts, self.results, progress)

    def sentences(self) -> list[str]:
        """Return each verdict in one sentence."""
        return [sentence(row, self.verdicts) for row in self.verdicts]

    def headlines(self) -> list[str]:
        """Return one sentence per arm, over all contests."""
        return [words for _, words in headlines(self.verdicts)]

    def stability(self) -> list[Stability]:
        """Return how often each arm diverged and leapt, and how soon it learned, from the curves its runs left."""
        return study_stability(Store(self.path), self.outline, self.results)

    def to_pandas(self) -> Any:
        """Return the verdicts as a pandas frame."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas needs pandas: pip install pandas") from None
        return pandas.DataFrame([row.as_dict() for row in self.verdicts])

    def _repr_html_(self) -> str:
        from headtohead.report.templates import verdict_table

        return verdict_table(self.outline, self.verdicts)


def _tuned(
    spec: StudySpec,
    store: Store,
    planned: Callable[[StudySpec], Plan],
    done: Callable[[Plan], Summary],
    say: Callable[[str], None],
) -> Tuning | StudyResult:
    """Return the tuned rates, or, where tuning was stopped, a result without verdicts that says so."""
    stopped: list[tuple[Plan, Summary]] = []

    def run(plan: Plan) -> bool:
        summary = done(plan)
        if summary.left:
            stopped.append((plan, summary))
        return not summary.left

    found = tune_study(spec, store, planned, run, say)
    if found is not None:
        return found
    plan, summary = stopped[-1]
    return StudyResult(store.path, plan.outline(), [], summary)


def _say_skipped(error: ImportError, quiet: bool) -> None:
    if not quiet:
        print(
            f"the page was skipped: {error.name} is not installed (pip install altair vl-convert-python jinja2)"
        )


@dataclass
class TableResult(StudyResult):
    """The verdicts of a table of runs trained elsewhere."""

    judged: Judged | None = None
    source: str = ""
    """The table's file name."""

    def write(self, quiet: bool = False, only_if_changed: bool = False) -> None:
        """Write verdicts.json and the page into `path`."""
        assert self.judged is not None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "verdicts.json", [row.as_dict() for row in self.verdicts])
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror}") from None
        try:
            from headtohead.report.judged import write_judged
        except ImportError as error:
            _say_skipped(error, quiet)
            return
        self.report = write_judged(self.path, self.judged, self.source)


def judge(
    table: str | Path,
    *,
    arm: str,
    seed: str,
    metric: str,
    by: Sequence[str] | None = None,
    baseline: str = "",
    primary: str = "",
    margin: float | None = None,
    better: str = "lower",
    out: str | Path | None = None,
) -> TableResult:
    """Return the verdicts of runs trained elsewhere: a CSV file with a row per run, and the names of its columns.

    `by` names the columns that set contests apart; `out` takes verdicts.json and the page.
    """
    if better not in ("lower", "higher"):
        raise unknown("value for better", str(better), ("lower", "higher"))
    if margin is not None and not 0 <= margin < math.inf:
        raise UserError(f"margin takes a number, 0 or more, got {margin!r}")
    columns = Columns(arm, seed, metric, None if by is None else tuple(by))
    judged = judge_table(
        Path(table), columns, baseline=baseline, primary=primary, margin=margin, better=better
    )
    place = Path(out) if out is not None else Path(table).parent
    result = TableResult(
        place,
        judged.outline,
        judged.verdicts,
        results=judged.results,
        judged=judged,
        source=Path(table).name,
    )
    if out is not None:
        result.write()
    return result


def forecast(
    study: Study,
    out: str | Path | None = None,
    *,
    spread: float | None = None,
    device: str = "auto",
    workers: int = 0,
    threads: int = 1,
    data_dir: str | Path | None = None,
    keep_weights: bool = True,
    quiet: bool = False,
) -> Forecast:
    """Return what a study will take and what it could find; nothing of it is run but a few steps per arm.

    `out` is a directory with finished runs, of this study or another: their results give the spread over seeds, their
    speed saves the measuring, and those of this study are not counted again. `spread` is the standard deviation over
    seeds of the paired difference, in bits per byte.
    """
    if spread is not None and not 0 < spread < math.inf:
        raise UserError(f"spread takes a number of bits per byte above 0, got {spread!r}")
    chosen = choose_device(device)
    if chosen.type == "cpu":
        torch.set_num_threads(threads)
    folder = Path(out) if out is not None else None
    source = "given" if spread is not None else ""
    if folder is not None and (folder / "study.json").is_file() and spread is None:
        spread = seen_spread(open_study(folder).verdicts)
        source = f"seen in {folder}" if spread is not None else ""
    with piece_of_work("forecasting", quiet) as progress:
        plan = plan_study(study.spec, data_dir=data_dir, progress=progress)
        return forecast_plan(
            plan,
            store=Store(folder) if folder is not None else None,
            device=chosen,
            workers=max(1, _processes(chosen, workers) // threads),
            spread=spread,
            spread_source=source,
            keep_weights=keep_weights,
            progress=progress,
        )


def _processes(device: torch.device, workers: int) -> int:
    """Return how many processes train at once: as many as asked for, else one per core, and one on a GPU."""
    return workers or (os.cpu_count() or 1 if device.type == "cpu" else 1)


def open_study(path: str | Path) -> StudyResult:
    """Return a study's verdicts from its directory alone."""
    folder = Path(path)
    if not (folder / "study.json").is_file():
        raise UserError(f"no study in {folder}: study.json is missing")
    outline, added = read_outline(folder / "study.json")
    return _judged(Store(folder), outline, added, {})


def watch_study(path: str | Path, *, port: int = 8642, quiet: bool = False) -> None:
    """Serve a page on 127.0.0.1 that follows a running study, until Ctrl-C."""
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} is out of range; 0 to 65535 are allowed, and 0 takes a free one")
    folder = Path(path)
    if not (folder / "study.json").is_file():
        raise UserError(f"no study in {folder}: study.json is missing")
    try:
        from headtohead.report.watch import serve
    except ImportError as error:
        raise UserError(f"watching needs {error.name}: pip install altair vl-convert-python jinja2") from None
    serve(folder, port, (lambda words: None) if quiet else (lambda words: print(words, flush=True)))


@dataclass
class Reproduction:
    """What the study of a paper says of its claims, and where it stands."""

    study: StudyResult
    scale: str
    claims: list[ClaimResult]
    path: Path
    """claims.json."""


def reproduce(
    paper: str, *, scale: str = "smoke", out: str | Path | None = None, **conditions: Any
) -> Reproduction:
    """Run the study of a paper at a scale (smoke, small, paper) and say of each claim what the data bear.

    `paper` is a name in `studies/` or a TOML file; the other arguments are those of `Study.run`. Run again, it does
    only what is missing. What it says is written to `claims.json` in `out`.
    """
    known = read_paper(find_paper(paper))
    study = Study(**known.settings(scale))
    result = study.run(out if out is not None else Path("races") / f"{known.name}-{scale}", **conditions)
    claims = judge_claims(known, scale, study.spec, result.outline, result.verdicts)
    path = result.path / "claims.json"
    write_json(path, [claim.as_dict() for claim in claims])
    return Reproduction(result, scale, claims, path)


def _judged(
    store: Store, outline: Outline, added: frozenset[int], known: dict[str, dict[str, Any]]
) -> StudyResult:
    """Return the verdicts of a study; results that are known already are not read again."""
    damage: dict[str, str] = {}
    others = sorted({entry.run for entry in outline.entries if entry.run not in known})
    results = known | store.results(others, damage)
    verdicts = study_verdicts(outline, results, added)
    return StudyResult(
        store.path, outline, verdicts, results=results, damage=list(damage.values()), added_seeds=added
    )


def _stamp(outline: Outline, rows: list[dict[str, Any]], results: dict[str, dict[str, Any]]) -> str:
    """Return what tells one page's content from another's."""
    seals = sorted((run, str(result.get("checksum"))) for run, result in results.items())
    return digest(json.dumps([VERSION, outline.as_dict(), rows, seals], sort_keys=True))[:32]


def _carries(page: Path, stamp: str) -> bool:
    try:
        with open(page, encoding="utf-8") as stream:
            return stamp in stream.read(1000)
    except (OSError, UnicodeDecodeError):
        return False


def examine_study(path: str | Path, *, mend: bool = False, quiet: bool = False) -> list[Finding]:
    """Return what is damaged in a study's directory; with `mend`, what is safe to mend has been mended."""
    with piece_of_work("examining", quiet) as progress:
        findings = doctor.examine(Path(path), progress)
    if mend:
        doctor.mend(findings)
    return findings


def load(run: str | Path, *, device: str = "cpu", trust_files: bool = False) -> tuple[Decoder, Tokenizer]:
    """Return the trained model of a run, and its tokenizer.

    A run of a user's own mechanism file executes that file: `trust_files` says that it may.
    """
    folder = find_run(run)
    record = folder.spec()
    _refuse_unfinished(folder)
    folder.refuse_changed_weights()
    size = size_of(record)
    shapes = tensor_shapes(folder.weights)
    if size.layers > len(shapes):
        raise UserError(f"{folder.weights} does not fit the run's model: it has {len(shapes)} tensors")
    layers = _trusted_layers(record, trust_files)
    # The outline takes no memory: only a model that the file can fill is built.
    wanted = {
        name: tuple(tensor.shape) for name, tensor in Decoder.outline(size, layers).state_dict().items()
    }
    for name in sorted(wanted.keys() ^ shapes.keys()) or sorted(wanted):
        if wanted.get(name) != shapes.get(name):
            found, meant = (str(table.get(name, "nothing")) for table in (shapes, wanted))
            raise UserError(
                f"{folder.weights} does not fit the run's model: {name} is {found} and should be {meant}"
            )
    model = Decoder(size, layers, seed=None)
    model.load_state_dict(read_tensors(folder.weights))
    return model.to(choose_device(device)).eval(), folder.tokenizer()


def evaluate(
    run: str | Path,
    corpus: str,
    *,
    split: str = "test",
    device: str = "auto",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
    skip: str = "",
    keep_ffn: bool = False,
) -> Score:
    """Return a trained run's score on a split of any corpus, under the run's own tokenizer.

    `skip` leaves out blocks of the trained model: `variant` (every layer that is not standard), `standard`, or layers
    counted from 1 such as `2,4-6`; with `keep_ffn` their attention part alone.
    """
    from headtohead.data.foreign import tokens_of

    model, tokenizer = _load_skipping(run, device, trust_files, skip, keep_ffn)
    with piece_of_work("scoring", quiet) as progress:
        data = tokens_of(corpus, split, tokenizer, data_dir=data_dir, progress=progress)
        shown = lambda share: progress(f"scoring {corpus}", share)  # noqa: E731
        return score_split(model, data, tokenizer.token_bytes(), progress=shown)


def score_task(
    run: str | Path,
    task: str,
    *,
    limit: int = 0,
    device: str = "auto",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
) -> TaskScore:
    """Return a trained run's score on one task, without training; `score_tasks` says what the settings mean."""
    if task == ALL:
        raise UserError("task 'all' means every task; score_tasks gives a score for each")
    return score_tasks(
        run, [task], limit=limit, device=device, data_dir=data_dir, trust_files=trust_files, quiet=quiet
    )[0]


def score_tasks(
    run: str | Path,
    tasks: str | Sequence[str] = ALL,
    *,
    limit: int = 0,
    device: str = "auto",
    data_dir: str | Path | None = None,
    trust_files: bool = False,
    quiet: bool = False,
    skip: str = "",
    keep_ffn: bool = False,
) -> list[TaskScore]:
    """Return a trained run's scores on tasks, without training; `all` means every task.

    `limit` takes so many examples of each, spread evenly over its file; `skip` and `keep_ffn` are those of `evaluate`.
    """
    # Every file is read before anything is scored: a missing set shows at once.
    found = [find_task(name, data_dir).part(limit) for name in chosen_tasks(tasks)]
    model, tokenizer = _load_skipping(run, device, trust_files, skip, keep_ffn)
    total = sum(len(task.examples) for task in found)
    scores: list[TaskScore] = []
    with piece_of_work("scoring", quiet) as progress:
        for task in found:
            before = sum(score.n for score in scores)

            def shown(share: float, task: Task = task, before: int = before) -> None:
                progress(f"scoring {task.name}", (before + share * len(task.examples)) / total)

            scores.append(score_examples(model, task, tokenizer, progress=shown))
    return scores


def _load_skipping(
    run: str | Path, device: str, trust_files: bool, skip: str, keep_ffn: bool
) -> tuple[Decoder, Tokenizer]:
    """Return a run's model without the blocks that are to be left out, and its tokenizer."""
    chosen = choose_device(device)
    if keep_ffn and not skip:
        raise UserError("keep_ffn says what a skipped layer keeps; give skip too (--skip)")
    model, tokenizer = load(run, device=str(chosen), trust_files=trust_files)
    if skip:
        model.skip(skipped_layers(model.arms, skip), keep_ffn)
    return model, tokenizer


def generate_text(
    run: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    sampling: Sampling | None = None,
    device: str = "auto",
    trust_files: bool = False,
) -> Iterator[str]:
    """Yield the text that a run's model writes after a prompt, piece by piece."""
    chosen = choose_device(device)
    model, tokenizer = load(run, device=str(chosen), trust_files=trust_files)
    start = torch.tensor([tokenizer.encode(prompt.encode("utf-8")).astype("int64").tolist()], device=chosen)
    written: list[int] = []
    shown = ""
    for token in generate(model, start, tokens, sampling or Sampling()):
        written.append(int(token))
        text = tokenizer.decode(written)
        # A character of several bytes shows once it is whole.
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def check(arm: str | type[Mechanism], *, compile: bool = False) -> Verification:
    """Return what the conformance suite says of a mechanism, at every setting its options list as examples."""
    composed = parse_layout(arm).pattern[0]
    return check_composed(check_settings(composed), compile)


def check_settings(composed: Composed) -> list[Composed]:
    """Return the settings to check: the given options where some were given, else every example."""
    base = composed.terms[0]
    given = base.options != _default(base.kind)
    if given or len(composed.terms) > 1 or not hasattr(base.kind.Options, "examples"):
        return [composed]
    return [
        Composed((Term(base.kind, options, base.path, base.source),))
        for options in base.kind.Options.examples()
    ]


def cost(
    arm: str | type[Mechanism], *, size: str = "nano", context: int = 0, batch: int = 1
) -> dict[str, Any]:
    """Return parameters, FLOPs per token and cache bytes per token of an arm at a size.

    `batch` is how many sequences share what a batch computes once (a companion's pass).
    """
    if batch < 1:
        raise UserError(f"batch={batch} is too small; at least 1 is allowed")
    shape = find_size(size)
    layout = parse_layout(arm)
    facts = arm_cost(shape, layout.layers(shape.layers), context, batch=batch)
    return {"arm": layout.text, "label": layout.label, "size": size, "dims": shape.dims} | facts


def _default(kind: Kind) -> Any:
    try:
        return kind.Options()
    except TypeError:
        return None


def _refuse_unfinished(folder: RunDirectory) -> None:
    result = folder.result()
    if result is None:
        raise UserError(f"run {folder.id} is not finished ({folder.state()})")
    if result["status"] != "done" or not folder.weights.is_file():
        raise UserError(f"run {folder.id} has no trained weights ({result['status']})")


def _trusted_layers(record: dict[str, Any], trust_files: bool) -> list[Composed]:
    """Return the run's layers; a file named in a run's record is code, and runs only when the user says so."""
    files = sorted({text for text in record["layers"] if ".py:" in text})
    if files and not trust_files:
        raise UserError(f"this run executes {files[0]}; say so with trust_files=True (--trust-files)")
    layers = layers_of(record)
    for composed, known in zip(layers, record["identity"]["layers"], strict=True):
        for now, then in zip(composed.as_dict(), known, strict=True):
            if now.get("source") != then.get("source"):
                raise UserError(
                    f"{composed.text} has changed since this run; its weights belong to the file as it was"
                )
    return layers


def _plain(value: Any) -> Any:
    """Return settings JSON-ready; a class handed over as an arm is named."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return (
        value
        if isinstance(value, str | int | float | bool | None)
        else getattr(value, "__name__", str(value))
    )
