"""Probe `phases`: order parameter, coupling strength and gate entropy of layers whose state is phases."""

from __future__ import annotations

import math

from msgspec import Struct

from headtohead.common.typed import Count, Number
from headtohead.interpret.phases import layer_phases
from headtohead.study.probes.base import Found, Probe, Subject, Unavailable, whole_number

WINDOWS = 16


class Phases(Struct, frozen=True):
    """The result; means are over the layers with phases, of the numbers that all of them have."""

    windows: Count
    chance: Number
    """Order parameter of random phases in a window."""
    layers: list[dict[str, Number] | None]
    """None: a layer without phases."""
    mean: dict[str, Number]


def _measure(subject: Subject, argument: str) -> Found:
    windows = subject.windows(int(argument or WINDOWS), subject.model.size.context)
    sums: list[dict[str, float] | None] = [None] * len(subject.model.layers)
    for index, window in enumerate(windows.split(1)):
        for layer, found in enumerate(layer_phases(subject.model, window)):
            if found is not None:
                before = sums[layer] or dict.fromkeys(found, 0.0)
                sums[layer] = {name: before[name] + value / len(windows) for name, value in found.items()}
        subject.progress((index + 1) / len(windows))
    known = [layer for layer in sums if layer is not None]
    if not known:
        return Unavailable("no layer has phases that are coupled")
    names = [name for name in known[0] if all(name in layer for layer in known)]
    # The mean resultant length of n random phases is about sqrt(pi / (4 n)).
    chance = math.sqrt(math.pi / (4 * windows.shape[1]))
    mean = {name: sum(layer[name] for layer in known) / len(known) for name in names}
    return Phases(len(windows), chance, sums, mean)


PROBE = Probe(
    f"order parameter, coupling strength and gate entropy of each layer's phases over {WINDOWS} held-out windows",
    _measure,
    Phases,
    lambda text: whole_number(text, "phases", "windows", WINDOWS, 4096),
    "number of windows",
    amount=True,
)
