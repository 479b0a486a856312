"""Training stability and speed of a run, computed from the rows of its metrics.jsonl.

A spike is a sequence of logged rows whose loss is above the median of the 20 rows before it by more than 6 robust
deviations of those rows (1.4826 times their median absolute deviation) and by more than 1 % of that median. Consecutive
rows count as one spike, and the first 20 rows are not judged. (A curve of 200 rows with normal noise and no spike shows
one in 0.3 % of cases.) The tail of the gradient norm is the 99th percentile of the largest norm in each logged row
divided by the median of the rows' mean norms; it is 1 if all steps have equal norms. Tokens to a target are where the
loss averaged over 5 rows first falls to the target, with linear interpolation between rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headtohead.evaluation.logged_row import LoggedRow

SPIKE_ROWS = 20
SPIKE_DEVIATIONS = 6.0
SPIKE_SHARE = 0.01
SMOOTHED_ROWS = 5
_TO_DEVIATION = 1.4826
"""Converts the median absolute deviation of a normal distribution to its standard deviation."""


def spikes(rows: Sequence[LoggedRow]) -> int:
    """Return the number of loss spikes."""
    nats = _column(rows, "nats")
    if len(nats) <= SPIKE_ROWS:
        return 0
    before = np.lib.stride_tricks.sliding_window_view(nats, SPIKE_ROWS)[:-1]
    middle = np.median(before, axis=1)
    deviation = _TO_DEVIATION * np.median(np.abs(before - middle[:, None]), axis=1)
    above = nats[SPIKE_ROWS:] > middle + np.maximum(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * middle)
    return int(above[0]) + int((above[1:] & ~above[:-1]).sum())


def gradient_tail(rows: Sequence[LoggedRow]) -> float | None:
    """Return the 99th percentile of the gradient norm divided by its median; None without norms."""
    largest, means = _column(rows, "grad_norm_max"), _column(rows, "grad_norm")
    if not len(largest) or not len(means) or np.median(means) <= 0:
        return None
    return float(np.quantile(largest, 0.99) / np.median(means))


def final_loss(rows: Sequence[LoggedRow]) -> float | None:
    """Return the loss averaged over a run's last rows; None if it has too few rows."""
    _, nats = _smoothed(rows)
    return float(nats[-1]) if len(nats) else None


def tokens_to_target(rows: Sequence[LoggedRow], target: float) -> float | None:
    """Return the number of tokens after which the loss first falls to `target`; None if it never does."""
    tokens, nats = _smoothed(rows)
    reached = np.flatnonzero(nats <= target)
    if not len(reached):
        return None
    index = int(reached[0])
    if index == 0:
        return float(tokens[0])
    share = (nats[index - 1] - target) / (nats[index - 1] - nats[index])
    return float(tokens[index - 1] + share * (tokens[index] - tokens[index - 1]))


def _column(rows: Sequence[LoggedRow], name: str) -> NDArray[np.float64]:
    """Return the numbers of a column; skips evaluation rows and missing values."""
    return np.array([value for row in rows if (value := getattr(row, name)) is not None], dtype=np.float64)


def _smoothed(rows: Sequence[LoggedRow]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    whole = [row for row in rows if row.tokens is not None and row.nats is not None]
    if len(whole) < SMOOTHED_ROWS:
        return np.empty(0), np.empty(0)
    nats = np.convolve(_column(whole, "nats"), np.full(SMOOTHED_ROWS, 1 / SMOOTHED_ROWS), "valid")
    return _column(whole, "tokens")[SMOOTHED_ROWS - 1 :], nats
