"""Probe `decode`: greedy decoding speed of a trained model with its cache, on the device named in the result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from msgspec import Struct
from torch import Tensor

from headtohead.common.progress import part_of
from headtohead.common.typed import Count, Number
from headtohead.model.decoder import Decoder
from headtohead.model.decoding import one_step
from headtohead.study.environment import device_name
from headtohead.study.probes.base import Found, Maybe, Probe, Subject

BATCHES = (1, 8)
STEPS = 24
_WARM = 3
HEADLINE = "batch 8, full"


class DecodeSpeed(Struct, frozen=True, kw_only=True):
    """The result."""

    device: str
    threads: int = 0
    precision: str = ""
    cached: bool
    context: Count
    steps: int = 0
    tokens_per_second: dict[str, Number]
    """By batch and fill of the window."""
    headline: Number
    bytes: Maybe
    """Of the weights and of a full cache; None without a cache."""


def _measure(subject: Subject, _: str) -> Found:
    model = subject.model
    room = model.size.context
    if model.companion_spec is not None:
        room = min(room, model.companion_spec.length)
    steps = max(1, min(STEPS, room // 4))
    fills = {"half": room // 2, "full": room}
    rates: dict[str, float] = {}
    for batch in BATCHES:
        for name, filled in fills.items():
            prompt = subject.windows(batch, max(1, filled - steps))
            prompt = prompt.repeat(-(-batch // len(prompt)), 1)[:batch]
            progress = part_of(subject.progress, len(rates), len(rates) + 1, len(BATCHES) * len(fills))
            rates[f"batch {batch}, {name}"] = batch / _seconds(model, prompt, steps, progress)
    weights = sum(value.numel() * value.element_size() for value in model.parameters())
    cache = model.cache_bytes(BATCHES[-1], room, model.readout.dtype)
    return DecodeSpeed(
        device=device_name(subject.device),
        threads=torch.get_num_threads(),
        precision=str(model.readout.dtype).removeprefix("torch."),
        cached=model.decodable,
        context=room,
        steps=steps,
        tokens_per_second=rates,
        headline=rates[HEADLINE],
        bytes=None if cache is None else weights + cache,
    )


@torch.inference_mode()
def _seconds(model: Decoder, prompt: Tensor, steps: int, progress: Callable[[float], None]) -> float:
    """Return the median seconds of one greedy step at the end of a window; without a cache the window is recomputed.

    No arm uses a CUDA graph here: not every mechanism supports one, and the others would pay for kernel launches
    (`h2h bench generate` times captured steps).
    """
    caches = model.new_caches(len(prompt), prompt.shape[1] + steps) if model.decodable else None
    token = model.logits(prompt, caches=caches)[:, -1].argmax(-1, keepdim=True)
    taken = []
    for _ in range(steps):
        if caches is None:
            prompt = torch.cat((prompt, token), 1)
        _wait(prompt)
        began = time.perf_counter()
        scores = model.logits(prompt)[:, -1] if caches is None else one_step(model, caches, token)
        token = scores.argmax(-1, keepdim=True)
        _wait(token)
        taken.append(time.perf_counter() - began)
        progress(len(taken) / steps)
    return max(1e-9, statistics.median(taken[_WARM:] or taken))


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


PROBE = Probe(
    "decode tokens per second of the trained model: greedy, with its cache, batch 1 and 8, window half full and full; "
    "measured on this device",
    _measure,
    DecodeSpeed,
    timed=True,
    words={
        "headline": f"decode tokens per second, {HEADLINE} window",
        "bytes": "bytes of weights and cache",
    },
)
