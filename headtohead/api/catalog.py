"""What a study can name, conformance checks and costs of mechanisms, statistics of corpora."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.progress import progress_bar
from headtohead.data.corpora import corpus_names
from headtohead.data.shards import prepare
from headtohead.data.tasks.registry import task_names, zeroshot_names
from headtohead.evaluation.corpus_stats import WINDOW, Statistics, corpus_statistics
from headtohead.evaluation.cost import arm_cost
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.describe import describe
from headtohead.mechanisms.contract.registry import Kind, builtin_mechanisms
from headtohead.mechanisms.contract.score import Score
from headtohead.mechanisms.contract.terms import Composed, Term
from headtohead.mechanisms.contract.user_code import user_errors
from headtohead.model.check import Verification, check_composed
from headtohead.model.decoder import Decoder
from headtohead.model.layout import NAMED_LAYOUTS, parse_layout
from headtohead.model.sizes import SIZES, find_size
from headtohead.study.config.shipped import shipped_studies
from headtohead.study.config.spec import read_study
from headtohead.study.probes import PROBES


def size_rows() -> list[dict[str, Any]]:
    """Return every size with its dimensions and the parameters of `standard`, JSON-ready."""
    rows = []
    for name, size in SIZES.items():
        model = Decoder.on_meta(size, parse_layout("standard").layers(size.layers))
        about = {"name": name, "dims": size.dims, "parameters": model.parameter_count()}
        rows.append(about | size.as_dict())
    return rows


def catalog() -> dict[str, Any]:
    """Return mechanisms, sizes, corpora, tasks, layouts, probes and shipped studies, JSON-ready."""
    return {
        "mechanisms": [describe(kind).as_dict() for kind in builtin_mechanisms().values()],
        "sizes": size_rows(),
        "corpora": [{"name": name, "about": about} for name, about in corpus_names().items()],
        "tasks": [
            {"name": name, "about": about} for name, about in (task_names() | zeroshot_names()).items()
        ],
        "layouts": sorted(NAMED_LAYOUTS),
        "probes": [
            {"name": name, "argument": probe.argument, "of": probe.of, "about": probe.about}
            for name, probe in PROBES.items()
        ],
        "studies": study_rows(),
    }


def study_rows() -> list[dict[str, Any]]:
    """Return the name, the title and the number of claims of every shipped study, JSON-ready."""
    rows = []
    for name, path in shipped_studies().items():
        values = read_study(path)
        title = values["paper"]["title"] if "paper" in values else values.get("name", name)
        rows.append({"name": name, "title": title, "claims": len(values.get("claim", ()))})
    return rows


def check(arm: str | type[Mechanism] | Score, *, compile: bool = False) -> Verification:
    """Return the results of the conformance suite for a mechanism, at every example setting of its options."""
    composed = parse_layout(arm).pattern[0]
    return check_composed(check_settings(composed), compile)


def check_settings(composed: Composed) -> list[Composed]:
    """Return the settings to check: the given options if any, else every example."""
    base = composed.terms[0]
    given = base.options != _default(base.kind)
    if given or len(composed.terms) > 1 or not hasattr(base.kind.Options, "examples"):
        return [composed]
    return [
        Composed((Term(base.kind, options, base.path, base.source),))
        for options in base.kind.Options.examples()
    ]


_MAX_CONTEXT = 10**9


def cost(
    arm: str | type[Mechanism] | Score, *, size: str = "nano", context: int = 0, batch: int = 1
) -> dict[str, Any]:
    """Return parameters, FLOPs per token and cache bytes per token of an arm at a size.

    `batch` is the number of sequences that share per-batch work (a companion's pass).
    """
    if batch < 1:
        raise UserError(f"batch={batch} must be at least 1")
    if not 0 <= context <= _MAX_CONTEXT:
        raise UserError(f"context={context} is not between 0 (the size's own) and {_MAX_CONTEXT:,}")
    shape = find_size(size)
    layout = parse_layout(arm)
    with user_errors(layout.text):
        facts = arm_cost(shape, layout.layers(shape.layers), context, batch=batch)
    return {"arm": layout.text, "label": layout.label, "size": size, "dims": shape.dims} | facts


def corpus_stats(
    corpora: str | Sequence[str],
    *,
    window: int = WINDOW,
    data_dir: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Statistics]:
    """Return the statistics of corpora by label, over windows of `window` bytes (see evaluation/corpus_stats.py)."""
    found = {}
    with progress_bar("statistics", quiet) as progress:
        for name in [corpora] if isinstance(corpora, str) else corpora:
            corpus = prepare(name, data_dir=data_dir, progress=progress)
            found[corpus.label] = corpus_statistics(corpus, window, progress)
    return found


def _default(kind: Kind) -> Any:
    try:
        return kind.Options()
    except TypeError:
        return None
