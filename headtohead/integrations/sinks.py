"""Trackers with a common interface: a sink opens a channel per run, and a channel receives its rows.

The extra `[track]` installs both libraries. A sink may raise any exception; forwarder.py then drops it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headtohead.common.errors import UserError, unknown


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for trackers."""

    id: str
    name: str
    study: str
    folder: Path
    """The study's directory."""
    spec: Mapping[str, Any]


class Channel(Protocol):
    """Receives the rows of one run."""

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the numbers of one logged interval."""

    def end(self, state: str, step: int, values: Mapping[str, float]) -> None:
        """Receive the final scores of a run that ended with `state` at `step`, and close."""


class Sink(Protocol):
    """A tracker."""

    name: str

    def open(self, run: TrackedRun) -> Channel:
        """Return the channel of a run; a run tracked before is continued."""


def find_sinks(track: str | Sink | Sequence[str | Sink]) -> list[Sink]:
    """Return the trackers given by name or as objects; the error for a missing library names its extra."""
    given: list[Any] = list(track) if isinstance(track, list | tuple) else [track]
    sinks: list[Sink] = []
    for index, one in enumerate(given):
        if one in given[:index]:
            continue
        if isinstance(one, str):
            if one not in _SINKS:
                raise unknown("tracker", one, _SINKS)
            one = _SINKS[one]()
        if not isinstance(getattr(one, "name", None), str) or not callable(getattr(one, "open", None)):
            raise UserError(f"{one!r} is not a tracker: it needs a name and open(run)")
        sinks.append(one)
    return sinks


def _library(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken installation raises more than ImportError
        raise UserError(
            f"tracker '{name}' cannot be used: {error or type(error).__name__} (pip install {name})"
        ) from None


class TensorBoard:
    """Event files under STUDY/tensorboard, one directory per run."""

    name = "tensorboard"

    def __init__(self) -> None:
        self.writer = _library("torch.utils.tensorboard", self.name).SummaryWriter

    def open(self, run: TrackedRun) -> Channel:
        """Return a writer; events of an earlier session are purged, since every row is sent again."""
        label = re.sub(r"[^\w.,=+()-]+", "_", run.name)[:80]
        writer = self.writer(log_dir=str(run.folder / "tensorboard" / f"{label}_{run.id}"), purge_step=0)
        writer.add_text("spec", f"```\n{json.dumps(run.spec, indent=1)}\n```", 0)
        return _Board(writer)


class _Board:
    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def row(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def end(self, state: str, step: int, values: Mapping[str, float]) -> None:
        self.row(step, values)
        self.writer.add_text("state", state, step)
        self.writer.close()


class WeightsAndBiases:
    """One W&B run per run, grouped by study; the project is WANDB_PROJECT, by default headtohead."""

    name = "wandb"

    def __init__(self) -> None:
        self.library = _library("wandb", self.name)

    def open(self, run: TrackedRun) -> Channel:
        """Return a W&B run with this run's id, so that a resumed run continues."""
        return _Remote(
            self.library.init(
                project=os.environ.get("WANDB_PROJECT") or "headtohead",
                group=run.study,
                name=run.name,
                id=run.id,
                resume="allow",
                config=dict(run.spec),
                dir=str(run.folder),
                reinit="create_new",  # several runs of a study are open at once
            )
        )


class _Remote:
    def __init__(self, run: Any) -> None:
        self.run = run
        self.first = int(run.step)  # W&B accepts each step once

    def row(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.first:
            self.run.log(dict(values), step=step)

    def end(self, state: str, step: int, values: Mapping[str, float]) -> None:
        self.run.summary.update({**values, "state": state})
        self.run.finish(exit_code=0 if state in ("done", "stopped") else 1)


_SINKS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    sink.name: sink for sink in (TensorBoard, WeightsAndBiases)
}
