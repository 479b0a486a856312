"""Plans the runs of a study: prepares datasets, solves sizes and lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch

from headtohead.common.errors import UserError
from headtohead.common.numbers import exact_count
from headtohead.data.shards import prepare
from headtohead.data.tasks.base import OWN_TOKENS
from headtohead.data.tasks.registry import prepare_task
from headtohead.evaluation.corpus_stats import Statistics, corpus_statistics
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size
from headtohead.study.config.spec import Arm, StudySpec
from headtohead.study.numerics import NUMERICS
from headtohead.study.plan.branches import Parent, grow
from headtohead.study.plan.budgets import match_cache, match_flops, match_params, match_time
from headtohead.study.plan.dataset import CorpusDataset, Dataset, TaskDataset
from headtohead.study.plan.init_from import Start, check_compatible, find_start
from headtohead.study.plan.run_spec import Plan, Rates, Run, StepTime, StepTimes
from headtohead.study.probes import check_probes_ready
from headtohead.study.store.manifest import Contest, Solved, flops_label
from headtohead.training.circuit_rates import assign
from headtohead.training.settings import TrainSettings


def plan_study(
    spec: StudySpec,
    *,
    data_dir: str | Path | None = None,
    rates: Rates | None = None,
    progress: Callable[[str, float], None] = lambda message, share: None,
    step_times: StepTimes | None = None,
    in_population: Callable[[Sequence[Run]], bool] = lambda runs: False,
) -> Plan:
    """Return the plan of a study, preparing datasets where needed.

    `step_times` returns seconds per step for length rules that hold time equal. `in_population` returns whether the runs are
    rows of populations, for all runs of a study or for none.
    """
    check_probes_ready(spec.probes, data_dir)
    datasets: dict[str, Dataset] = {}
    starts = _starts(spec)
    runs: list[Run] = []
    trunks: list[Run] = []
    solved: list[Solved] = []
    labels: dict[str, str] = {}
    for name in spec.corpora or spec.tasks:
        for size in spec.sizes:
            for context in spec.contexts or (0,):
                shown = spec.size(size, spec.baseline_arm, context)
                tokenizer = _tokenizer(spec, shown, starts)
                key = f"{name}/{tokenizer}" + (f"/{shown.context}" if spec.tasks else "")
                if key not in datasets:
                    datasets[key] = _dataset(spec, name, tokenizer, shown.context, data_dir, progress)
                    label = datasets[key].label
                    _check_unique(labels.setdefault(label, name), name, label)
                context_label = str(context) if len(spec.contexts) > 1 else ""
                for shape, length in product(spec.shapes, spec.lengths):
                    contest = Contest(
                        name, datasets[key].label, size, shape, length, context_label, numerics=str(NUMERICS)
                    )
                    found = _contest_runs(
                        spec,
                        name,
                        datasets[key],
                        tokenizer,
                        contest,
                        context,
                        step_times,
                        rates or {},
                        starts,
                    )
                    runs += found[0]
                    trunks += found[1]
                    solved += found[2]
    if in_population(runs):
        runs = [dataclasses.replace(run, stacked=True) for run in runs]
    statistics = _statistics(spec, runs, datasets, progress)
    return Plan(spec, tuple(runs), datasets, tuple(solved), tuple(trunks), statistics)


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
    spec: StudySpec, runs: list[Run], datasets: dict[str, Dataset], progress: Callable[[str, float], None]
) -> dict[str, Statistics]:
    """Return the statistics of several corpora, with the window length of the first run."""
    if len(spec.corpora) < 2:
        return {}
    found = {}
    for dataset in datasets.values():
        assert isinstance(dataset, CorpusDataset)
        window = round(runs[0].size.context * dataset.bytes_per_token)
        found[dataset.label] = corpus_statistics(dataset.corpus, max(16, window), progress)
    return found


def _contest_runs(
    spec: StudySpec,
    name: str,
    dataset: Dataset,
    tokenizer: str,
    contest: Contest,
    context: int,
    step_times: StepTimes | None,
    rates: Rates,
    starts: dict[str, Start],
) -> tuple[list[Run], list[Run], list[Solved]]:
    """Return the runs of a contest (or of its branches), the trunks, and the solved numbers."""
    facts = {
        "name": dataset.name(name),
        "label": dataset.label,
        "tokenizer": OWN_TOKENS if dataset.tokenizer is None else tokenizer,
        "content": dataset.content,
    }
    base_size = _with_vocabulary(spec.size(contest.size, spec.baseline_arm, context), dataset)
    with _naming(spec.baseline_arm if dataset.task else None):
        base = dataset.on_meta(base_size, spec.baseline_arm.layout.layers(base_size.layers))
    found = [
        _shaped(spec, arm, base, dataset, contest, context, facts, rates, starts.get(arm.label))
        for arm in spec.arms
    ]
    shaped, shape_rows = [run for run, _ in found], [row for _, rows in found for row in rows]
    solved: list[Solved] = []
    lengths: list[list[Run]] = []
    # The longest first: it is the length of the study and the primary comparison.
    for tokens in spec.branches[::-1] or (None,):
        here, firsts = contest, shaped
        if tokens is not None:
            here = dataclasses.replace(contest, branch=exact_count(tokens))
            firsts = [_of_length(run, here, tokens) for run in shaped]
        solved += [dataclasses.replace(row, contest=here) for row in shape_rows]
        if contest.length != "tokens":
            firsts, rows = _lengthened(spec, firsts, dataset, here, step_times)
            solved += rows
        lengths.append(firsts)
    if not spec.branches:
        return [dataclasses.replace(run, seed=seed) for run in lengths[0] for seed in spec.seeds], [], solved
    runs, trunks = _grown(lengths, contest, spec.seeds)
    return runs, trunks, solved


def _of_length(run: Run, contest: Contest, tokens: int) -> Run:
    return dataclasses.replace(
        run, contest=contest, training=dataclasses.replace(run.training, tokens=tokens)
    )


def _grown(lengths: list[list[Run]], contest: Contest, seeds: tuple[int, ...]) -> tuple[list[Run], list[Run]]:
    """Return the branches, and a trunk for each arm and seed. `lengths`: the arms' runs at each token count."""
    runs: list[list[Run]] = [[] for _ in lengths]
    trunks = []
    for same_arm in zip(*lengths, strict=True):
        first = same_arm[0]
        with _naming(first.arm):
            training, branches, starts = grow([run.training for run in same_arm], first.size.context)
        arm = dataclasses.replace(first.arm, label=f"{first.arm.label}, trunk")
        marks = tuple(sorted(set(starts)))
        for seed in seeds:
            trunk = dataclasses.replace(
                first, arm=arm, contest=contest, training=training, seed=seed, branches=marks
            )
            trunks.append(trunk)
            for index, run in enumerate(same_arm):
                parent = Parent(trunk.id, starts[index])
                runs[index].append(
                    dataclasses.replace(run, training=branches[index], seed=seed, parent=parent)
                )
    return [run for branch in runs for run in branch], trunks


