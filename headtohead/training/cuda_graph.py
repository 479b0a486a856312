"""Whole training steps as one CUDA graph: a small model's kernels take less time than launching them one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headtohead.common.errors import first_line

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From tokens and targets on the device to nats and gradient norm there; forward, backward, clipping, optimiser."""
VERIFIED_MECHANISMS = frozenset(
    {"standard", "coupled", "sharing", "kuramoto", "differential", "approximate", "latent"}
)
"""Mechanisms whose recorded steps were compared with steps one by one on a GPU; gated_linear's were found to differ."""
# Steps that run as they are: allocators, tables and the optimiser's state settle in them.
_FIRST = 3


class CudaGraphStep:
    """Does the first steps one by one, records the next and from then on replays it; every call is one real step.

    A step that cannot be recorded, such as one that asks the device for a number, goes on as it is, and that is said.
    """

    def __init__(self, step: Step, device: torch.device, warn: Callable[[str], None]) -> None:
        self.step, self.device, self.warn = step, device, warn
        self._left = _FIRST
        self._able = True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Do one step."""
        if self._graph is None and self._able and not self._left:
            self._record(tokens, targets)
        if self._graph is None:
            return self._one_by_one(tokens, targets)
        for place, given in zip(self._inputs, (tokens, targets), strict=True):
            place.copy_(given)
        self._graph.replay()
        nats, norm = (output.clone() for output in self._outputs)
        return nats, norm

    def _one_by_one(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not self._able:
            return self.step(tokens, targets)
        self._left -= 1
        here, side = torch.cuda.current_stream(self.device), self._side()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            found = self.step(tokens, targets)
        here.wait_stream(side)
        return found

    def _side(self) -> torch.cuda.Stream:
        if not hasattr(self, "_stream"):
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def _record(self, tokens: Tensor, targets: Tensor) -> None:
        """Record a step; nothing is computed while it is recorded."""
        inputs = tokens.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(graph, stream=self._side()):
                outputs = self.step(*inputs)
        except Exception as error:
            self._able = False
            self.warn(f"steps are not recorded as a CUDA graph: {first_line(error)}")
            return
        self._graph, self._inputs, self._outputs = graph, inputs, outputs
