"""Trackers behind one interface: a sink opens a channel for each run, and a channel takes its rows.

`[track]` installs both libraries. A sink may raise whatever it likes: whoever follows a study (follow.py) lets go of it.
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
    """A run as a tracker is told of it."""

    id: str
    name: str
    study: str
    folder: Path
    """The study's directory."""
    spec: Mapping[str, Any]


class Channel(Protocol):
    """Takes what one run logs."""

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one logged interval."""

    def end(self, state: str, step: int, values: Mapping[str, float]) -> None:
        """Take the final scores of a run that came to `state` at `step`, and close."""


class Sink(Protocol):
    """A tracker."""

    name: str

    def open(self, run: TrackedRun) -> Channel:
        """Return the channel of a run; one that was tracked before goes on."""


def find_sinks(track: str | Sink | Sequence[str | Sink]) -> list[Sink]:
    """Return the trackers that are meant, by name or given as they are; a missing library is named with its extra."""
    given: list[Any] = list(track) if isinstance(track, list | tuple) else [track]
    sinks: list[Sink] = []
    for place, one in enumerate(given):
        if one in given[:place]:
            continue
        if isinstance(one, str):
            if one not in _SINKS:
                raise unknown("tracker", one, _SINKS)
            one = _SINKS[one]()
        if not isinstance(getattr(one, "name", None), str) or not callable(getattr(one, "open", None)):
            raise UserError(f"{one!r} is no tracker: it needs a name and open(run)")
        sinks.append(one)
    return sinks


def _library(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken installation raises more than ImportError
        raise UserError(
            f"tracker '{name}' cannot be used: {error or type(error).__name__} (pip install headtohead[track])"
        ) from None


class TensorBoard:
    """Event files under STUDY/tensorboard, one directory per run."""

    name = "tensorboard"

    def __init__(self) -> None:
        self.writer = _library("torch.utils.tensorboard", self.name).SummaryWriter

    def open(self, run: TrackedRun) -> Channel:
        """Return a writer; what an earlier stretch wrote is hidden, since every row is sent again."""
        place = re.sub(r"[^\w.,=+()-]+", "_", run.name)[:80]
        writer = self.writer(log_dir=str(run.folder / "tensorboard" / f"{place}_{run.id}"), purge_step=0)
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
    """A run of W&B per run, grouped by study; project WANDB_PROJECT, or headtohead."""

    name = "wandb"

    def __init__(self) -> None:
        self.library = _library("wandb", self.name)

    def open(self, run: TrackedRun) -> Channel:
        """Return a run under this run's own name, so that a repeated stretch goes on where it was."""
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
        self.first = int(run.step)  # W&B takes no step twice

    def row(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.first:
            self.run.log(dict(values), step=step)

    def end(self, state: str, step: int, values: Mapping[str, float]) -> None:
        self.run.summary.update({**values, "state": state})
        self.run.finish(exit_code=0 if state in ("done", "stopped") else 1)


_SINKS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    sink.name: sink for sink in (TensorBoard, WeightsAndBiases)
}