def _shaped(
    spec: StudySpec,
    arm: Arm,
    base: Decoder,
    dataset: Dataset,
    contest: Contest,
    context: int,
    facts: dict[str, str],
    rates: Rates,
    start: Start | None,
) -> tuple[Run, list[Solved]]:
    """Return an arm's run of the first seed under the contest's shape rule, before its length is solved."""
    given = _with_vocabulary(spec.size(contest.size, arm, context), dataset)
    layers = tuple(arm.layout.layers(given.layers))
    size, solved = given, []
    if contest.shape != "as_is":
        with _naming(arm):
            if contest.shape == "params":
                size = match_params(given, layers, base.parameter_count(), dataset.on_meta)
            else:
                size, layers = match_cache(given, layers, base.cache_bytes_per_token(torch.bfloat16))
    with _naming(arm if dataset.task else None):
        model = dataset.on_meta(size, layers)
        dataset.check_arm(size, model)
        if start is not None:
            check_compatible(start, dataset, size, layers, model)
    training = spec.train_settings(arm, size, dataset.bytes_per_token)
    circuits = model.circuits()  # raises if a parameter is in no parameter group
    with _naming(arm):
        assign(training.circuit_lr, circuits, size.layers)
    if spec.bytes and arm is spec.baseline_arm and training.tokens != spec.bytes:
        solved.append(_solved_bytes(spec, arm, contest, training, dataset))
    key = (contest.corpus, contest.size, contest.context, contest.shape, arm.label)
    if (tuned := rates.get(key)) is not None:
        training = dataclasses.replace(training, lr=tuned)
    dataset.steps(size, training)
    costs = (
        model.parameter_count(),
        dataset.flops(model, training),
        model.cache_bytes_per_token(torch.bfloat16),
    )
    if contest.shape != "as_is" and arm is not spec.baseline_arm:
        held = (
            ("parameters", model.parameter_count(), base.parameter_count())
            if contest.shape == "params"
            else ("cache bytes per token", costs[2] or 0, base.cache_bytes_per_token(torch.bfloat16) or 0)
        )
        what = _solved_shape(given, tuple(arm.layout.layers(given.layers)), size, layers, contest.shape)
        solved.append(Solved(arm.label, contest, f"shape {contest.shape}", *what, *held))
    run = Run(
        arm,
        layers,
        contest,
        size,
        training,
        spec.seeds[0],
        facts,
        *costs,
        dataset=dataset,
        start=start,
        flops_source=model.flops_source(size.context),
    )
    return run, solved


