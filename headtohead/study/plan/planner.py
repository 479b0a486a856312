"""Plans the runs of a study: prepares datasets, solves sizes and lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from headtohead.common.errors import UserError
from headtohead.common.numbers import exact_count
from headtohead.data.available import check_available
from headtohead.data.shards import prepare
from headtohead.data.tasks.base import OWN_TOKENS
from headtohead.data.tasks.registry import prepare_task
from headtohead.evaluation.corpus_stats import Statistics, corpus_statistics
from headtohead.mechanisms.contract.terms import Composed
from headtohead.mechanisms.contract.user_code import user_errors
from headtohead.mechanisms.families.recurrent import Recurrent
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size
from headtohead.study.config.spec import Arm, StudySpec
from headtohead.study.numerics import NUMERICS
from headtohead.study.plan.branches import grow
from headtohead.study.plan.budgets import (
    cache_amount,
    cache_unit,
    match_cache,
    match_flops,
    match_params,
    match_time,
)
from headtohead.study.plan.dataset import CorpusDataset, Dataset, TaskDataset
from headtohead.study.plan.init_from import Start, check_compatible, find_start
from headtohead.study.plan.plan import LayerTable, Plan, Rates, StepTime, StepTimes
from headtohead.study.probes import needed_data
from headtohead.study.store.manifest import Contest, Entry, Solved, flops_label, trunk_label
from headtohead.study.store.run_spec import DataSource, Parent, RunSpec
from headtohead.training.circuit_rates import assign
from headtohead.training.settings import TrainSettings

Placed = tuple[Contest, RunSpec]
InPopulation = Callable[[Contest, Sequence[RunSpec], LayerTable, Dataset], bool]


@dataclass(frozen=True)
class _Place:
    """What all arms of a contest share."""

    spec: StudySpec
    name: str
    """The corpus or task as given."""
    dataset: Dataset
    corpus: DataSource
    contest: Contest
    context: int


def plan_study(
    spec: StudySpec,
    *,
    data_dir: str | Path | None = None,
    rates: Rates | None = None,
    progress: Callable[[str, float], None] = lambda message, share: None,
    step_times: StepTimes | None = None,
    in_population: InPopulation = lambda *given: False,
) -> Plan:
    """Return the plan of a study, preparing datasets where needed.

    `step_times` returns seconds per step for length rules that hold time equal. `in_population` returns whether the runs
    of a contest are rows of populations.
    """
    check_available(study_data(spec), data_dir)
    planner = _Planner(spec, step_times, rates or {}, _starts(spec), in_population)
    datasets: dict[str, Dataset] = {}
    labels: dict[str, str] = {}
    for name, size, context in product(spec.corpora or spec.tasks, spec.sizes, spec.contexts or (0,)):
        shown = spec.size(size, spec.baseline_arm, context)
        tokenizer = _tokenizer(spec, shown, planner.starts)
        key = f"{name}/{tokenizer}" + (f"/{shown.context}" if spec.tasks else "")
        if key not in datasets:
            datasets[key] = _dataset(spec, name, tokenizer, shown.context, data_dir, progress)
            label = datasets[key].label
            _check_unique(labels.setdefault(label, name), name, label)
        dataset = datasets[key]
        corpus = DataSource(
            name=dataset.name(name),
            label=dataset.label,
            tokenizer=OWN_TOKENS if dataset.tokenizer is None else tokenizer,
            content=dataset.content,
        )
        context_label = str(context) if len(spec.contexts) > 1 else ""
        for shape, length in product(spec.shapes, spec.lengths):
            contest = Contest(name, dataset.label, size, shape, length, context_label, numerics=str(NUMERICS))
            planner.add(_Place(spec, name, dataset, corpus, contest, context))
    runs, trunks = planner.runs, planner.trunks
    return Plan(
        spec,
        _distinct(spec, runs, trunks),
        _entries(runs),
        _entries(trunks),
        planner.layers,
        {dataset.content: dataset for dataset in datasets.values()},
        tuple(planner.solved),
        _statistics(spec, runs[0][1].size.context, datasets, progress),
    )


def study_data(spec: StudySpec) -> list[str]:
    """Return the corpora and tasks that a study and its probes read."""
    return [*spec.corpora, *spec.tasks, *needed_data(spec.probes)]


def _entries(runs: list[Placed]) -> tuple[Entry, ...]:
    return tuple(Entry(run.id, run.label, run.seed, contest) for contest, run in runs)


def _distinct(spec: StudySpec, runs: list[Placed], trunks: list[Placed]) -> dict[str, RunSpec]:
    """Return each run once; contests may share a trunk, which then keeps the checkpoints of all their branches."""
    order = {seed: index for index, seed in enumerate(spec.seeds)}
    steps: dict[str, set[int]] = {}
    for _, trunk in trunks:
        steps.setdefault(trunk.id, set()).update(trunk.branches)
    merged = [dataclasses.replace(trunk, branches=tuple(sorted(steps[trunk.id]))) for _, trunk in trunks]
    ordered = sorted([*merged, *(run for _, run in runs)], key=lambda run: order[run.seed])
    return {run.id: run for run in ordered}


def _starts(spec: StudySpec) -> dict[str, Start]:
    """Return the runs that arms start from, by the arm's label."""
    found = {arm.label: arm.start or spec.start for arm in spec.arms}
    known = {given: find_start(given) for given in set(found.values()) if given}
    return {label: known[given] for label, given in found.items() if given}


