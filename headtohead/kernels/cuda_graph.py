"""Capture a call as a CUDA graph, which replays its kernels without launching them one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from headtohead.common.errors import first_line

T = TypeVar("T")


def run_beside(call: Callable[[], T], device: torch.device, stream: torch.cuda.Stream) -> T:
    """Return call(), run on another stream that waits for the current one, which then waits for it."""
    here = torch.cuda.current_stream(device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        found = call()
    here.wait_stream(stream)
    return found


class CudaGraph(Generic[T]):
    """A call captured as a CUDA graph after `warmup` eager calls; nothing is computed during the capture.

    The warm-up initializes what cannot be captured, such as libraries, cached tables and allocators.
    """

    def __init__(
        self,
        call: Callable[[], T],
        device: torch.device,
        *,
        warmup: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        stream = stream or torch.cuda.Stream(device)
        for _ in range(warmup):
            run_beside(call, device, stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):  # waits for the device first
            self.outputs = call()

    def replay(self) -> T:
        """Run the captured kernels again; return the outputs, which every replay overwrites."""
        self._graph.replay()
        return self.outputs


def try_capture(
    call: Callable[[], T],
    device: torch.device,
    failed: Callable[[str], None],
    *,
    warmup: int = 0,
    stream: torch.cuda.Stream | None = None,
) -> CudaGraph[T] | None:
    """Return the captured call, or None after `failed` was called with the reason, such as a synchronization."""
    try:
        return CudaGraph(call, device, warmup=warmup, stream=stream)
    except Exception as error:
        failed(first_line(error))
        return None
