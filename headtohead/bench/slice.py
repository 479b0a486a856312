"""A slice of an arm's model, with few layers and a small vocabulary, whose training step shows the cost of the layers.

On a GPU one block is compiled and used for all layers: compiling whole models of twenty mechanisms at many shapes would
take an hour. The step is forward and backward; the optimizer does not depend on the context.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import FunctionType, MethodType
from typing import Any

import torch

from headtohead.bench.clock import allocated, mean_seconds, peak_bytes, wait
from headtohead.bench.harness import Row, attempt
from headtohead.bench.train import find_shape
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Block, Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size

VOCABULARY = 256
"""With the size's own vocabulary, the readout would dominate a step of two layers and hide differences."""
_BURST_SECONDS, _MAX_STEPS, _WARM = 0.05, 20, 2
_MAX_GRAPHS = 512


@dataclass(frozen=True)
class Slice:
    """One arm at one shape with its measurement settings."""

    arm: str
    size: str
    context: int
    batch: int
    """Sequences per step."""
    layers: int
    width: int
    """Heads and feed-forward width scale with it."""
    precision: str
    device: str
    compiled: bool
    rounds: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.context * self.batch

    @property
    def graph(self) -> Slice:
        """The key of a compiled block, which does not depend on the number of layers."""
        return dataclasses.replace(self, layers=1, rounds=1)

    @property
    def mechanisms(self) -> tuple[Composed, ...]:
        """The mechanism of each layer."""
        return tuple(parse_layout(self.arm).layers(self.layers))

    @property
    def shape(self) -> Size:
        """The reduced size; an arm without support for rotary positions uses learned ones."""
        whole = find_shape(self.size)
        kinds = [composed.base.kind for composed in self.mechanisms]
        able = all("rope" in kind.supports.positions for kind in kinds if issubclass(kind, Mechanism))
        cut = dataclasses.replace(
            whole,
            context=self.context,
            layers=self.layers,
            width=self.width,
            heads=max(1, whole.heads * self.width // whole.width),
            ffn=whole.ffn * self.width // whole.width,
            vocabulary=VOCABULARY,
        )
        return cut if able else cut.with_settings(positions="learned")

    @cached_property
    def declared(self) -> Row:
        """Declared parameters, position encoding, and training FLOPs per step with attention counted by visible keys."""
        model = Decoder.on_meta(self.shape, self.mechanisms)
        flops = 3.0 * self.tokens * model.flops(self.context, self.batch).causal
        parameters, positions = model.parameter_count(), self.shape.settings.positions
        return {"parameters": parameters, "flops": flops, "positions": positions}

    def measure(self) -> Row:
        """Return seconds per step and peak bytes above the model's own, or an error."""
        return attempt(self._measure, name="error")

    def warm(self) -> str:
        """Do the first step, which compiles; return the error, or an empty string."""

        def first() -> Row:
            self._step()()
            wait(torch.device(self.device))
            return {}

        return str(attempt(first, name="error").get("error", ""))

    def _measure(self) -> Row:
        step, device = self._step(), torch.device(self.device)

        def burst(count: int) -> float:
            wait(device)
            return mean_seconds(step, device, count)

        burst(1)
        wait(device)
        peak = peak_bytes(step, device, allocated(device))
        seconds = min(burst(1) for _ in range(_WARM))
        count = max(1, min(_MAX_STEPS, math.ceil(_BURST_SECONDS / seconds)))
        times = [burst(count) for _ in range(self.rounds)]
        return {
            "seconds": statistics.median(times),
            "seconds_all": [float(f"{value:.4g}") for value in times],
            "peak_bytes": peak,
        }

    def _step(self) -> Callable[[], None]:
        """Return a function that runs forward and backward on one batch."""
        size, device = self.shape, torch.device(self.device)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, size.vocabulary, (self.batch + 1, self.context), generator=generator)
        # A companion needs a text of at least the context from any offset.
        text = tokens.flatten().repeat(2)
        model = Decoder(size, self.mechanisms, seed=0, companion=text).to(device).train()
        given, targets = tokens[:-1].to(device), tokens[1:].to(device)
        if self.compiled:
            self._compile(model)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                objective = model(given, targets)[0]
            objective.backward()
            model.zero_grad(set_to_none=True)

        return step

    def _compile(self, model: Decoder) -> None:
        """Use one compiled block for all layers."""
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = _MAX_GRAPHS
        with torch.no_grad():  # builds the rotary tables outside the graph
            model.hidden(torch.zeros(1, self.context, dtype=torch.long, device=self.device))
        # The companion's pass calls a block's `after`, which `forward` also calls; nested compilation breaks in torch 2.11.
        name = "after" if model.companion_spec else "forward"
        for block in model.layers:
            setattr(block, name, MethodType(_own(name, self.graph), block))


def warm_slices(slices: Sequence[Row]) -> Row:
    """Return the error of each slice's first step, which compiles it; called in a worker process."""
    return {"errors": [Slice(**facts).warm() for facts in slices]}


def measure_slice(facts: Row) -> Row:
    """Return the measurements of a slice; called in the worker process that compiled it."""
    return Slice(**facts).measure()


_NUMBER = itertools.count()


@cache
def _own(name: str, graph: Slice) -> Callable[..., Any]:
    """Return the compiled function of a block for one shape of one arm.

    It is a copy with its own code object: graphs are cached per code object, and guards of other arms would access
    attributes this arm does not have.
    """
    plain = getattr(Block, name)
    code = plain.__code__.replace(co_name=f"{name}_{next(_NUMBER)}")
    return torch.compile(FunctionType(code, plain.__globals__, name, plain.__defaults__), dynamic=False)
