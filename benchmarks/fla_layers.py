"""Time our recurrent layers next to those of flash-linear-attention of the same shape: forward and backward of one layer.

    python benchmarks/fla_layers.py --out results/speed/fla-layers.json

Needs a GPU and the packages flash-linear-attention, fla-core and einops. Layers are those of 60m (width 512, 8 heads) on 32,768
tokens at context 2,048, bf16 with float32 weights. Ours are compiled, theirs are timed as they are and compiled. Contenders
take turns in one process; a contender that fails is recorded with the reason.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from headtohead.bench.harness import Contender, Row, Rows, Step, take_turns
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Frame
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

DEVICE = torch.device("cuda")
CONTEXT, TOKENS = 2048, 32_768
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_linear": ("GatedLinearAttention", {"expand_k": 0.5, "expand_v": 1.0}),
    "gated_delta": ("GatedDeltaNet", {"head_dim": 32, "expand_v": 2.0}),
    "gated_delta:decay=channel": ("KimiDeltaAttention", {"head_dim": 32, "expand_v": 2.0}),
    "selective_state": ("Mamba2", {"head_dim": 64, "expand": 1, "state_size": 128}),
}
"""Our arm, and the layer of fla with its settings."""


def step_of(layer: Callable[[torch.Tensor], torch.Tensor], parameters: list[torch.nn.Parameter]) -> Step:
    """Return forward and backward of a layer on one batch of random states."""
    x = torch.randn(TOKENS // CONTEXT, CONTEXT, SIZES["60m"].width, device=DEVICE, requires_grad=True)
    weights = torch.randn_like(x)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            output = layer(x)
        torch.autograd.grad(output, [x, *parameters], weights.to(output.dtype), allow_unused=True)

    return step


def ours(arm: str) -> Step:
    """Return the step of one compiled layer of an arm."""
    model = Decoder(SIZES["60m"], parse_layout(arm).layers(SIZES["60m"].layers), seed=0).to(DEVICE).train()
    layer = model.layers[0].mechanism

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer(x, Frame(time=x.shape[1], training=True))

    return step_of(torch.compile(forward, dynamic=False), list(layer.parameters()))


def theirs(name: str, settings: dict[str, Any], compiled: bool) -> Step:
    """Return the step of a layer of fla."""
    import fla.layers  # type: ignore[import-not-found]

    size = SIZES["60m"]
    kind = getattr(fla.layers, name)
    layer = kind(hidden_size=size.width, num_heads=size.heads, layer_idx=0, **settings).to(DEVICE).train()

    def forward(x: torch.Tensor) -> torch.Tensor:
        found = layer(x)
        return found[0] if isinstance(found, tuple) else found

    return step_of(torch.compile(forward) if compiled else forward, list(layer.parameters()))


def main() -> None:
    """Measure every pair and print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--arms", nargs="+", choices=sorted(PAIRS), default=list(PAIRS))
    given = parser.parse_args()
    try:
        versions = {name: metadata.version(name) for name in ("flash-linear-attention", "triton")}
    except metadata.PackageNotFoundError as error:
        parser.error(f"{error}: install flash-linear-attention, fla-core and einops")
    if not torch.cuda.is_available():
        parser.error("layers of flash-linear-attention need a GPU")
    try:
        rows = Rows("fla-layers", given.out, {"versions": versions})
    except UserError as error:
        parser.error(str(error))
    for arm in given.arms:
        name, settings = PAIRS[arm]
        contenders = [
            Contender(arm, partial(ours, arm)),
            Contender(f"fla {name}", partial(theirs, name, settings, False)),
            Contender(f"fla {name}, compiled", partial(theirs, name, settings, True)),
        ]
        take_turns(
            contenders,
            DEVICE,
            lambda message, share: print(message, file=sys.stderr),
            warm=3,
            burst=20,
            rounds=5,
        )
        found: Row = {
            one.name: {"error": one.error}
            if one.error
            else {"milliseconds": 1e3 * statistics.median(one.times), "peak_bytes": one.peak_bytes}
            for one in contenders
        }
        rows.add({"arm": arm, "context": CONTEXT, "tokens": TOKENS}, {"results": found})
        for contender, result in found.items():
            print(contender, result)
        for one in contenders:
            one.end()


if __name__ == "__main__":
    main()
