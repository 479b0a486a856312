"""Probe `indicators`: statistics of each layer's attention maps over held-out windows of the test split."""

from __future__ import annotations

import math

from msgspec import Struct

from headtohead.common.typed import Count
from headtohead.interpret.maps import LayerMap, indicators, layer_maps
from headtohead.study.probes.base import Found, Maybe, Probe, Subject, Unavailable, whole_number

WINDOWS = 16


class LayerIndicators(Struct, frozen=True, omit_defaults=True):
    """The indicators of one layer, or why it has none."""

    layer: Count
    mechanism: str = ""
    none: str = ""
    signed: bool | None = None
    values: dict[str, Maybe] | None = None


class Indicators(Struct, frozen=True, kw_only=True):
    """The result; means are over the layers that have a map."""

    windows: Count
    tokens: int = 0
    layers: list[LayerIndicators]
    mean: dict[str, Maybe]
    log_largest_score: Maybe


def _measure(subject: Subject, argument: str) -> Found:
    windows = subject.windows(int(argument or WINDOWS), subject.model.size.context)
    sums: list[dict[str, float]] = [{} for _ in subject.model.layers]
    last: list[LayerMap] = []
    # One window at a time: the maps of a long context are large.
    for index, window in enumerate(windows.split(1)):
        last = layer_maps(subject.model, window)
        for total, layer in zip(sums, last, strict=True):
            if layer.weights is None:
                continue
            for name, value in indicators(layer.weights, layer.signed).items():
                total[name] = total.get(name, 0.0) + value / len(windows)
            if layer.largest_score is not None:
                peak = math.log(max(layer.largest_score, 1e-30))
                total["log_largest_score"] = max(peak, total.get("log_largest_score", -math.inf))
        subject.progress((index + 1) / len(windows))
    layers = [_layer(index, *pair) for index, pair in enumerate(zip(last, sums, strict=True), 1)]
    known = [total for total in sums if total]
    if not known:
        return Unavailable(layers[0].none)
    names = [name for name in known[0] if all(name in total for total in known)]
    peaks = [total["log_largest_score"] for total in known if "log_largest_score" in total]
    return Indicators(
        windows=len(windows),
        tokens=windows.shape[1],
        layers=layers,
        mean={name: sum(total[name] for total in known) / len(known) for name in names},
        log_largest_score=max(peaks, default=None),
    )


def _layer(index: int, layer: LayerMap, values: dict[str, float]) -> LayerIndicators:
    if layer.weights is None:
        return LayerIndicators(index, layer.mechanism, none=f"{layer.mechanism} gives no attention map")
    return LayerIndicators(index, layer.mechanism, signed=layer.signed, values={**values})


PROBE = Probe(
    f"eight indicators of each layer's attention maps over {WINDOWS} held-out windows, and the largest score",
    _measure,
    Indicators,
    lambda text: whole_number(text, "indicators", "windows", WINDOWS, 4096),
    "number of windows",
    amount=True,
    words={
        "mean.sink": "share of attention on the first token",
        "log_largest_score": "logarithm of the largest score",
    },
)
