"""Combine the tables of several seeds: the mean and t interval of every number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from headtohead.study.judge.statistics import ALPHA


def over_seeds(rows: Sequence[Any]) -> Any:
    """Return tables of the same structure combined into one, with every number as {mean, low, high, n}.

    Integers and non-numbers that are equal for all seeds are kept. A number that is missing for some seeds is averaged over
    the others; non-numbers that differ become a list.
    """
    known = [row for row in rows if row is not None]
    if not known:
        return None
    if all(isinstance(row, dict) for row in known):
        names = dict.fromkeys(name for row in known for name in row)
        return {name: over_seeds([row.get(name) for row in known]) for name in names}
    if all(type(row) is int and row == known[0] for row in known):
        return known[0]
    if all(isinstance(row, int | float) and not isinstance(row, bool) for row in known):
        return _interval([float(row) for row in known])
    lists = all(isinstance(row, list) for row in known)
    if lists and known[0] and len({len(row) for row in known}) == 1 and not isinstance(known[0][0], str):
        return [over_seeds([row[index] for row in known]) for index in range(len(known[0]))]
    return known[0] if all(row == known[0] for row in known) else known


def _interval(values: list[float]) -> dict[str, Any]:
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return {"mean": mean, "low": None, "high": None, "n": n}
    from scipy.stats import t

    reach = float(t.ppf(1 - ALPHA / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "n": n}
