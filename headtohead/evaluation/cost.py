"""Cost of an arm by formula: parameters, FLOPs and cache.

Convention: a multiply-add is 2 FLOPs; matrix products and attention count, pointwise work does not; forward only, per
token. `causal` counts the keys a query sees, `full` all keys of the window. A training step costs three forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder
from headtohead.model.sizes import Size

FORMULAS = 1
"""The version of these formulas. Raise it when a count of an existing arm changes, so that stored counts keep their meaning."""


def arm_cost(
    size: Size,
    layers: Sequence[Composed],
    context: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
) -> dict[str, Any]:
    """Return the cost of one arm at a size and context; cache sizes are None if a layer has no cache.

    `cache_bytes` is the whole cache of one sequence at this context, in which a window keeps only its last tokens.
    Work that `batch` sequences share, such as a companion, is divided among them.
    """
    context = context or size.context
    model = Decoder.on_meta(size, layers)
    train, decode = model.flops(context, batch), model.flops(context, batch, "decode")
    return {
        "parameters": model.parameter_count(),
        "context": context,
        "batch": batch,
        "flops_per_token": {"causal": train.causal, "full": train.full},
        "decode_flops_per_token": decode.causal,
        "cache_bytes_per_token": model.cache_bytes_per_token(dtype),
        "cache_bytes_per_sequence": model.cache_bytes(1, 1, dtype, ("sequence",)),
        "cache_bytes_shared": model.cache_bytes(1, 1, dtype, ("shared",)),
        "cache_bytes": model.cache_bytes(1, context, dtype),
        "cache_dtype": str(dtype).removeprefix("torch."),
        "decodable": model.decodable,
    }


def attention_parameters(size: Size, layers: Sequence[Composed]) -> list[int]:
    """Return the number of parameters of each layer's mechanism, including its stages."""
    blocks = Decoder.on_meta(size, layers).layers
    return [sum(parameter.numel() for parameter in block.mechanism.parameters()) for block in blocks]
