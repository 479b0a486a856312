"""Run whole training steps as one CUDA graph: launching a small model's kernels takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headtohead.kernels.cuda_graph import CudaGraph, run_beside, try_capture

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps tokens and targets to nats and gradient norm, all on the device; forward, backward, clipping, optimizer."""
# Eager steps before the capture, in which allocators, tables and the optimizer's state are initialized.
_WARMUP = 3


class CudaGraphStep:
    """Runs three warm-up steps, captures the fourth as a CUDA graph, then replays it; every call is one training step.

    If the capture fails, for example because the step synchronizes with the device, warns and keeps running eager steps.
    """

    def __init__(self, step: Step, device: torch.device, warn: Callable[[str], None]) -> None:
        self.step, self.device, self.warn = step, device, warn
        self._left = _WARMUP
        self._able = True
        self._graph: CudaGraph[tuple[Tensor, Tensor]] | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Do one step."""
        if self._graph is None and self._able and not self._left:
            self._capture(tokens, targets)
        if self._graph is None:
            return self._eager(tokens, targets)
        for static, given in zip(self._inputs, (tokens, targets), strict=True):
            static.copy_(given)
        nats, norm = self._graph.replay()
        return nats.clone(), norm.clone()

    def _eager(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not self._able:
            return self.step(tokens, targets)
        self._left -= 1
        self._stream = self._stream or torch.cuda.Stream(self.device)
        return run_beside(lambda: self.step(tokens, targets), self.device, self._stream)

    def _capture(self, tokens: Tensor, targets: Tensor) -> None:
        static = tokens.clone(), targets.clone()

        def failed(reason: str) -> None:
            self._able = False
            self.warn(f"steps cannot be captured as a CUDA graph: {reason}")

        self._inputs = static
        self._graph = try_capture(lambda: self.step(*static), self.device, failed, stream=self._stream)
