"""From a study to its runs: sizes matched, corpora prepared, every number resolved, each run hashed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json, digest
from headtohead.data.shards import Prepared, prepare
from headtohead.measure.references import reference_lines
from headtohead.mechanisms.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size
from headtohead.study.matching import match_flops, match_params
from headtohead.study.numerics import NUMERICS
from headtohead.study.outline import Contest, Entry, Outline
from headtohead.study.spec import Arm, StudySpec
from headtohead.training.settings import TrainSettings

# Hundreds of runs share a size, a layout and their training: each is written out once.


@cache
def _plain_size(size: Size) -> dict[str, Any]:
    return size.as_dict()


@cache
def _plain_training(training: TrainSettings) -> dict[str, Any]:
    return training.as_dict()


@cache
def _plain_layers(layers: tuple[Composed, ...]) -> list[Any]:
    return [composed.as_dict() for composed in layers]


@dataclass(frozen=True)
class Run:
    """One arm, seed, corpus, size, shape rule and length rule, every number resolved."""

    arm: Arm
    layers: tuple[Composed, ...]
    contest: Contest
    size: Size
    training: TrainSettings
    seed: int
    corpus: dict[str, str]
    parameters: int
    flops: float
    """Forward FLOPs per token, keys seen counted; what a batch shares is divided by its sequences."""
    cache: int | None
    """Cache bytes per token in bf16, or None where a layer keeps no cache."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that can change the result, and nothing that cannot.

        A companion is covered: its tokens by corpus, size and options, its noise by the seed.
        """
        return {
            "numerics": NUMERICS,
            "layers": _plain_layers(self.layers),
            "size": _plain_size(self.size),
            "corpus": self.corpus["content"],
            "training": _plain_training(self.training),
            "seed": self.seed,
            "stacked": False,
        }

    @cached_property
    def id(self) -> str:
        """The run's name: the hash of its identity."""
        return digest(canonical_json(self.identity))[:16]

    def record(self) -> dict[str, Any]:
        """Return what spec.json holds: the identity, and what is needed to build the run and to show it."""
        return {
            "id": self.id,
            "arm": self.arm.text,
            "label": self.arm.label,
            "layers": [composed.text for composed in self.layers],
            "corpus": self.corpus,
            "size": {"name": self.size.name} | _plain_size(self.size),
            "training": _plain_training(self.training),
            "seed": self.seed,
            "shape": self.contest.shape,
            "length": self.contest.length,
            "parameters": self.parameters,
            "flops_per_token": self.flops,
            "cache_bytes_per_token": self.cache,
            "identity": self.identity,
        }


@dataclass(frozen=True)
class Plan:
    """All runs of a study, by contest."""

    spec: StudySpec
    runs: tuple[Run, ...]
    corpora: dict[str, Prepared]

    def outline(self) -> Outline:
        """Return the plan without models and data: what verdicts and reports need."""
        primary = self.spec.primary_arm
        return Outline(
            name=self.spec.name,
            arms=tuple((arm.text, arm.label) for arm in self.spec.arms),
            baseline=self.spec.baseline_arm.label,
            primary=primary.label if primary else None,
            margin=self.spec.margin,
            seeds=self.spec.seeds,
            entries=tuple(Entry(run.id, run.arm.label, run.seed, run.contest) for run in self.runs),
            references={corpus.label: reference_lines(corpus) for corpus in self.corpora.values()},
        )

    def distinct(self) -> list[Run]:
        """Return each run once, seed by seed, so that a study stopped early is balanced."""
        place = {seed: index for index, seed in enumerate(self.spec.seeds)}
        ordered = sorted(self.runs, key=lambda run: place[run.seed])
        return list({run.id: run for run in ordered}.values())


Rates = dict[tuple[str, str, str, str], float]
"""Tuned learning rates by corpus, size, shape rule and arm's label."""


def plan_study(
    spec: StudySpec,
    *,
    data_dir: str | Path | None = None,
    rates: Rates | None = None,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> Plan:
    """Return the plan of a study; corpora that are not prepared yet are prepared on the way."""
    corpora: dict[str, Prepared] = {}
    runs: list[Run] = []
    for corpus in spec.corpora:
        for size in spec.sizes:
            tokenizer = spec.tokenizer_for(spec.size(size, spec.baseline_arm))
            key = f"{corpus}/{tokenizer}"
            if key not in corpora:
                corpora[key] = prepare(corpus, tokenizer, data_dir=data_dir, progress=progress)
            for shape in spec.shapes:
                for length in spec.lengths:
                    runs += _contest_runs(
                        spec, corpus, corpora[key], tokenizer, size, shape, length, rates or {}
                    )
    return Plan(spec, tuple(runs), corpora)


def _contest_runs(
    spec: StudySpec,
    corpus: str,
    prepared: Prepared,
    tokenizer: str,
    size_name: str,
    shape: str,
    length: str,
    rates: Rates,
) -> list[Run]:
    contest = Contest(corpus, prepared.label, size_name, shape, length)
    base = spec.baseline_arm
    base_size = _with_vocabulary(spec.size(size_name, base), prepared)
    base_model = Decoder.outline(base_size, base.layout.layers(base_size.layers))
    base_count = base_model.parameter_count()
    base_flops = _flops(base_model, spec.train_settings(base))
    runs = []
    for arm in spec.arms:
        size = _with_vocabulary(spec.size(size_name, arm), prepared)
        layers = tuple(arm.layout.layers(size.layers))
        _refuse_short(prepared, size)
        if shape == "params":
            size = match_params(size, layers, base_count)
        model = Decoder.outline(size, layers)
        model.circuits()  # refuses a parameter that no optimiser would move
        _refuse_short_companion(prepared, model)
        training = spec.train_settings(arm)
        if (tuned := rates.get((corpus, size_name, shape, arm.label))) is not None:
            training = dataclasses.replace(training, lr=tuned)
        training.steps(size.context)
        flops = _flops(model, training)
        if length == "flops":
            training = match_flops(training, flops, base_flops)
        facts = {
            "name": corpus
            if not corpus.startswith("file:")
            else f"file:{Path(corpus[5:]).expanduser().resolve()}",
            "label": prepared.label,
            "tokenizer": tokenizer,
            "content": prepared.content,
        }
        costs = (model.parameter_count(), flops, model.cache_bytes_per_token(torch.bfloat16))
        runs += [Run(arm, layers, contest, size, training, seed, facts, *costs) for seed in spec.seeds]
    return runs


def _with_vocabulary(size: Size, prepared: Prepared) -> Size:
    return dataclasses.replace(size, vocabulary=prepared.tokenizer.vocabulary)


def _refuse_short(prepared: Prepared, size: Size) -> None:
    for split in ("train", "test", "valid"):
        tokens = len(prepared.splits[split].tokens)
        if tokens <= size.context:
            raise UserError(
                f"corpus {prepared.label}: the {split} split holds {tokens:,} tokens, fewer than the context {size.context}"
            )


def _refuse_short_companion(prepared: Prepared, model: Decoder) -> None:
    needed, tokens = model.companion_spec, len(prepared.splits["train"].tokens)
    if needed and needed.start == "tokens" and tokens < needed.offset + needed.length:
        raise UserError(
            f"corpus {prepared.label}: the train split holds {tokens:,} tokens; the companion takes {needed.length:,} "
            f"from token {needed.offset:,} on"
        )


def _flops(model: Decoder, training: TrainSettings) -> float:
    """Return forward FLOPs per token of a training step, keys seen counted."""
    context = model.size.context
    return model.flops(context, max(1, training.batch // context)).causal
