"""Benchmarks as documents: what was measured, with provenance."""

from __future__ import annotations

from typing import Any

from headtohead.common.errors import unknown
from headtohead.common.progress import piece_of_work
from headtohead.measure.speed import measure_decode, measure_kernels
from headtohead.study.environment import choose_device, device_name, provenance

MEASURES = {"kernels": measure_kernels, "decode": measure_decode}


def bench(name: str, *, device: str = "auto", quiet: bool = False) -> dict[str, Any]:
    """Return one benchmark's document, `kernels` or `decode`: peers and ours from one process; small sizes on CPU."""
    if name not in MEASURES:
        raise unknown("benchmark", name, MEASURES)
    place = choose_device(device)
    with piece_of_work(f"measuring {name}", quiet) as progress:
        found = MEASURES[name](place, progress)
    return {"benchmark": name, **provenance(), "device": device_name(place), **found}
