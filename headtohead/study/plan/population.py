"""Decides which runs of a study are trained as rows of one population.

Either all runs of a contest are rows or none, so that compared runs are computed the same way. The trials of its tuning
are decided apart from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json
from headtohead.model.decoder import Decoder
from headtohead.study.plan.dataset import Dataset, task_model
from headtohead.study.plan.execution import ExecutionSettings, max_rows
from headtohead.study.plan.plan import LayerTable
from headtohead.study.plan.row_throughput import MOST, best_passes, rows_pay
from headtohead.study.store.frozen import Lock, frozen_population
from headtohead.study.store.manifest import Contest
from headtohead.study.store.run_spec import RunSpec
from headtohead.training.circuit_rates import STORED
from headtohead.training.population import ROW_SETTINGS, population_blocker
from headtohead.training.settings import TrainSettings

TUNING = "tuning of "
"""Precedes the title of a contest in study.lock.json where its tuning is meant."""


class PopulationPolicy:
    """Decides whether the runs of a contest are trained as populations; with `wanted=None`, only where it is faster.

    A contest that was started one way, as `lock` says, continues that way on any device.
    """

    def __init__(
        self, wanted: bool | None, execution: ExecutionSettings, lock: Lock | None = None, prefix: str = ""
    ) -> None:
        """`prefix` is `TUNING` for the trials of a tuning."""
        self.wanted, self.execution, self.prefix = wanted, execution, prefix
        self.lock = Lock({}) if lock is None else lock

    def __call__(
        self, contest: Contest, runs: Sequence[RunSpec], layers: LayerTable, dataset: Dataset
    ) -> bool:
        """Return whether all runs are rows of a population; raise UserError if that is requested but not possible."""
        if contest.length.startswith("time"):
            return False  # timed alone
        started = frozen_population(self.lock, f"{self.prefix}{contest.title}")
        wanted = started if self.wanted is None else self.wanted
        on_gpu = torch.device(self.execution.device).type == "cuda"
        if wanted is False or (wanted is None and not on_gpu):
            return False
        several = len({shared_by_rows(run) for run in runs}) < len(runs)
        if not (several or started):  # one run alone is no population
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
        able = several and self._room(runs)
        # Verified on windows of a corpus; the batches of tasks vary in length and gain little.
        known = not any(run.task for run in runs) and all(
            not term.user_code for used in layers.values() for layer in used for term in layer.terms
        )
        return (
            able
            and known
            and not self._reason_against(runs, layers)
            and rows_pay(runs[0], layers[runs[0].layers], dataset, self.execution)
        )

    def _room(self, runs: Sequence[RunSpec]) -> bool:
        device = torch.device(self.execution.device)
        kinds = {(run.size, run.training) for run in runs}
        return all(max_rows(size, training, device) > 1 for size, training in kinds)

    def _reason_against(self, runs: Sequence[RunSpec], layers: LayerTable) -> str:
        """Return why the runs cannot be rows of a population, or an empty string."""
        text = np.broadcast_to(np.zeros(1, dtype=np.int64), 2**40)  # long enough for any companion
        for run in {(run.size, run.layers): run for run in runs}.values():
            own = list(layers[run.layers])
            model = task_model(run.task, run.size, own, run.seed, text) if run.task else None
            if reason := population_blocker(model or Decoder(run.size, own, run.seed, companion=text)):
                return f"arm '{run.arm}': {reason}"
        return ""


def shared_by_rows(run: RunSpec) -> str:
    """Return what the runs of one pass have in common, as text: all but the seed and the settings of a row."""
    identity = run.identity
    training = {
        key: value
        for key, value in identity["training"].items()
        if key not in ROW_SETTINGS and key not in STORED
    }
    parent = run.parent.step if run.parent else None
    return canonical_json({**identity, "training": training, "seed": None, "parent": parent})


def group_populations(runs: Iterable[RunSpec], execution: ExecutionSettings) -> list[list[RunSpec]]:
    """Return the runs in groups that are trained in one pass, in their order; most groups are a single run.

    Rows with equal settings are adjacent. As many are one group as fit into memory and train fastest, but no device is left
    without a group while another trains several rows.
    """
    alike: dict[str, list[RunSpec]] = {}
    for run in runs:
        alike.setdefault(shared_by_rows(run) if run.stacked else run.id, []).append(run)
    device = torch.device(execution.device)
    found: list[tuple[list[RunSpec], int]] = []
    for members in alike.values():
        order: dict[TrainSettings, list[RunSpec]] = {}
        for run in members:
            order.setdefault(run.training, []).append(run)
        rows = [run for same in order.values() for run in same]
        # Populations of about equal size: 20 rows become 10 + 10, not 16 + 4.
        on_gpu = len(rows) > 1 and device.type == "cuda"
        parts = best_passes(rows[0], len(rows), device) if on_gpu else -(-len(rows) // MOST)
        found.append((rows, parts))
    return [
        group for rows, parts in _for_devices(found, len(execution.devices)) for group in _cut(rows, parts)
    ]


def _for_devices(sets: list[tuple[list[RunSpec], int]], devices: int) -> list[tuple[list[RunSpec], int]]:
    """Return sets of rows with the number of passes of each, raised until there is a pass for every device.

    The branches of trunks wait for them and are counted apart.
    """
    parts = [count for _, count in sets]
    for branches in (False, True):
        own = [index for index, (rows, _) in enumerate(sets) if bool(rows[0].parent) is branches]
        while own and sum(parts[index] for index in own) < devices:
            widest = max(own, key=lambda index: -(-len(sets[index][0]) // parts[index]))
            if parts[widest] >= len(sets[widest][0]):  # single runs
                break
            parts[widest] += 1
    return [(rows, count) for (rows, _), count in zip(sets, parts, strict=True)]


def _cut(rows: list[RunSpec], parts: int) -> list[list[RunSpec]]:
    """Return rows in that many passes of about equal size."""
    ends = [len(rows) * index // parts for index in range(parts + 1)]
    return [rows[start:stop] for start, stop in pairwise(ends)]
