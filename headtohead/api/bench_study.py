"""Benchmark of a whole study: wall-clock time by phase, throughput, and the share of time in which the device worked."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from headtohead.api.study import Study, processes, study_devices
from headtohead.common.errors import UserError
from headtohead.study.environment import device_name, provenance
from headtohead.study.store.run_store import Store


def bench_study(
    study: Study,
    *,
    out: str | Path | None = None,
    device: str = "auto",
    workers: int = 0,
    threads: int = 1,
    **how: Any,
) -> dict[str, Any]:
    """Run a study in a new directory and return where its time went; `how` are further arguments of `Study.run`.

    Seconds in which several runs were in different phases are divided equally among the runs. `idle` are those without
    a run, such as the start of worker processes. The directory is temporary unless `out` is given.
    """
    if out is not None and Path(out).exists() and any(Path(out).iterdir()):
        raise UserError(f"{out} is not empty; a benchmark trains every run, so give a new directory")
    if how.get("reuse"):
        raise UserError("a benchmark trains every run; leave out reuse")
    devices = study_devices(study.spec, device)
    with tempfile.TemporaryDirectory(prefix="h2h-bench-") as temporary:
        folder = Path(temporary) / "study" if out is None else Path(out)
        began = time.monotonic()
        with _Utilization([one.index or 0 for one in devices if one.type == "cuda"]) as busy:
            result = study.run(folder, device=device, workers=workers, threads=threads, **how)
        wall = time.monotonic() - began
        rows = _runs(Store(folder))
    tokens = sum(row["tokens"] for row in rows)
    return {
        "benchmark": "study",
        **provenance(),
        "device": device_name(devices[0]),
        "study": study.spec.name,
        "workers": processes(devices, workers, threads),
        "runs": len(rows),
        "left": result.summary.left,
        "populations": sorted({row["rows"] for row in rows}),
        "tokens": tokens,
        "seconds": round(wall, 2),
        "tokens_per_second": round(tokens / wall, 1),
        "phases": {name: round(seconds, 2) for name, seconds in result.phases.items()},
        "compile_seconds": round(sum(row["compile_seconds"] for row in rows), 2),
        "device_busy": busy.share,
    }


def _runs(store: Store) -> list[dict[str, Any]]:
    """Return the trained tokens, the rows of the population and the compile seconds of every finished run."""
    found = []
    for run in store.runs():
        if (result := run.result()) is None:
            continue
        spec, cost = run.spec(), run.costs()
        before = spec.parent.step * spec.training.batch if spec.parent else 0
        found.append(
            {
                "tokens": (result.tokens or 0) - before,
                "rows": int(cost.stacked or 1),
                "compile_seconds": cost.compile_seconds or 0.0,
            }
        )
    return found


class _Utilization:
    """Samples the share of time in which GPUs ran kernels, with nvidia-smi; `share` is None where there is none."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.share: float | None = None
        self.samples: list[float] = []
        self.process: subprocess.Popen[str] | None = None
        program = shutil.which("nvidia-smi")
        if indices and program:
            command = [program, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "500"]
            self.process = subprocess.Popen(
                [*command, "-i", ",".join(map(str, indices))],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip().isdigit():
                self.samples.append(int(line) / 100)

    def __enter__(self) -> _Utilization:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        self.share = round(fmean(self.samples), 3) if self.samples else None
