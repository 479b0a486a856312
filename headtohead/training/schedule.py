"""The learning rate at every step."""

from __future__ import annotations

import math

from headtohead.training.settings import TrainSettings


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """Return the learning rate at `step`, 0..steps-1."""
    rise = max(1, round(settings.warmup * steps)) if settings.warmup else 0
    if step < rise:
        return settings.lr * (step + 1) / rise
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "wsd":
        fall = round(settings.decay_share * steps)
        share = (step - (steps - fall) + 1) / max(1, fall)
        return settings.lr * (1 - (1 - settings.floor) * max(0.0, share))
    share = (step - rise) / max(1, steps - 1 - rise)
    return settings.lr * (settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * share)))
