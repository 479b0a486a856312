"""Decides which runs of a study are trained as rows of one population.

Either all runs of a study are rows or none, so that compared runs are computed the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json
from headtohead.model.decoder import Decoder
from headtohead.study.plan.dataset import task_model
from headtohead.study.plan.execution import ExecutionSettings, max_rows
from headtohead.study.plan.plan import LayerTable
from headtohead.study.store.run_spec import RunSpec
from headtohead.training.acceleration import is_small
from headtohead.training.population import VERIFIED_MECHANISMS, population_blocker

MOST = 16
"""Maximum rows of a population: a GPU gains nothing beyond."""


class PopulationPolicy:
    """Decides whether a study's runs are trained as populations; with `wanted=None`, only where it is faster.

    A study that was `started` one way continues that way, on any device.
    """

    def __init__(
        self, wanted: bool | None, execution: ExecutionSettings, started: bool | None = None
    ) -> None:
        self.wanted, self.execution, self.started = wanted, execution, started

    def __call__(self, runs: Sequence[RunSpec], layers: LayerTable) -> bool:
        """Return whether all runs are rows of a population; raise UserError if that is requested but not possible."""
        wanted = self.started if self.wanted is None else self.wanted
        several = len({run.seed for run in runs}) > 1
        if wanted is False or not (several or self.started):  # one seed alone is no population
            return False
        if wanted:
            if reason := self._reason_against(runs, layers):
                how = (
                    "population=True"
                    if self.wanted
                    else "this study's runs are rows of populations (population=False starts all of them again)"
                )
                raise UserError(f"{how}: {reason}")
            return True
        able = torch.device(self.execution.device).type == "cuda"
        pays = several and all(is_small(run.size) for run in runs)
        # Verified on a GPU: these mechanisms, on windows of a corpus.
        known = not any(run.task for run in runs) and all(
            term.is_ours(VERIFIED_MECHANISMS)
            for used in layers.values()
            for layer in used
            for term in layer.terms
        )
        return able and pays and known and self._room(runs) and not self._reason_against(runs, layers)

    def _room(self, runs: Sequence[RunSpec]) -> bool:
        device = torch.device(self.execution.device)
        kinds = {(run.size, run.training) for run in runs}
        return all(max_rows(size, training, device) > 1 for size, training in kinds)

    def _reason_against(self, runs: Sequence[RunSpec], layers: LayerTable) -> str:
        """Return why the runs cannot be rows of a population, or an empty string."""
        if any(run.parent for run in runs):
            return "runs with branches cannot be rows of a population"
        if any(run.length.startswith("time") for run in runs):
            return "runs under length=time are timed alone and cannot be rows of a population"
        text = np.broadcast_to(np.zeros(1, dtype=np.int64), 2**40)  # long enough for any companion
        for run in {(run.size, run.layers): run for run in runs}.values():
            own = list(layers[run.layers])
            model = task_model(run.task, run.size, own, run.seed, text) if run.task else None
            if reason := population_blocker(model or Decoder(run.size, own, run.seed, companion=text)):
                return f"arm '{run.arm}': {reason}"
        return ""


def group_populations(runs: Iterable[RunSpec], execution: ExecutionSettings) -> list[list[RunSpec]]:
    """Return the runs in groups that are trained in one pass, in their order; most groups are a single run.

    Rows of a population differ only in seed. As many as fit into memory are one group.
    """
    alike: dict[str, list[RunSpec]] = {}
    for run in runs:
        key = canonical_json({**run.identity, "seed": None}) if run.stacked else run.id
        alike.setdefault(key, []).append(run)
    device = torch.device(execution.device)
    found = []
    for members in alike.values():
        most = MOST
        if len(members) > 1 and device.type == "cuda":
            most = max(1, min(MOST, max_rows(members[0].size, members[0].training, device)))
        # Populations of about equal size: 20 seeds become 10 + 10, not 16 + 4.
        parts = -(-len(members) // most)
        found += [members[index::parts] for index in range(parts)]
    return found
