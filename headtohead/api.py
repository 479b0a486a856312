"""What `import headtohead` offers: studies and everything around a run. The shell adds nothing to it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headtohead.common.errors import UserError
from headtohead.common.files import digest, write_json
from headtohead.common.numbers import parse_duration
from headtohead.common.progress import choose_display, piece_of_work
from headtohead.common.version import VERSION
from headtohead.data.tokenizers import Tokenizer
from headtohead.measure.cost import arm_cost
from headtohead.measure.loss import Score, score_split
from headtohead.mechanisms.base import Mechanism
from headtohead.mechanisms.find import Kind
from headtohead.mechanisms.terms import Composed, Term
from headtohead.model.check import Verification, check_composed
from headtohead.model.decoder import Decoder
from headtohead.model.generation import Sampling, generate
from headtohead.model.layout import parse_layout, skipped_layers
from headtohead.model.sizes import find_size
from headtohead.study import doctor
from headtohead.study.doctor import Finding
from headtohead.study.environment import choose_device
from headtohead.study.execute import Summary, execute
from headtohead.study.lock import frozen_seconds, planned_seeds
from headtohead.study.outline import Outline, read_outline
from headtohead.study.pace import LockedPace
from headtohead.study.perform import Conditions, layers_of
from headtohead.study.plan import plan_study
from headtohead.study.records import size_of
from headtohead.study.resume import forget_failed, reuse_notes, sound_results
from headtohead.study.spec import StudySpec, build_study, read_study
from headtohead.study.store import RunDirectory, Store, find_run
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
    ) -> StudyResult:
        """Do every run that has no result, then judge and report.

        `workers` 0 means one process per core on CPU and one on a GPU; `seconds` stops cleanly after that time.
        """
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
        with piece_of_work("preparing", quiet) as progress:
            pace = LockedPace(store.path, conditions, progress=progress)
            plan = plan_study(self.spec, data_dir=data_dir, progress=progress, pace=pace)
        store.make()
        runs = plan.distinct()
        if retry_failed:
            forget_failed(store, [run.id for run in runs])
        known, notes = sound_results(store, [run.id for run in runs])
        for words in [*notes, *reuse_notes(store, plan, known)]:
            display.note(words)
        added = planned_seeds(store.path, plan, started=bool(known))
        outline = plan.outline()
        record = {
            "outline": outline.as_dict(),
            "added_seeds": sorted(added),
            "settings": _plain(self.values),
            "seconds": frozen_seconds(store.path),
        }
        write_json(store.path / "study.json", record, indent=None)
        count = workers or (os.cpu_count() or 1 if chosen.type == "cpu" else 1)
        summary = execute(store, runs, conditions, display, workers=max(1, count // threads), seconds=limit)
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

    def write(self, quiet: bool = False, only_if_changed: bool = False) -> None:
        """Write verdicts.json and the page; without the chart library the page is skipped, and said to be.

        `only_if_changed` leaves a page that shows these very results as it is.
        """
        rows = [row.as_dict() for row in self.verdicts]
        write_json(self.path / "verdicts.json", rows)
        page = self.path / "report.html"
        stamp = _stamp(self.outline, rows, self.results)
        if only_if_changed and _carries(page, stamp):
            self.report = page
            return
        try:
            from headtohead.report.page import write_report
        except ImportError as error:
            if not quiet:
                print(
                    f"the page was skipped: {error.name} is not installed (pip install altair vl-convert-python jinja2)"
                )
            return
        self.report = write_report(self.path, self.outline, self.verdicts, self.results, self.damage, stamp)

    def sentences(self) -> list[str]:
        """Return each verdict in one sentence."""
        return [sentence(row, self.verdicts) for row in self.verdicts]

    def headlines(self) -> list[str]:
        """Return one sentence per arm, over all contests."""
        return [words for _, words in headlines(self.verdicts)]

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


def open_study(path: str | Path) -> StudyResult:
    """Return a study's verdicts from its directory alone."""
    folder = Path(path)
    if not (folder / "study.json").is_file():
        raise UserError(f"no study in {folder}: study.json is missing")
    outline, added = read_outline(folder / "study.json")
    return _judged(Store(folder), outline, added, {})


def _judged(
    store: Store, outline: Outline, added: frozenset[int], known: dict[str, dict[str, Any]]
) -> StudyResult:
    """Return the verdicts of a study; results that are known already are not read again."""
    damage: dict[str, str] = {}
    others = sorted({entry.run for entry in outline.entries if entry.run not in known})
    results = known | store.results(others, damage)
    verdicts = study_verdicts(outline, results, added)
    return StudyResult(store.path, outline, verdicts, results=results, damage=list(damage.values()))


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

    chosen = choose_device(device)
    if keep_ffn and not skip:
        raise UserError("keep_ffn says what a skipped layer keeps; give skip too (--skip)")
    model, tokenizer = load(run, device=str(chosen), trust_files=trust_files)
    if skip:
        model.skip(skipped_layers(model.arms, skip), keep_ffn)
    with piece_of_work("scoring", quiet) as progress:
        data = tokens_of(corpus, split, tokenizer, data_dir=data_dir, progress=progress)
        shown = lambda share: progress(f"scoring {corpus}", share)  # noqa: E731
        return score_split(model, data, tokenizer.token_bytes(), progress=shown)


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