def _tokenizer(spec: StudySpec, size: Size, starts: dict[str, Start]) -> str:
    """Return the tokenizer of a contest: the study's, that of the runs it starts from, or the size's default."""
    if starts and not spec.tokenizer:
        return next(iter(starts.values())).tokenizer_name
    return spec.tokenizer_for(size)


def _dataset(
    spec: StudySpec,
    name: str,
    tokenizer: str,
    context: int,
    data_dir: str | Path | None,
    progress: Callable[[str, float], None],
) -> Dataset:
    if not spec.tasks:
        return CorpusDataset(prepare(name, tokenizer, data_dir=data_dir, progress=progress))
    task = prepare_task(name, tokenizer, context, data_dir=data_dir, progress=progress)
    return TaskDataset(task, causal=spec.causal, answer=spec.answer, metric=spec.metric)


def _check_unique(first: str, corpus: str, label: str) -> None:
    """Raise UserError if two corpora have the same label, which would make their verdicts ambiguous."""
    if first != corpus:
        raise UserError(
            f"corpora '{first}' and '{corpus}' would both be called '{label}'; remove one, or rename its file"
        )


def _statistics(
    spec: StudySpec, context: int, datasets: dict[str, Dataset], progress: Callable[[str, float], None]
) -> dict[str, Statistics]:
    """Return the statistics of several corpora, with windows of `context` tokens."""
    if len(spec.corpora) < 2:
        return {}
    found = {}
    for dataset in datasets.values():
        assert isinstance(dataset, CorpusDataset)
        window = round(context * dataset.bytes_per_token)
        found[dataset.label] = corpus_statistics(dataset.corpus, max(16, window), progress)
    return found