def _solved_shape(
    given: Size, written: tuple[Composed, ...], size: Size, layers: tuple[Composed, ...], shape: str
) -> tuple[str, int, int]:
    """Return the name of the number that the shape rule solved, and its value before and after."""
    if shape == "params":
        return "feed-forward width", given.ffn, size.ffn
    for before, after in zip(written, layers, strict=True):
        if before != after:
            return "kv heads", given.heads, int(after.base.options.kv_heads)
    return "width", given.width, size.width


def _lengthened(
    spec: StudySpec, firsts: list[Run], dataset: Dataset, contest: Contest, step_times: StepTimes | None
) -> tuple[list[Run], list[Solved]]:
    """Return the runs with the tokens solved by the contest's length rule."""
    base = next(run for run in firsts if run.arm is spec.baseline_arm)
    timed = contest.length != "flops"
    speeds: list[StepTime] = []
    if timed:
        if step_times is None:
            raise UserError(
                f"length={contest.length} needs seconds per step, which are measured when the study runs"
            )
        speeds = step_times(firsts, dataset, "plain" if contest.length == "time_plain" else "fused")
        amounts = [speed.seconds / run.training.batch for run, speed in zip(firsts, speeds, strict=True)]
    else:
        # Forward and backward cost three times the forward pass.
        amounts = [3 * run.flops for run in firsts]
    whole = amounts[firsts.index(base)]
    held = _trained(base.training) * whole
    runs, solved = [], []
    for index, (run, amount) in enumerate(zip(firsts, amounts, strict=True)):
        training = run.training
        with _naming(run.arm):
            if not timed:
                training = match_flops(training, run.flops, base.flops)
            elif run is not base:
                share = dataclasses.replace(training, tokens=max(base.training.tokens, training.batch))
                training = match_time(contest.length, share, amount, whole)
        runs.append(dataclasses.replace(run, training=training))
        if run is base:
            continue
        held_name, note = (
            ("training seconds", speeds[index].describe(speeds[firsts.index(base)]))
            if timed
            else ("training FLOPs", _sources(run, base))
        )
        solved.append(
            Solved(
                run.arm.label,
                contest,
                f"length {contest.length}",
                "tokens",
                run.training.tokens,
                training.tokens,
                held_name,
                _trained(training) * amount,
                held,
                note,
            )
        )
    return runs, solved


def _sources(run: Run, base: Run) -> str:
    """Return how the FLOPs of an arm and of the baseline were obtained, if either was counted."""
    rows = ((run.arm.label, run.flops_source), (base.arm.label, base.flops_source))
    return flops_label(dict(rows)) if any(source == "counted" for _, source in rows) else ""


def _trained(training: TrainSettings) -> int:
    """Return the tokens of all whole steps."""
    return training.tokens // training.batch * training.batch


@contextmanager
def _naming(arm: Arm | None) -> Iterator[None]:
    """Prefix a UserError with the arm, unless `arm` is None."""
    try:
        yield
    except UserError as error:
        if arm is None:
            raise
        raise UserError(f"arm '{arm.text}': {error}") from None


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
