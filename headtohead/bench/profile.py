"""Profile of a step: kernels by device time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
# Kind of work by fragments of the kernel name; the first match counts.
_KINDS = (
    # First, because the compiler names a kernel after all operations it fuses, such as attention and copies.
    ("fused pointwise", ("triton_", "_rope_kernel", "_gate")),
    ("attention", ("cudnn", "sdpa", "flash", "fmha", "attention")),
    ("loss", ("_rows",)),
    ("matrix products", ("gemm", "nvjet", "cutlass", "aten::mm", "aten::addmm", "aten::bmm", "splitK")),
    ("optimiser and clipping", ("adam", "multi_tensor", "lpnorm", "LpNorm")),
    ("copies", ("memcpy", "memset", "copy", "CatArray")),
    ("pointwise, one by one", ("elementwise", "reduce_kernel", "oftmax", "embedding", "scatter", "gather")),
    ("norms and dynamics", ("_forward", "_backward", "norm", "_add_up")),
)


def kernel_times(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return milliseconds per step by kind of work and by kernel (on CPU by operator), longest first."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in found.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key] += spent / 1e3 / STEPS
        calls[event.key] += event.count
    kinds: Counter[str] = Counter()
    for name, spent in times.items():
        kinds[_kind(name)] += spent
    return {
        "milliseconds": round(times.total(), 3),
        "kinds": {name: round(spent, 3) for name, spent in kinds.most_common()},
        "kernels": [
            {"name": name[:100], "milliseconds": round(spent, 3), "calls": calls[name] / STEPS}
            for name, spent in times.most_common(40)
            if spent > 0
        ],
    }


def _kind(name: str) -> str:
    for kind, fragments in _KINDS:
        if any(fragment in name for fragment in fragments):
            return kind
    return "other"