class _Planner:
    """Collects the runs of all contests."""

    def __init__(
        self,
        spec: StudySpec,
        step_times: StepTimes | None,
        rates: Rates,
        starts: dict[str, Start],
        in_population: InPopulation,
    ) -> None:
        self.spec, self.step_times, self.rates, self.starts = spec, step_times, rates, starts
        self.in_population = in_population
        self.baseline = spec.arms.index(spec.baseline_arm)
        self.layers: LayerTable = {}
        self.runs: list[Placed] = []
        self.trunks: list[Placed] = []
        self.solved: list[Solved] = []

    def add(self, place: _Place) -> None:
        """Add the runs of a contest (or of its branches) and their trunks, with all seeds."""
        spec, dataset, contest = self.spec, place.dataset, place.contest
        base_size = _with_vocabulary(spec.size(contest.size, spec.baseline_arm, place.context), dataset)
        with _naming(spec.baseline_arm.text if dataset.task else ""), user_errors(spec.baseline_arm.text):
            base = dataset.on_meta(base_size, spec.baseline_arm.layout.layers(base_size.layers))
        found = []
        for arm in spec.arms:
            with user_errors(arm.text):
                found.append(self._shaped(place, arm, base))
        shaped, shape_rows = [run for run, _ in found], [row for _, rows in found for row in rows]
        lengths: list[tuple[Contest, list[RunSpec]]] = []
        # The longest first: it is the length of the study and the primary comparison.
        for tokens in spec.branches[::-1] or (None,):
            here, firsts = contest, shaped
            if tokens is not None:
                here = dataclasses.replace(contest, branch=exact_count(tokens))
                firsts = [_of_length(run, tokens, dataset) for run in shaped]
            self.solved += [dataclasses.replace(row, contest=here) for row in shape_rows]
            if contest.length != "tokens":
                firsts = self._lengthened(firsts, dataset, here)
            lengths.append((here, firsts))
        runs = [
            (here, dataclasses.replace(run, seed=seed))
            for here, firsts in lengths
            for run in firsts
            for seed in spec.seeds
        ]
        stacked = self.in_population(contest, [run for _, run in runs], self.layers, dataset)
        if spec.branches:
            if stacked:
                lengths = [
                    (here, [dataclasses.replace(run, stacked=True) for run in firsts])
                    for here, firsts in lengths
                ]
            self._grow(place, lengths)
        elif stacked:
            self.runs += [(here, dataclasses.replace(run, stacked=True)) for here, run in runs]
        else:
            self.runs += runs

    def _grow(self, place: _Place, lengths: list[tuple[Contest, list[RunSpec]]]) -> None:
        """Add the branches, and a trunk for each arm and seed, from the arms' runs at each token count."""
        runs: list[list[Placed]] = [[] for _ in lengths]
        for same_arm in zip(*(firsts for _, firsts in lengths), strict=True):
            first = same_arm[0]
            with _naming(first.arm):
                training, branches, starts = grow([run.training for run in same_arm], first.size.context)
            marks = tuple(sorted(set(starts)))
            trunk = _with_training(first, training, place.dataset)
            trunk = dataclasses.replace(trunk, label=trunk_label(first.label), branches=marks)
            for seed in self.spec.seeds:
                own = dataclasses.replace(trunk, seed=seed)
                self.trunks.append((place.contest, own))
                for index, run in enumerate(same_arm):
                    branch = _with_training(run, branches[index], place.dataset)
                    parent = Parent(own.id, starts[index])
                    branch = dataclasses.replace(branch, seed=seed, parent=parent)
                    runs[index].append((lengths[index][0], branch))
        self.runs += [placed for branch in runs for placed in branch]

    def _shaped(self, place: _Place, arm: Arm, base: Decoder) -> tuple[RunSpec, list[Solved]]:
        """Return an arm's run of the first seed under the contest's shape rule, before its length is solved."""
        spec, dataset, contest = self.spec, place.dataset, place.contest
        given = _with_vocabulary(spec.size(contest.size, arm, place.context), dataset)
        layers = tuple(arm.layout.layers(given.layers))
        size, solved = given, []
        if contest.shape != "as_is":
            with _naming(arm.text):
                if contest.shape == "params":
                    size = match_params(given, layers, base.parameter_count(), dataset.on_meta)
                else:
                    target = cache_amount(base, spec.cache_at)
                    size, layers = match_cache(given, layers, target, spec.cache_at)
        start = self.starts.get(arm.label)
        with _naming(arm.text if dataset.task else ""):
            model = dataset.on_meta(size, layers)
            dataset.check_arm(size, model)
            if start is not None:
                check_compatible(start, dataset, size, layers, model)
        training = spec.train_settings(arm, size, dataset.bytes_per_token)
        circuits = model.circuits()  # raises if a parameter is in no parameter group
        with _naming(arm.text):
            assign(training.circuit_lr, circuits, size.layers)
        if spec.bytes and arm is spec.baseline_arm and training.tokens != spec.bytes:
            solved.append(_solved_bytes(spec, arm, contest, training, dataset))
        key = (contest.corpus, contest.size, contest.context, contest.shape, arm.label)
        if (tuned := self.rates.get(key)) is not None:
            training = dataclasses.replace(training, lr=tuned)
        parameters, cache = model.parameter_count(), model.cache_bytes_per_token(torch.bfloat16)
        if contest.shape != "as_is" and arm is not spec.baseline_arm:
            if contest.shape == "params":
                held = ("parameters", parameters, base.parameter_count())
            else:
                mine, theirs = (cache_amount(one, spec.cache_at) or 0 for one in (model, base))
                held = (cache_unit(spec.cache_at), mine, theirs)
            what = _solved_shape(given, tuple(arm.layout.layers(given.layers)), size, layers, contest.shape)
            solved.append(Solved(arm.label, contest, f"shape {contest.shape}", *what, *held))
        texts = tuple(composed.text for composed in layers)
        self.layers[texts] = layers
        run = RunSpec(
            arm=arm.text,
            label=arm.label,
            layers=texts,
            corpus=place.corpus,
            size=size,
            training=training,
            seed=spec.seeds[0],
            shape=contest.shape,
            length=contest.length,
            parameters=parameters,
            flops_per_token=dataset.flops(model, training),
            flops_source=model.flops_source(size.context),
            cache_bytes_per_token=cache,
            task=dataset.task,
            start=start.run if start else "",
            start_path=str(start.folder.path.resolve()) if start else "",
            mechanisms=_identities(layers),
            programs=_programs(layers),
        )
        return _with_training(run, training, dataset), solved

    def _lengthened(self, firsts: list[RunSpec], dataset: Dataset, contest: Contest) -> list[RunSpec]:
        """Return the runs with the tokens solved by the contest's length rule."""
        base = firsts[self.baseline]
        timed = contest.length != "flops"
        speeds: list[StepTime] = []
        if timed:
            if self.step_times is None:
                raise UserError(
                    f"length={contest.length} needs seconds per step, which are measured when the study runs"
                )
            path = "plain" if contest.length == "time_plain" else "fused"
            speeds = self.step_times(firsts, self.layers, dataset, path)
            amounts = [speed.seconds / run.training.batch for run, speed in zip(firsts, speeds, strict=True)]
        else:
            # Forward and backward cost three times the forward pass.
            amounts = [3 * run.flops_per_token for run in firsts]
        whole = amounts[self.baseline]
        held = _trained(base.training) * whole
        runs = []
        for index, (run, amount) in enumerate(zip(firsts, amounts, strict=True)):
            training = run.training
            with _naming(run.arm):
                if not timed:
                    training = match_flops(training, run.flops_per_token, base.flops_per_token)
                elif run is not base:
                    share = dataclasses.replace(training, tokens=max(base.training.tokens, training.batch))
                    training = match_time(contest.length, share, amount, whole)
            runs.append(_with_training(run, training, dataset))
            if run is base:
                continue
            held_name, note = (
                ("training seconds", speeds[index].describe(speeds[self.baseline]))
                if timed
                else ("training FLOPs", _sources(run, base))
            )
            numbers = (run.training.tokens, training.tokens, held_name, _trained(training) * amount, held)
            self.solved.append(
                Solved(run.label, contest, f"length {contest.length}", "tokens", *numbers, note)
            )
        return runs


