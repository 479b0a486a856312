"""Measure how often the judge is right: simulate whole studies, with every rule of the verdict, thousands at a time.

    python benchmarks/simulated_studies.py [--studies 200000]

Prints the table in docs/verdicts.md. A study has a baseline and three arms. Arms share part of a seed's noise, so that paired
values correlate 0.5; differences are in units of the standard deviation of the paired difference over seeds.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from headtohead.study.judge.statistics import ALPHA, detectable_difference

ARMS = 3
CORRELATION = 0.5
LATE, BEHIND = 1 / 3, 4.0
"""For bimodal seeds: the share of runs that learn late, and by how many standard deviations they are worse."""
DIVERGED = 0.1
"""The share of runs that diverge, in the simulations with divergence."""
SEEDS = (3, 5, 8)
Values = NDArray[np.float64]
Labels = NDArray[np.str_]


@dataclass(frozen=True)
class Judged:
    """The judge's numbers for many studies at once, each of shape (studies, arms)."""

    difference: Values
    low: Values
    high: Values
    p_holm: Values
    verdict: Labels


def draw(
    generator: np.random.Generator, studies: int, n: int, truth: tuple[float, ...], law: str = "normal"
) -> Values:
    """Return values (studies, 1 + arms, n), the baseline first; each arm differs from it by its entry in `truth`.

    `law`: normal; heavy: Student's t with three degrees of freedom; bimodal: one run in three learns late and is worse by
    four standard deviations of the others. All are scaled to the same variance.
    """

    def noise(*shape: int) -> Values:
        if law == "heavy":
            return generator.standard_t(3, shape) / math.sqrt(3)
        if law == "bimodal":
            late = generator.random(shape) < LATE
            spread = math.sqrt(1 + LATE * (1 - LATE) * BEHIND**2)
            return (generator.standard_normal(shape) + BEHIND * (late - LATE)) / spread
        return generator.standard_normal(shape)

    # Paired differences have standard deviation 1: their variance is 2 (1 - correlation) times that of a value.
    scale = 1 / math.sqrt(2 * (1 - CORRELATION))
    shared, own = noise(studies, 1, n), noise(studies, 1 + len(truth), n)
    mixed = scale * (math.sqrt(CORRELATION) * shared + math.sqrt(1 - CORRELATION) * own)
    return mixed + np.array([0.0, *truth])[:, None]


def judge(values: Values, margin: float = 0.0) -> Judged:
    """Return the judge's numbers for each arm of each study: paired t, Holm, equivalence within the margin."""
    differences = values[:, 1:] - values[:, :1]
    n, arms = differences.shape[2], differences.shape[1]
    mean = differences.mean(2)
    error = differences.std(2, ddof=1) / math.sqrt(n)
    p = 2 * special.stdtr(n - 1, -np.abs(mean) / error)
    order = p.argsort(1)
    ranked = np.take_along_axis(p, order, 1) * (arms - np.arange(arms))
    raised = np.minimum(np.maximum.accumulate(ranked, 1), 1.0)
    p_holm = np.empty_like(p)
    np.put_along_axis(p_holm, order, raised, 1)
    wide, narrow = (special.stdtrit(n - 1, 1 - share / 2) * error for share in (ALPHA, 2 * ALPHA))
    decided = p_holm < ALPHA
    within = (-margin < mean - narrow) & (mean + narrow < margin)
    verdict = np.where(
        decided, np.where(mean < 0, "better", "worse"), np.where(within, "equivalent", "undecided")
    )
    return Judged(mean, mean - wide, mean + wide, p_holm, verdict)


def wins(judged: Judged) -> NDArray[np.bool_]:
    """Return, per study and arm, whether the verdict is better or worse."""
    return judged.p_holm < ALPHA


def withheld(generator: np.random.Generator, studies: int, n: int) -> NDArray[np.bool_]:
    """Return, per study and arm, whether a run of the arm or of the baseline diverged, in which case no winner is declared."""
    diverged = (generator.random((studies, 1 + ARMS, n)) < DIVERGED).any(2)
    return diverged[:, 1:] | diverged[:, :1]


def rates(n: int, studies: int, seed: int = 0) -> dict[str, float]:
    """Return the rate of each outcome with n seeds, over simulated studies."""
    generator = np.random.default_rng([seed, n])
    none = (0.0,) * ARMS
    found: dict[str, float] = {}
    for name, law in (
        ("coverage", "normal"),
        ("coverage, heavy tails", "heavy"),
        ("coverage, bimodal", "bimodal"),
    ):
        judged = judge(draw(generator, studies, n, (0.3, 0.0, -1.0), law))
        truth = np.array([0.3, 0.0, -1.0])
        # One arm per study: the arms of a study share a baseline and are not independent.
        found[name] = float(((judged.low <= truth) & (truth <= judged.high))[:, 0].mean())
    values = draw(generator, studies, 2 * n, none)
    first, second = judge(values[:, :, :n]), judge(values)
    found["false winner"] = float(wins(first).any(1).mean())
    for name, law in (("false winner, heavy tails", "heavy"), ("false winner, bimodal", "bimodal")):
        found[name] = float(wins(judge(draw(generator, studies, n, none, law))).any(1).mean())
    named = wins(judge(draw(generator, studies, n, none))) & ~withheld(generator, studies, n)
    found["false winner, one run in ten diverges"] = float(named.any(1).mean())
    # Doubling the seeds after seeing no winner gives a second chance of a false winner.
    found["false winner, seeds added"] = float((wins(first).any(1) | wins(second).any(1)).mean())
    # The hardest case for equivalence: a true difference as large as the margin, here four standard errors.
    margin = 4 / math.sqrt(n)
    judged = judge(draw(generator, studies, n, (margin, 0.0, 0.0)), margin)
    found["false equivalence"] = float((judged.verdict[:, 0] == "equivalent").mean())
    for name, arms in (("power", 1), ("power among 3", ARMS)):
        shift = detectable_difference(1.0, n)
        assert shift is not None
        judged = judge(draw(generator, studies, n, (-shift, *(0.0,) * (arms - 1))))
        found[name] = float((judged.verdict[:, 0] == "better").mean())
    for name, law in (("power, heavy tails", "heavy"), ("power, bimodal", "bimodal")):
        judged = judge(draw(generator, studies, n, (-shift,), law))
        found[name] = float((judged.verdict[:, 0] == "better").mean())
    judged = judge(draw(generator, studies, n, (-shift, 0.0, 0.0)))
    better = (judged.verdict[:, 0] == "better") & ~withheld(generator, studies, n)[:, 0]
    found["power among 3, one run in ten diverges"] = float(better.mean())
    return found


def main() -> None:
    """Print the table of docs/verdicts.md."""
    parser = argparse.ArgumentParser(description="measure how often the judge is right")
    parser.add_argument("--studies", type=int, default=200_000)
    count = parser.parse_args().studies
    columns = {n: rates(n, count) for n in SEEDS}
    print("| share of studies | " + " | ".join(f"n = {n}" for n in SEEDS) + " |")
    print("|---|" + "---|" * len(SEEDS))
    for name in columns[SEEDS[0]]:
        print(f"| {name} | " + " | ".join(f"{columns[n][name]:.3f}" for n in SEEDS) + " |")


if __name__ == "__main__":
    main()
