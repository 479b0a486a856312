"""Decoding steps at fixed shapes: on a GPU one step is recorded as a CUDA graph and replayed for every token.

The token and its place stand on the device; caches are handed to the layers whole, and nothing behind the place is looked
at. So one graph serves every place, and what a step costs is its kernels, not launching them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headtohead.common.errors import UserError, first_line
from headtohead.kernels import weights_kept
from headtohead.model.decoder import Caches, Decoder

Step = Callable[[Tensor], Tensor]
"""From tokens (batch, 1) to the scores (batch, vocabulary) of the next; the caches hold one token more then."""
# Recording takes as long as about four steps by themselves; for fewer than twice that it is not worth it.
_WORTH = 8
_FIRST = 2


def decoding(
    model: Decoder, caches: Caches, steps: int, warn: Callable[[str], None] = lambda words: None
) -> Step:
    """Return the step for `steps` more tokens: recorded where it can be, else step by step, with a reason given to `warn`."""
    if model.readout.device.type != "cuda" or steps < _WORTH:
        return lambda token: one_step(model, caches, token)
    if why := graph_blocker(model, caches):
        warn(f"decoding goes step by step, not as a CUDA graph: {why}")
        return lambda token: one_step(model, caches, token)
    return Decoding(model, caches, warn)


def one_step(model: Decoder, caches: Caches, token: Tensor) -> Tensor:
    """Return the scores (batch, vocabulary) behind tokens (batch, 1), by a step of its own."""
    return model.logits(token, caches=caches)[:, -1]


def graph_blocker(model: Decoder, caches: Caches) -> str:
    """Return why a step of this model cannot be recorded, or nothing."""
    if caches.padding is not None:
        return "prompts of different lengths are padded"
    if not model.graph_safe:
        names = sorted({block.mechanism.name for block in model.layers if not block.mechanism.graph_safe})
        return f"it does not serve {', '.join(names) or 'a companion'} with these options"
    return ""


class Decoding:
    """Steps at fixed shapes; the scores it returns are overwritten by its next step."""

    def __init__(
        self, model: Decoder, caches: Caches, warn: Callable[[str], None] = lambda words: None
    ) -> None:
        self.model, self.caches, self.warn = model, caches, warn
        device = model.readout.device
        self.room = min(layer.capacity for layer in caches.layers)
        if model.size.settings.positions == "learned":
            self.room = min(self.room, model.size.context)
        if model.rotary is not None:
            model.rotary.reach(self.room)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._token: Tensor | None = None
        self._weights: dict[tuple[int, ...], Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._able = device.type == "cuda"

    def __call__(self, token: Tensor) -> Tensor:
        """Return the scores (batch, vocabulary) behind tokens (batch, 1)."""
        if self.caches.length >= self.room:
            raise UserError(f"the cache holds {self.room} tokens; {self.caches.length + 1} were asked for")
        if self._token is None:
            self._token = token.clone()
        self._token.copy_(token)
        self._place.fill_(self.caches.length)
        if self._able and self._graph is None:
            self._record(self._token)
        if self._graph is None:
            scores = self._step(self._token)
        else:
            self._graph.replay()
            scores = self._scores
        self.caches.advance(1)
        return scores

    def _step(self, token: Tensor) -> Tensor:
        kind = token.device.type
        # Weights that autocast has cast are let go at its end, which a graph that reads them may outlive: it casts its own.
        own = torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        with own, self.caches.at(self._place), weights_kept(self._weights):
            return one_step(self.model, self.caches, token)

    def _record(self, token: Tensor) -> None:
        """Record the step; the steps before it write the same token at the same place, and move nothing."""
        device = token.device
        here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(_FIRST):
                self._step(token)
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                self._scores = self._step(token)
        except Exception as error:
            self._able = False
            self.warn(f"decoding is not recorded as a CUDA graph: {first_line(error)}")
            return
        self._graph = graph
        # A longer text would make longer tables in place of these, which the graph reads as they stand.
        self._tables = dict(self.model.rotary.tables) if self.model.rotary is not None else {}
