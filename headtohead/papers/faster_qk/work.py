"""Run the toy at one scale: train the missing runs, read the finished ones, write the findings and toy.json."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headtohead.common.errors import DamagedFile, MissingFile, NewerFile, UserError, unknown
from headtohead.common.progress import progress_bar
from headtohead.common.schema import read_document, write_document
from headtohead.common.stop import Stop
from headtohead.papers.faster_qk.findings import Finding, factor_findings, reduced_findings, run_findings
from headtohead.papers.faster_qk.processes import distribute, train_in_processes
from headtohead.papers.faster_qk.runs import LOSSES, SEEDS, ToyRun, choose_runs
from headtohead.papers.faster_qk.theory import LOSSES as REDUCED_LOSSES
from headtohead.papers.faster_qk.theory import RATIOS, Point, Reduced, examine_factorised
from headtohead.papers.faster_qk.train import ToyResult, train


@dataclass(frozen=True)
class ToyPlan:
    """The toy runs of a scale."""

    runs: tuple[str, ...]
    """Names in `runs.RUNS`; a trailing * matches a prefix."""
    seeds: int = 1
    until: float | None = None
    """Every run ends when an epoch's mean loss is below this; None: each run ends as published."""
    stepped: float = 1e-3
    """The published Runge-Kutta method is run down to this loss; below .001 it takes a minute."""
    long: Mapping[str, int] = field(default_factory=dict)
    """Number of seeds by run that continue to loss .001, however long that takes."""

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= len(SEEDS):
            raise UserError(f"the toy takes 1 to {len(SEEDS)} seeds, got {self.seeds}")
        for name, losses in (("until", (*LOSSES, None)), ("stepped", REDUCED_LOSSES)):
            if (given := getattr(self, name)) not in losses:
                allowed = ", ".join(f"{bound:g}" for bound in losses if bound)
                raise UserError(f"{name} takes one of {allowed}, got {given!r}")
        self.chosen()

    def chosen(self) -> list[ToyRun]:
        """Return its runs."""
        changes = {} if self.until is None else {"until": self.until, "brief": True}
        runs = choose_runs(self.runs, SEEDS[: self.seeds], **changes)
        names = {run.name for run in runs}
        for name in self.long:
            if name not in names:
                raise unknown("toy run", name, names)
        longer = {(name, seed) for name, count in self.long.items() for seed in SEEDS[:count]}
        return [replace(run, until=1e-3) if (run.name, run.seed) in longer else run for run in runs]


@dataclass
class Toy:
    """The results of the toy."""

    results: list[ToyResult]
    left: int
    """Number of runs not done within the time limit."""
    solved: list[Point]
    paths: dict[float, list[Point]]
    findings: list[Finding]
    path: Path | None = None
    """The path of toy.json."""

    def as_dict(self) -> dict[str, Any]:
        """Return the content of toy.json."""
        runs = [
            {
                "form": result.run.form,
                "name": result.run.name,
                "optimiser": result.run.optimizer,
                "seed": result.run.seed,
                "event": event,
                "loss": float(event.split()[1]) if event.startswith("loss") else mark.loss,
                "alpha": mark.alpha,
                "asked": mark.asked,
                "epoch": mark.epoch,
                "mean_loss": mark.loss,
                "qk_norm": mark.qk,
                "ov_norm": mark.ov,
                "balance": mark.balance,
                "histogram": mark.histogram,
                "ratio": result.run.ratio,
                "ratio_end": result.run.ratio_end,
                "length": result.run.length,
            }
            for result in self.results
            if result.run.share is None
            for event, mark in result.marks.items()
        ]
        named = [({"name": result.run.name, "seed": result.run.seed}, result) for result in self.results]
        return {
            "ode": [asdict(point) for point in self.solved],
            "runs": runs,
            "fixed": [row | {"alpha": one.run.share, **one.gain} for row, one in named if one.gain],
            "findings": [finding.as_dict() for finding in self.findings],
            "diverged": [row | {"step": one.diverged} for row, one in named if one.diverged is not None],
            "left": self.left,
        }


