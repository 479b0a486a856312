"""The recorder's own part, with a graph that only counts: what a GPU does with one is seen by `h2h bench stack`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from headtohead.training.cuda_graph import CudaGraphStep

CPU = torch.device("cpu")


class Stream:
    def wait_stream(self, other: object) -> None: ...


class Graph:
    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether recording works; the pieces of torch.cuda that it takes do nothing."""
    found = [True]

    @contextmanager
    def graph(graph: Graph, stream: Stream) -> Any:
        if not found[0]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield

    @contextmanager
    def stream(stream: Stream) -> Any:
        yield

    Graph.replays = 0
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def batch(number: int) -> tuple[Tensor, Tensor]:
    return torch.full((2,), number), torch.full((2,), -number)


def test_the_first_steps_are_done_then_one_is_recorded_and_replayed(able: list[bool]) -> None:
    seen: list[Tensor] = []

    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tokens)
        return tokens.sum(), targets.sum()

    said: list[str] = []
    recorded = CudaGraphStep(step, CPU, said.append)
    for number in range(3):
        assert recorded(*batch(number))[0].item() == 2 * number
    assert Graph.replays == 0
    outputs = [recorded(*batch(number)) for number in range(3, 6)]
    assert Graph.replays == 3
    assert len(seen) == 4
    assert seen[3].tolist() == [5, 5]  # the place that every batch is copied to
    assert len({output[0].data_ptr() for output in outputs}) == 3
    assert said == []


def test_what_cannot_be_recorded_goes_on_step_by_step(able: list[bool]) -> None:
    able[0] = False
    said: list[str] = []
    count = [0]

    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        count[0] += 1
        return tokens.sum(), targets.sum()

    recorded = CudaGraphStep(step, CPU, said.append)
    for number in range(6):
        nats, norm = recorded(*batch(number))
        assert (nats.item(), norm.item()) == (2 * number, -2 * number)
    assert count == [6]
    assert Graph.replays == 0
    assert said == [
        "steps are not recorded as a CUDA graph: operation not permitted when stream is capturing"
    ]
