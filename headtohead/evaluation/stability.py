"""How smoothly a run trained, and how soon: from the rows of its metrics.jsonl alone.

A spike is a stretch of logged rows whose loss lies above the median of the 20 rows before it by more than 6 robust
deviations of those rows (1.4826 times their median absolute deviation) and by more than 1 % of that median; rows in a
row are one spike, and the first 20 rows are not judged (a curve of 200 rows with normal noise and no spike shows one in
0.3 % of cases). The tail of the gradient norm is the 99th percentile of the
largest norm in each logged row over the median of the rows' mean norms: 1 is a run whose steps are all alike.
Tokens to a target are read off the loss averaged over 5 rows, where it first falls to the target, between rows by a
straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPIKE_ROWS = 20
SPIKE_DEVIATIONS = 6.0
SPIKE_SHARE = 0.01
SMOOTHED_ROWS = 5
_TO_DEVIATION = 1.4826
"""Turns the median absolute deviation of a normal law into its standard deviation."""
Row = dict[str, Any]


def spikes(rows: Sequence[Row]) -> int:
    """Return how often the loss leapt up."""
    nats = _column(rows, "nats")
    if len(nats) <= SPIKE_ROWS:
        return 0
    before = np.lib.stride_tricks.sliding_window_view(nats, SPIKE_ROWS)[:-1]
    middle = np.median(before, axis=1)
    deviation = _TO_DEVIATION * np.median(np.abs(before - middle[:, None]), axis=1)
    above = nats[SPIKE_ROWS:] > middle + np.maximum(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * middle)
    return int(above[0]) + int((above[1:] & ~above[:-1]).sum())


def gradient_tail(rows: Sequence[Row]) -> float | None:
    """Return the 99th percentile of the gradient norm over its median; None without norms."""
    largest, means = _column(rows, "grad_norm_max"), _column(rows, "grad_norm")
    if not len(largest) or not len(means) or np.median(means) <= 0:
        return None
    return float(np.quantile(largest, 0.99) / np.median(means))


def final_loss(rows: Sequence[Row]) -> float | None:
    """Return the loss a run ends with, over its last rows; None where it has too few."""
    _, nats = _smoothed(rows)
    return float(nats[-1]) if len(nats) else None


def tokens_to_target(rows: Sequence[Row], target: float) -> float | None:
    """Return after how many tokens the loss first falls to `target`; None where it never does."""
    tokens, nats = _smoothed(rows)
    reached = np.flatnonzero(nats <= target)
    if not len(reached):
        return None
    place = int(reached[0])
    if place == 0:
        return float(tokens[0])
    share = (nats[place - 1] - target) / (nats[place - 1] - nats[place])
    return float(tokens[place - 1] + share * (tokens[place] - tokens[place - 1]))


def _column(rows: Sequence[Row], name: str) -> NDArray[np.float64]:
    """Return the numbers of a column; rows of evaluations, and numbers that are none, are passed over."""
    return np.array([row[name] for row in rows if isinstance(row.get(name), int | float)], dtype=np.float64)


def _smoothed(rows: Sequence[Row]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    whole = [
        row for row in rows if all(isinstance(row.get(name), int | float) for name in ("tokens", "nats"))
    ]
    if len(whole) < SMOOTHED_ROWS:
        return np.empty(0), np.empty(0)
    nats = np.convolve(_column(whole, "nats"), np.full(SMOOTHED_ROWS, 1 / SMOOTHED_ROWS), "valid")
    return _column(whole, "tokens")[SMOOTHED_ROWS - 1 :], nats