def work_toy(
    plan: ToyPlan,
    out: Path,
    device: torch.device,
    workers: int = 0,
    seconds: float = math.inf,
    quiet: bool = False,
) -> Toy:
    """Train the missing runs of the toy in `out` and write `toy.json` there; finished runs are kept in `out/toy`."""
    stop = Stop.after(seconds)
    store = out / "toy"
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {store}: {error.strerror}") from None
    runs = plan.chosen()
    known = {run: _stored(store, run, device) for run in runs}
    missing = [run for run, result in known.items() if result is None]
    with progress_bar("toy", quiet) as progress:

        def keep(result: ToyResult) -> None:
            stop.advance()  # toy runs have no checkpoints: only a finished run is progress
            known[result.run] = result
            write_document(_path(store, result.run, device), result.as_dict())

        parts = distribute(missing, workers or os.cpu_count() or 1) if device.type == "cpu" else []
        if len(parts) > 1:
            found = train_in_processes(parts, progress, keep, stop, lambda: _theory(plan.stepped))
        else:
            found = _theory(plan.stepped, progress)
            train(missing, device, progress, keep, stop)
    results = [result for result in known.values() if result is not None]
    solved, paths, findings = found
    path = out / "toy.json"
    toy = Toy(results, len(runs) - len(results), solved, paths, findings + run_findings(results), path)
    write_document(path, toy.as_dict())
    return toy


def read_toy(plan: ToyPlan, out: Path) -> Toy | None:
    """Return the results of a finished or stopped toy in `out` without computing anything; None if there is none."""
    path = out / "toy.json"
    try:
        findings = [Finding(**row) for row in read_document(path)["findings"]]
    except MissingFile:
        return None
    except (KeyError, TypeError) as error:
        raise DamagedFile(f"damaged file {path}: {error}; run the toy again to rewrite it") from None
    runs = plan.chosen()
    by_device = ([_stored(out / "toy", run, torch.device(kind)) for run in runs] for kind in ("cuda", "cpu"))
    found = max(([result for result in stored if result] for stored in by_device), key=len)
    return Toy(found, len(runs) - len(found), [], {}, findings, path)


def _theory(
    stepped: float, progress: Callable[[str, float], None] = lambda message, share: None
) -> tuple[list[Point], dict[float, list[Point]], list[Finding]]:
    """Return the solutions and paths of the reduced equations, and the findings of the theory."""
    model = Reduced()
    integrated, runge_kutta = list[Point](), list[Point]()
    paths: dict[float, list[Point]] = {}
    worst = 0.0
    down = [loss for loss in REDUCED_LOSSES if loss >= stepped]
    for index, r in enumerate(RATIOS):
        progress("toy: the reduced equations", index / len(RATIOS))
        points, paths[r] = model.integrate(r)
        integrated += points
        found, distance = model.runge_kutta(r, down)
        runge_kutta += found
        worst = max([worst, distance, *(abs(model.invariant(r, p.mu_ov, p.mu_qk) - 1) for p in points)])
    solved = [replace(model.solve(point.r, point.loss), tau=point.tau) for point in integrated]
    findings = reduced_findings(solved, integrated, runge_kutta, worst, paths)
    return solved, paths, findings + factor_findings(examine_factorised())


def _path(store: Path, run: ToyRun, device: torch.device) -> Path:
    # CPU and GPU draw different sequences.
    return store / f"{run.key}-{device.type}.json"


def _stored(store: Path, run: ToyRun, device: torch.device) -> ToyResult | None:
    """Return a finished run's result; None if its file is missing or damaged."""
    try:
        result = ToyResult.from_dict(read_document(_path(store, run, device)))
    except NewerFile:  # intact: training again would overwrite it
        raise
    except (KeyError, TypeError, AttributeError, UserError):
        return None
    return result if result.run == run else None
