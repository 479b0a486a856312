"""The environment of a run: versions, device, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy
import torch
from msgspec import Struct

from headtohead.common import VERSION
from headtohead.common.errors import UserError, unknown
from headtohead.common.typed import Count, Text
from headtohead.kernels import backend_name, path_name
from headtohead.model.sizes import Size

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Environment(Struct, frozen=True, omit_defaults=True):
    """The environment of one start of a run, as stored in environment.json."""

    date: Text = ""
    commit: Text = "unknown"
    headtohead: Text = "unknown"
    python: Text = "unknown"
    torch: Text = "unknown"
    numpy: Text = "unknown"
    device: Text = "unknown"
    threads: Count | Text = "unknown"
    attention: Text = "unknown"
    """The backend of PyTorch's attention."""
    kernels: Text = "unknown"


def choose_device(given: str) -> torch.device:
    """Return the requested device; `auto` selects a GPU if available, else the CPU."""
    if given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = given.partition(":")
    if kind not in ("cpu", "cuda"):
        raise unknown("device", given, ("auto", "cpu", "cuda"))
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' requested, but torch finds no GPU; use cpu or auto")
    there = torch.cuda.device_count() if kind == "cuda" else 1
    if number and number not in map(str, range(there)):
        raise UserError(f"device {given}: this machine has {there} of kind {kind}, counted from 0")
    return torch.device(given)


def choose_devices(given: str) -> tuple[torch.device, ...]:
    """Return the devices of a study: every visible GPU for `cuda`, and for `auto` if there is one; else the one named."""
    first = choose_device(given)
    count = torch.cuda.device_count() if first == torch.device("cuda") else 1
    return tuple(torch.device("cuda", index) for index in range(count)) if count > 1 else (first,)


def check_one_type(devices: Sequence[torch.device]) -> None:
    """Raise UserError if devices differ in type: seconds per step measured on one do not hold for another."""
    names = [device_name(device) for device in devices]
    if len(set(names)) > 1:
        found = ", ".join(f"{device} ({name})" for device, name in zip(devices, names, strict=True))
        raise UserError(
            f"length=time needs GPUs of one type, found {found}: choose one with --device {devices[0]}, "
            f"or several of one type with {_VISIBLE}"
        )


def alone_with(device: str) -> tuple[str, dict[str, str]]:
    """Return the name of a device in a process that sees no other GPU, and that process's environment variables.

    The device is number 0 there: Triton and CUDA graphs use the current device, and the keys of compiled graphs contain
    the number, so that all GPUs share the compile cache.
    """
    kind, _, number = device.partition(":")
    if not number:
        return device, {}
    visible = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    index = int(number)
    return kind, {_VISIBLE: visible[index] if index < len(visible) else number}


@cache
def commit() -> str:
    """Return the commit of this package: H2H_COMMIT, or git's with a mark if files differ from it, or `unknown`."""
    if given := os.environ.get("H2H_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def provenance() -> dict[str, str]:
    """Return the provenance of a measured number: date, commit, versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "headtohead": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which msgspec does not encode
    }


def environment(device: torch.device, size: Size, precision: str) -> Environment:
    """Return the provenance plus device, threads and kernels of this machine."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    probe = torch.zeros(1, size.heads, size.context, size.width // size.heads, dtype=dtype, device=device)
    return Environment(
        **provenance(),
        numpy=numpy.__version__,
        device=device_name(device),
        threads=torch.get_num_threads(),
        attention=backend_name(probe, probe, probe),
        kernels=path_name(device),
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device for display."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {platform.system()})"


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            names = [line.partition(":")[2].strip() for line in stream if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def differences(before: Environment, now: Environment) -> list[str]:
    """Return the changes between two parts of one run that can change the last digits of its result."""
    return [
        f"{key} {then} -> {after}"
        for key in ("torch", "device", "threads")
        if (then := getattr(before, key)) != (after := getattr(now, key))
    ]
