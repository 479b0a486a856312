"""Where the runs of a study are executed: on this machine, on a Ray cluster, or as a SLURM job array."""

from __future__ import annotations

from headtohead.common.errors import UserError, unknown
from headtohead.study.run.slurm import SlurmJob

BACKENDS = ("local", "ray", "slurm")


def check_backend(
    on: str, workers: int, cpus_per_run: float | None, gpus_per_run: float | None, slurm: SlurmJob | None
) -> None:
    """Raise UserError if options are given that the backend does not have."""
    if on not in BACKENDS:
        raise unknown("value for on", on, BACKENDS)
    if on == "local" and not (cpus_per_run is None and gpus_per_run is None):
        raise UserError(
            "cpus_per_run and gpus_per_run apply to --on ray and --on slurm; here, give --workers"
        )
    if on != "slurm" and slurm is not None:
        raise UserError("options of a SLURM job apply to --on slurm only; add --on slurm")
    if on == "ray" and workers:
        raise UserError(
            f"workers={workers} is an option of one machine; on Ray, --cpus-per-run and --gpus-per-run decide how many "
            "runs share a node"
        )
