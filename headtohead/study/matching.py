"""Budgets that are solved: what is held equal between an arm and the baseline.

shape = as_is    every arm has the size's own dimensions
        params   the arm's feed-forward width is solved so that its parameters equal the baseline's
length = tokens  every arm sees the same tokens
         flops   the arm's tokens are solved so that its training FLOPs equal the baseline's
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headtohead.common.errors import UserError
from headtohead.mechanisms.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size
from headtohead.training.settings import TrainSettings

# Farther apart than this is not a match.
TOLERANCE = 0.005


def match_params(size: Size, layers: Sequence[Composed], target: int) -> Size:
    """Return the size with the feed-forward width at which the arm's parameters are nearest to `target`."""
    here = Decoder.outline(size, layers).parameter_count()
    if here == target:
        return size
    step = Decoder.outline(dataclasses.replace(size, ffn=size.ffn + 1), layers).parameter_count() - here
    if step == 0:
        raise UserError(
            "shape=params cannot be met: the arm has no feed-forward part whose width could be solved"
        )
    width = size.ffn + round((target - here) / step)
    if width < 1:
        raise UserError(
            f"shape=params cannot be met: without any feed-forward part the arm has {here - size.ffn * step:,} "
            f"parameters, the baseline {target:,}"
        )
    solved = dataclasses.replace(size, ffn=width)
    count = Decoder.outline(solved, layers).parameter_count()
    if abs(count - target) > TOLERANCE * target:
        raise UserError(f"shape=params cannot be met within 0.5 %: {count:,} parameters against {target:,}")
    return solved


def match_flops(settings: TrainSettings, arm: float, baseline: float) -> TrainSettings:
    """Return settings whose tokens give the arm the baseline's training FLOPs, in whole steps."""
    tokens = round(settings.tokens // settings.batch * baseline / arm) * settings.batch
    if tokens < settings.batch:
        raise UserError("length=flops cannot be met: the arm costs so much that no whole step is left")
    return dataclasses.replace(settings, tokens=tokens)
