"""Solves the quantities that are held equal between an arm and the baseline.

shape = as_is    every arm has the size's own dimensions
        params   the arm's feed-forward width is solved so that its parameters equal the baseline's
        cache    the arm's kv heads, if unset, else its width are solved so that the cache bytes of one token (bf16,
                 all layers) equal the baseline's. With `cache_at` the bytes are those of a whole context, and the
                 rows of states of fixed size, if unset, are solved before the width
length = tokens      every arm sees the same tokens
         flops       the arm's tokens are solved so that its training FLOPs equal the baseline's
         time        the arm's tokens are solved so that its training seconds equal the baseline's (plan/step_timing.py)
         time_plain  the same, with every fused operation timed by its plain reference
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size
from headtohead.training.settings import TrainSettings

# Maximum relative deviation of a match.
TOLERANCE = 0.005


def match_params(
    size: Size,
    layers: Sequence[Composed],
    target: int,
    on_meta: Callable[[Size, Sequence[Composed]], Decoder] = Decoder.on_meta,
) -> Size:
    """Return the size with the feed-forward width at which the arm's parameter count is closest to `target`.

    `on_meta` builds the model on the meta device; a task's model has its own head.
    """
    here = on_meta(size, layers).parameter_count()
    if here == target:
        return size
    step = on_meta(dataclasses.replace(size, ffn=size.ffn + 1), layers).parameter_count() - here
    if step == 0:
        raise UserError(
            "shape=params cannot be met: the arm has no feed-forward layer whose width could be solved"
        )
    width = size.ffn + round((target - here) / step)
    if width < 1:
        raise UserError(
            f"shape=params cannot be met: without feed-forward layers the arm has {here - size.ffn * step:,} "
            f"parameters, the baseline {target:,}"
        )
    solved = dataclasses.replace(size, ffn=width)
    count = on_meta(solved, layers).parameter_count()
    if abs(count - target) > TOLERANCE * target:
        raise UserError(
            f"shape=params cannot be met within 0.5 %: {count:,} parameters, the baseline has {target:,}"
        )
    return solved


def cache_amount(model: Decoder, context: int = 0) -> int | None:
    """Return the cache bytes of one token in bf16, or of a whole context; None if a layer has no cache."""
    return (
        model.cache_bytes(1, context, torch.bfloat16)
        if context
        else model.cache_bytes_per_token(torch.bfloat16)
    )


def cache_unit(context: int = 0) -> str:
    """Return what `cache_amount` counts."""
    return f"cache bytes at {context:,} tokens" if context else "cache bytes per token"


def match_cache(
    size: Size, layers: tuple[Composed, ...], target: int | None, context: int = 0
) -> tuple[Size, tuple[Composed, ...]]:
    """Return size and layers whose cache bytes equal `target`: those of one token, or of a whole `context`.

    Only one number is solved, the first that gives the target: unset kv heads, at a context the unset rows of states, the
    width. Options given by the arm, the number of heads and the feed-forward width do not change.
    """

    def amount_of(shaped: _Shaped) -> int | None:
        return cache_amount(Decoder.on_meta(*shaped), context)

    unit, here = cache_unit(context), amount_of((size, layers))
    for owner, amount in (("the baseline", target), ("the arm", here)):
        if amount is None:
            raise UserError(f"shape=cache cannot be met: {owner} has no cache (decoding recomputes)")
        if amount == 0 and context:
            raise UserError(f"shape=cache cannot be met: the cache of {owner} is empty")
        if amount == 0:
            raise UserError(
                f"shape=cache cannot be met: the cache of {owner} does not grow with the text; "
                f"cache_at = {size.context} compares whole caches at a context of {size.context} tokens"
            )
    assert target is not None
    assert here is not None
    if here == target:
        return size, layers
    divisors = [count for count in range(1, size.heads) if size.heads % count == 0]
    grouped = [(size, _with_option(layers, _kv_heads, count)) for count in divisors]
    found = _nearest(grouped, target, amount_of) if _unset(layers, _kv_heads) else None
    if _close(found, target):
        return found[1]
    if context and _unset(layers, _state_rows):
        found = _solve(lambda rows: (size, _with_option(layers, _state_rows, rows)), target, amount_of)
        if _close(found, target):
            return found[1]

    def widened(dim: int) -> _Shaped:
        return dataclasses.replace(size, width=dim * size.heads), layers

    head = size.width // size.heads
    if (amount_of(widened(2 * head)) or 0) <= here:
        raise UserError(
            f"shape=cache cannot be met: the arm has {here:,} {unit} at any width, the baseline {target:,}"
        )
    found = _solve(widened, target, amount_of)
    if not _close(found, target):
        nearest = "no width"
        if found is not None:
            nearest = f"{found[0]:,} {unit} at width {found[1][0].width}"
        raise UserError(
            f"shape=cache cannot be met within 0.5 %: nearest is {nearest}, the baseline has {target:,}"
        )
    return found[1]


_NEAR = 8
"""Numbers tried on either side of the solution, since a mechanism may reject some of them."""
_LARGEST = 2**16
_Shaped = tuple[Size, tuple[Composed, ...]]
_Found = tuple[int, _Shaped]


def _close(found: _Found | None, target: int) -> TypeGuard[_Found]:
    """Return whether the bytes found are within the tolerance."""
    return found is not None and abs(found[0] - target) <= TOLERANCE * target


def _solve(
    shaped: Callable[[int], _Shaped], target: int, amount_of: Callable[[_Shaped], int | None]
) -> _Found | None:
    """Return the bytes and shape closest to `target`, by bisection: the bytes grow with the number that gives the shape."""

    def reached(number: int) -> bool:
        found = _nearest([shaped(number)], target, amount_of)
        return found is not None and found[0] >= target

    low, high = 0, 2
    while high < _LARGEST and not reached(high):
        low, high = high, 2 * high
    while high - low > 2:  # even numbers: rotary positions reject odd head widths
        middle = (low + high) // 4 * 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    around = range(max(1, high - _NEAR), high + _NEAR + 1)
    return _nearest(map(shaped, around), target, amount_of)


def _nearest(
    candidates: Iterable[_Shaped], target: int, amount_of: Callable[[_Shaped], int | None]
) -> _Found | None:
    """Return the cache bytes and shape closest to `target` among the valid candidates."""
    found: _Found | None = None
    for shaped in candidates:
        try:
            amount = amount_of(shaped)
        except UserError:
            continue
        if amount is not None and (found is None or abs(amount - target) < abs(found[0] - target)):
            found = amount, shaped
        if amount == target:
            break
    return found


def _kv_heads(options: Any) -> str:
    """Return the name of the option with the number of kv heads."""
    return "kv_heads"


def _state_rows(options: Any) -> str:
    """Return the name of the option with the rows of a state."""
    return getattr(options, "state_rows", "")


def _unset(layers: Sequence[Composed], name_in: Callable[[Any], str]) -> bool:
    """Return whether a layer leaves the option open; its value is then 0."""
    options = [composed.base.options for composed in layers]
    return any(getattr(one, name_in(one) or "none", None) == 0 for one in options)


def _with_option(
    layers: Sequence[Composed], name_in: Callable[[Any], str], value: int
) -> tuple[Composed, ...]:
    """Return the layers with the option set wherever it is unset; mechanisms that reject the value stay unchanged."""
    changed = []
    for composed in layers:
        base = composed.base
        if _unset([composed], name_in):
            try:
                options = dataclasses.replace(base.options, **{name_in(base.options): value})
                composed = Composed((dataclasses.replace(base, options=options), *composed.stages))
            except UserError:
                pass
        changed.append(composed)
    return tuple(changed)


def match_flops(settings: TrainSettings, arm: float, baseline: float) -> TrainSettings:
    """Return settings whose tokens give the arm the baseline's training FLOPs, in whole steps."""
    return _match_tokens("flops", settings, arm, baseline)


def match_time(rule: str, settings: TrainSettings, arm: float, baseline: float) -> TrainSettings:
    """Return settings whose tokens give the arm the baseline's training time, from seconds per token, in whole steps."""
    return _match_tokens(rule, settings, arm, baseline)


def _match_tokens(rule: str, settings: TrainSettings, arm: float, baseline: float) -> TrainSettings:
    tokens = round(settings.tokens // settings.batch * baseline / arm) * settings.batch
    if tokens < settings.batch:
        raise UserError(f"length={rule} cannot be met: at the arm's cost the budget is less than one step")
    return dataclasses.replace(settings, tokens=tokens)
