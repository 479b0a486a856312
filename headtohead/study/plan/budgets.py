"""Solves the quantities that are held equal between an arm and the baseline.

shape = as_is    every arm has the size's own dimensions
        params   the arm's feed-forward width is solved so that its parameters equal the baseline's
        cache    the arm's kv heads, if unset, else its width are solved so that the cache bytes of one token (bf16,
                 all layers) equal the baseline's
length = tokens      every arm sees the same tokens
         flops       the arm's tokens are solved so that its training FLOPs equal the baseline's
         time        the arm's tokens are solved so that its training seconds equal the baseline's (plan/step_timing.py)
         time_plain  the same, with every fused operation timed by its plain reference
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

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


def match_cache(
    size: Size, layers: tuple[Composed, ...], target: int | None
) -> tuple[Size, tuple[Composed, ...]]:
    """Return size and layers whose cache bytes per token equal `target`, solved by unset kv heads, else by width.

    Only one number is solved: kv heads given by the arm, the number of heads and the feed-forward width do not change.
    """
    here = _cache_bytes(size, layers)
    for owner, amount in (("the baseline", target), ("the arm", here)):
        if amount is None:
            raise UserError(f"shape=cache cannot be met: {owner} has no cache (decoding recomputes)")
        if amount == 0:
            raise UserError(f"shape=cache cannot be met: the cache of {owner} does not grow with the text")
    assert target is not None
    assert here is not None
    if here == target:
        return size, layers
    divisors = [count for count in range(1, size.heads) if size.heads % count == 0]
    grouped = ((size, _with_kv_heads(layers, count)) for count in divisors)
    found = _nearest(grouped, target) if _open_kv_heads(layers) else None
    if found is not None and abs(found[0] - target) <= TOLERANCE * target:
        return found[1]
    head = size.width // size.heads
    wider = _cache_bytes(dataclasses.replace(size, width=2 * size.width), layers) or 0
    if wider <= here:
        raise UserError(
            f"shape=cache cannot be met: the arm caches {here:,} bytes per token at any width, the baseline {target:,}"
        )
    guess = head + (target - here) * head / (wider - here)
    heads = sorted(
        range(max(1, round(guess) - _NEAR), round(guess) + _NEAR + 1), key=lambda dim: abs(dim - guess)
    )
    widened = ((dataclasses.replace(size, width=dim * size.heads), layers) for dim in heads)
    found = _nearest(widened, target)
    if found is None or abs(found[0] - target) > TOLERANCE * target:
        nearest = f"{found[0]:,} bytes per token at width {found[1][0].width}" if found else "no width"
        raise UserError(
            f"shape=cache cannot be met within 0.5 %: nearest is {nearest}, the baseline has {target:,}"
        )
    return found[1]


_NEAR = 8
"""Head widths tried on either side of the solution, since a mechanism may reject some of them."""
_Shaped = tuple[Size, tuple[Composed, ...]]


def _nearest(candidates: Iterable[_Shaped], target: int) -> tuple[int, _Shaped] | None:
    """Return the cache bytes and shape closest to `target` among the valid candidates."""
    found: tuple[int, _Shaped] | None = None
    for size, layers in candidates:
        try:
            amount = _cache_bytes(size, layers)
        except UserError:
            continue
        if amount is not None and (found is None or abs(amount - target) < abs(found[0] - target)):
            found = amount, (size, layers)
        if amount == target:
            break
    return found


def _cache_bytes(size: Size, layers: Sequence[Composed]) -> int | None:
    return Decoder.on_meta(size, layers).cache_bytes_per_token(torch.bfloat16)


def _open_kv_heads(layers: Sequence[Composed]) -> bool:
    return any(getattr(composed.base.options, "kv_heads", None) == 0 for composed in layers)


def _with_kv_heads(layers: Sequence[Composed], count: int) -> tuple[Composed, ...]:
    """Return the layers with `count` kv heads wherever they are unset; mechanisms that reject `count` stay unchanged."""
    changed = []
    for composed in layers:
        base = composed.base
        if getattr(base.options, "kv_heads", None) == 0:
            try:
                options = dataclasses.replace(base.options, kv_heads=count)
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
