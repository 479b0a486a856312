"""Compare the toy's numbers with the expected ones: one finding per number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headtohead.common.schema import Plain
from headtohead.papers.faster_qk import published, theory
from headtohead.papers.faster_qk.runs import LOSSES, SHARES
from headtohead.papers.faster_qk.theory import Factorised, Point
from headtohead.papers.faster_qk.train import ToyResult

COMPLETE = {"ends": 22, "losses": 36, "curves": 33, "fixed": 10, "gain": 12}
COMPLETE |= {"reduced": 29, "solution": 15, "factors": 4, "emulated": 6}
"""The minimum number of findings of each complete check.

ends, losses and curves are the tables of the runs, fixed and gain those of imposed attention, reduced and solution of the
reduced equations, factors and emulated of factored circuits.
"""
CHECKS = tuple(COMPLETE)
THEORY = frozenset({"reduced", "solution", "factors"})
"""Checks that need no training."""
OWN = frozenset({"emulated"})
"""Checks of runs that are ours, not published."""


@dataclass(frozen=True)
class Finding(Plain):
    """One number and its expected value."""

    check: str
    what: str
    value: float
    expected: float
    tolerance: float
    holds: bool
    seeds: int = 1

    def words(self) -> str:
        """Return it as text."""
        return f"{self.what}: {self.value:.4g}, expected {self.expected:.4g} +- {self.tolerance:.2g}"


def near(check: str, what: str, values: Sequence[float], expected: float, tolerance: float) -> Finding:
    """Return a finding that the mean of some values is within a tolerance of `expected`."""
    mean = sum(values) / len(values)
    # Table values are rounded, so a mean may be exactly at the tolerance up to float rounding.
    return Finding(
        check, what, mean, expected, tolerance, abs(mean - expected) <= tolerance * (1 + 1e-9), len(values)
    )


def below(check: str, what: str, value: float, bound: float, seeds: int = 1) -> Finding:
    """Return a finding that a value is below a bound."""
    return Finding(check, what, value, 0.0, bound, value < bound, seeds)


def run_findings(results: Sequence[ToyResult]) -> list[Finding]:
    """Return the findings of the runs under SGD: tables T1 to T4, and the parts of T6 that need training."""
    named: defaultdict[str, list[ToyResult]] = defaultdict(list)
    for result in results:
        if result.run.adam is None:
            named[result.run.name].append(result)
    findings = []
    for (name, event), (alpha, tolerance) in published.ENDS.items():
        marks = [result.marks[event] for result in named[name] if event in result.marks]
        if marks:
            what = f"alpha of {name} at its {event}"
            findings.append(near("ends", what, [mark.alpha for mark in marks], alpha, tolerance))
            unsure = 1 - sum(mark.sure for mark in marks) / len(marks)
            what = f"share of {name} with p_y at most .8 at its {event}"
            findings.append(below("ends", what, unsure, 1 - published.SURE + 1e-9, len(marks)))
    for name, (alphas, tolerance) in published.AT_LOSS.items():
        for bound, expected in zip(LOSSES, alphas, strict=True):
            values = _alphas_at(named[name], bound)
            if expected is not None and values:
                what = f"alpha of {name} at loss {bound:g}"
                findings.append(near("losses", what, values, expected, tolerance))
    for name, (means, tolerance) in published.HUNDREDS.items():
        for index, expected in enumerate(means):
            values = [result.hundreds[index] for result in named[name] if index < len(result.hundreds)]
            if values:
                what = f"mean loss of {name}, epochs {100 * index + 1} to {100 * index + 100}"
                findings.append(near("curves", what, values, expected, tolerance))
    findings += _fixed_findings(named)
    for name in ("FAFO", "FAFO r=20", "CAFO"):
        for result in named[name]:
            for mark in list(result.marks.values())[-1:]:
                if mark.balance is not None:
                    what = f"||O'O - VV'|| of {name}, seed {result.run.seed}"
                    findings.append(below("factors", what, mark.balance, published.BALANCE))
    return findings + _emulated_findings(named)


def _alphas_at(results: Iterable[ToyResult], bound: float) -> list[float]:
    """Return alpha of the runs that reached a loss."""
    event = f"loss {bound:g}"
    return [result.marks[event].alpha for result in results if event in result.marks]


def _fixed_findings(named: Mapping[str, list[ToyResult]]) -> list[Finding]:
    findings = []
    gains: dict[tuple[str, float], float] = {}
    for check, key, table in (
        ("fixed", "loss", published.FIXED_LOSS),
        ("gain", "gain", published.FIXED_GAIN),
    ):
        for name, (numbers, part) in table.items():
            for share, expected in zip(SHARES, numbers):
                values = [result.gain[key] for result in named[f"{name} alpha={share:g}"] if result.gain]
                if values:
                    what = f"{key} of {name} at alpha {share:g}"
                    findings.append(near(check, what, values, expected, part * expected))
                    if key == "gain":
                        gains[name, share] = findings[-1].value
    for share in SHARES[:-1]:
        factorised, collapsed = (gains.get((f"fixed {kind}", share)) for kind in ("factorised", "collapsed"))
        if factorised is not None and collapsed:
            what = f"gain of a factorised over a collapsed output at alpha {share:g}"
            findings.append(below("gain", what, factorised / collapsed, published.GAIN_RATIO))
    return findings


def _emulated_findings(named: Mapping[str, list[ToyResult]]) -> list[Finding]:
    findings = []
    for bound in LOSSES[1:]:
        found = {name: _alphas_at(named[name], bound) for name in ("FACO emulated", "FACO", "CACO")}
        means = {name: sum(values) / len(values) for name, values in found.items() if values}
        if {"FACO emulated", "FACO"} <= means.keys():
            gap = abs(means["FACO emulated"] - means["FACO"])
            what = f"distance of the emulation from FACO at loss {bound:g}"
            findings.append(below("emulated", what, gap, published.EMULATED))
            if "CACO" in means:
                other = abs(means["CACO"] - means["FACO"])
                findings.append(below("emulated", f"{what}, against that of CACO", gap, other))
    return findings


def reduced_findings(
    solved: Sequence[Point],
    integrated: Sequence[Point],
    stepped: Sequence[Point],
    invariant: float,
    paths: dict[float, list[Point]],
) -> list[Finding]:
    """Return the findings of the reduced equations: table T5, and that the ratio changes the solution."""
    exact = {(point.r, point.loss): point.alpha for point in solved}
    findings = []
    for r, alphas in published.REDUCED.items():
        for loss, expected in zip(theory.LOSSES, alphas, strict=True):
            what = f"alpha of the closed form at r {r:g}, loss {loss:g}"
            # the table has four digits
            findings.append(near("reduced", what, [exact[r, loss]], expected, 5.1e-5))
    for method, points in (("adaptive", integrated), ("Runge-Kutta", stepped)):
        gap = max(abs(point.alpha - exact[point.r, point.loss]) for point in points)
        what = f"largest distance in alpha of the {method} path from the closed form"
        findings.append(below("reduced", what, gap, published.INTEGRATED))
    what = "largest distance of the invariant from 1"
    findings.append(below("reduced", what, invariant, published.INVARIANT))
    fall = max(before.alpha - after.alpha for path in paths.values() for before, after in pairwise(path))
    findings.append(below("reduced", "largest fall of alpha along a path", max(0.0, fall), 1e-9))
    for loss in theory.LOSSES:
        row = sorted((point for point in solved if point.loss == loss), key=lambda point: point.r)
        for name, values in (
            ("alpha", [point.alpha for point in row]),
            ("mu_QK", [point.mu_qk for point in row]),
            ("-mu_OV", [-point.mu_ov for point in row]),
        ):
            rise = min(after - before for before, after in pairwise(values))
            what = f"smallest rise of {name} from one ratio to the next at loss {loss:g}"
            findings.append(Finding("solution", what, rise, 0.0, 0.0, rise > 0))
    return findings


def factor_findings(found: Factorised) -> list[Finding]:
    """Return the findings of gradient descent on two factors: the first part of T6."""
    halving = found.flow / found.flow_halved
    return [
        below("factors", "descent on A and B from mu <- mu (1 + s g)^2", found.law, published.LAW),
        near("factors", "distance from the flow at s over that at s/2", [halving], 2.0, 0.1),
        below("factors", "||A'A - BB'|| / ||A'A|| on a quadratic loss", found.conserved, published.CONSERVED),
        below("factors", "A A' from (W W')^(1/2) there", found.root, published.CONSERVED),
    ]