@cache
def _identities(layers: tuple[Composed, ...]) -> tuple[Any, ...]:
    """Return what identifies each layer; hundreds of runs share the same layers."""
    return tuple(composed.as_dict() for composed in layers)


def _programs(layers: tuple[Composed, ...]) -> tuple[tuple[str, str], ...]:
    """Return source and program of the user code in the layers."""
    terms = (term for composed in layers for term in composed.terms if term.program)
    return tuple(sorted({(term.source, term.program) for term in terms}))


def _of_length(run: RunSpec, tokens: int, dataset: Dataset) -> RunSpec:
    with _naming(run.arm):
        return _with_training(run, dataclasses.replace(run.training, tokens=tokens), dataset)


def _with_training(run: RunSpec, training: TrainSettings, dataset: Dataset) -> RunSpec:
    return dataclasses.replace(run, training=training, steps=dataset.steps(run.size, training))


def _solved_shape(
    given: Size, written: tuple[Composed, ...], size: Size, layers: tuple[Composed, ...], shape: str
) -> tuple[str, int, int]:
    """Return the name of the number that the shape rule solved, and its value before and after."""
    if shape == "params":
        return "feed-forward width", given.ffn, size.ffn
    for index, (before, after) in enumerate(zip(written, layers, strict=True)):
        if before != after:
            options = after.base.options
            if not options.state_rows:
                return "kv heads", given.heads, int(options.kv_heads)
            mechanism = Decoder.on_meta(given, written).layers[index].mechanism
            assert isinstance(mechanism, Recurrent)
            return "rows of a state", mechanism.key_dim, int(getattr(options, options.state_rows))
    return "width", given.width, size.width


def _sources(run: RunSpec, base: RunSpec) -> str:
    """Return how the FLOPs of an arm and of the baseline were obtained, if either was counted."""
    rows = ((run.label, run.flops_source), (base.label, base.flops_source))
    return flops_label(dict(rows)) if any(source == "counted" for _, source in rows) else ""


def _trained(training: TrainSettings) -> int:
    """Return the tokens of all whole steps."""
    return training.tokens // training.batch * training.batch


@contextmanager
def _naming(arm: str) -> Iterator[None]:
    """Prefix a UserError with the arm, unless `arm` is empty."""
    try:
        yield
    except UserError as error:
        if not arm:
            raise
        raise UserError(f"arm '{arm}': {error}") from None


def _solved_bytes(
    spec: StudySpec, arm: Arm, contest: Contest, training: TrainSettings, dataset: Dataset
) -> Solved:
    """Return how a length in bytes was converted to tokens; reported only for the baseline, equal for all arms."""
    each = dataset.bytes_per_token
    note = f"{each:.4g} bytes per token on the train split; the same tokens for all arms, compared with the requested bytes"
    numbers = (spec.bytes, training.tokens, "bytes of text", _trained(training) * each, spec.bytes)
    return Solved(arm.label, contest, "bytes", "tokens", *numbers, note)


def _with_vocabulary(size: Size, dataset: Dataset) -> Size:
    return dataclasses.replace(size, vocabulary=dataset.vocabulary)
