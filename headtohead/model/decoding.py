"""Decoding steps at fixed shapes: on a GPU one step is captured as a CUDA graph and replayed for every token.

The token and its position are device tensors; layers get caches of fixed size, and positions after the current one are
masked. So one graph works at every position, and a step costs its kernels, not their launches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.kernels import weights_kept
from headtohead.kernels.cuda_graph import CudaGraph, try_capture
from headtohead.model.decoder import Caches, Decoder

Step = Callable[[Tensor], Tensor]
"""From tokens (batch, 1) to the logits (batch, vocabulary) of the next; appends one token to the caches."""
# Capturing takes about as long as four eager steps; for fewer than twice that it does not pay off.
_WORTH = 8
_FIRST = 2


def decoding(
    model: Decoder, caches: Caches, steps: int, warn: Callable[[str], None] = lambda words: None
) -> Step:
    """Return the step function for `steps` more tokens: a CUDA graph if possible, else eager with the reason to `warn`."""
    if model.readout.device.type != "cuda" or steps < _WORTH:
        return lambda token: one_step(model, caches, token)
    if why := graph_blocker(model, caches):
        warn(f"decoding runs eagerly, without a CUDA graph: {why}")
        return lambda token: one_step(model, caches, token)
    return Decoding(model, caches, warn)


def one_step(model: Decoder, caches: Caches, token: Tensor) -> Tensor:
    """Return the logits (batch, vocabulary) after tokens (batch, 1), by an eager step."""
    return model.logits(token, caches=caches)[:, -1]


def graph_blocker(model: Decoder, caches: Caches) -> str:
    """Return why a step of this model cannot be captured, or an empty string."""
    if caches.padding is not None:
        return "prompts of different lengths are padded"
    if not model.graph_safe:
        names = sorted({block.mechanism.name for block in model.layers if not block.mechanism.graph_safe})
        return f"{', '.join(names) or 'a companion'} does not support it with these options"
    return ""


class Decoding:
    """Steps at fixed shapes; each step overwrites the logits returned by the previous one."""

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
        self._graph: CudaGraph[Tensor] | None = None
        self._able = device.type == "cuda"

    def __call__(self, token: Tensor) -> Tensor:
        """Return the logits (batch, vocabulary) after tokens (batch, 1)."""
        if self.caches.length >= self.room:
            raise UserError(f"the cache holds {self.room} tokens; {self.caches.length + 1} were requested")
        if self._token is None:
            self._token = token.clone()
        self._token.copy_(token)
        self._place.fill_(self.caches.length)
        if self._able and self._graph is None:
            self._capture(self._token)
        scores = self._step(self._token) if self._graph is None else self._graph.replay()
        self.caches.advance(1)
        return scores

    def _step(self, token: Tensor) -> Tensor:
        kind = token.device.type
        # Autocast frees its cast weights when it exits, but a graph that reads them may outlive that: it casts its own.
        own = torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        with own, self.caches.at(self._place), weights_kept(self._weights):
            return one_step(self.model, self.caches, token)

    def _capture(self, token: Tensor) -> None:
        """Capture the step; the warm-up steps write the same token at the same position, and states are restored after them."""
        states = [layer.tensors[name] for layer in self.caches.layers for name in layer.states]
        before = [state.clone() for state in states]

        def failed(reason: str) -> None:
            self._able = False
            self.warn(f"decoding runs eagerly, CUDA graph capture failed: {reason}")

        self._graph = try_capture(lambda: self._step(token), token.device, failed, warmup=_FIRST)
        for state, kept in zip(states, before, strict=True):
            state.copy_(kept)
        # A longer text would replace these tables with longer ones; keep the ones that the graph reads alive.
        self._tables = dict(self.model.rotary.tables) if self.model.rotary is not None else {}
