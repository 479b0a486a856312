"""CudaGraphStep with a fake graph that only counts replays; `h2h bench population` tests real graphs on a GPU."""

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
    """Replace the parts of torch.cuda that CudaGraphStep uses with no-ops; [False] makes the capture fail."""
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


def test_three_warm_up_steps_run_then_the_fourth_is_captured_and_replayed(able: list[bool]) -> None:
    seen: list[Tensor] = []

    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tokens)
        return tokens.sum(), targets.sum()

    messages: list[str] = []
    step_graph = CudaGraphStep(step, CPU, messages.append)
    for number in range(3):
        assert step_graph(*batch(number))[0].item() == 2 * number
    assert Graph.replays == 0
    outputs = [step_graph(*batch(number)) for number in range(3, 6)]
    assert Graph.replays == 3
    assert len(seen) == 4
    assert seen[3].tolist() == [5, 5]  # the static input to which every batch is copied
    assert len({output[0].data_ptr() for output in outputs}) == 3
    assert messages == []


def test_steps_run_eagerly_when_the_capture_fails(able: list[bool]) -> None:
    able[0] = False
    messages: list[str] = []
    count = [0]

    def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        count[0] += 1
        return tokens.sum(), targets.sum()

    step_graph = CudaGraphStep(step, CPU, messages.append)
    for number in range(6):
        nats, norm = step_graph(*batch(number))
        assert (nats.item(), norm.item()) == (2 * number, -2 * number)
    assert count == [6]
    assert Graph.replays == 0
    assert messages == [
        "steps cannot be captured as a CUDA graph: operation not permitted when stream is capturing"
    ]
