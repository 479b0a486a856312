"""Causal attention with a sink, one more score b without a value in every softmax, by PyTorch's fused kernels.

Attention without the sink returns out and lse = log sum_j e^(s_ij). With it, the output is y = out sigmoid(lse - b) and the
normalizer is total = log(e^lse + e^b). A backward kernel computes ds = e^(s - lse) (dp - sum(dy * out)) from the out and the
lse it is given; from y and total it returns the gradients with the sink. The gradient of b is -sum e^(b - total) sum(dy * y).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.kernels.attention.softmax import backend_name, per_query_head
from headtohead.kernels.vmap import operator

_aten = torch.ops.aten


def sink_serves(q: Tensor) -> bool:
    """Return whether PyTorch has a fused kernel for `q` that returns the sum of each softmax."""
    return q.device.type == "cpu" or (q.is_cuda and torch.version.hip is None and q.dtype != torch.float64)


def sink_attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return causal attention with a sink (batch, heads, time, dim) from q of this shape and k, v (batch, kv_heads, time, dim).

    `bias` (heads,) is the sink's score; None is 0.
    """
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    groups, width = q.shape[1] // k.shape[1], q.shape[-1]
    if groups > 1:
        k, v = (x.transpose(1, 2).repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    if q.is_cuda and width % 8:
        q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
    rows = None if bias is None else bias.expand(q.shape[0], -1)
    mixed: Tensor = torch.ops.headtohead.sink_attend(q, k, v, rows, scale)[0]
    return mixed[..., :width]


def sink_weights(q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return the attention map (batch, heads, queries, keys) of the plain reference; its rows sum to less than 1."""
    scores = (q * scale) @ per_query_head(k, q).mT
    scores = scores.masked_fill(~mask, float("-inf"))
    above = scores.logsumexp(-1, keepdim=True)
    if bias is not None:
        above = above - bias.to(scores.dtype)[:, None, None]
    return torch.softmax(scores, -1) * torch.sigmoid(above)


class Kernel(NamedTuple):
    """Two functions of PyTorch that compute causal attention; all heads have their own keys."""

    forward: Callable[..., Any]
    """(q, k, v, scale) -> (out, lse, ...); lse begins with the sums (batch, heads, time)."""
    backward: Callable[..., Any]
    """(grad, q, k, v, out, lse, scale) -> (dq, dk, dv, ...) with lse (batch, heads, time)."""


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Any:
    unused, time = torch.empty((), dtype=torch.int64, device=q.device), q.shape[-2]
    return _aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse.unsqueeze(-1),
        philox_seed=unused, philox_offset=unused, attn_bias=None, cum_seq_q=None, cum_seq_k=None,
        max_q=time, max_k=time, dropout_p=0.0, is_causal=True, scale=scale,
    )  # fmt: skip


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Any:
    unused, time = torch.empty(2, dtype=torch.uint64, device=q.device), q.shape[-2]
    return _aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse, cum_seq_q=None, cum_seq_k=None, max_q=time, max_k=time,
        dropout_p=0.0, is_causal=True, philox_seed=unused, philox_offset=unused, scale=scale,
    )  # fmt: skip


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Any:
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    # Its blocks have 32 rows; a sum of infinity gives rows that do not exist the weight 0.
    padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    return _aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, None, out, padded, philox_seed=unused, philox_offset=unused, dropout_p=0.0,
        grad_input_mask=[True, True, True, False], is_causal=True, scale=scale,
    )  # fmt: skip


# On CUDA under the names of the backends that standard attention would use.
KERNELS = {
    "cudnn_attention": Kernel(
        lambda q, k, v, scale: _aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=True, scale=scale
        ),
        _cudnn_backward,
    ),
    "flash_attention": Kernel(
        lambda q, k, v, scale: _aten._scaled_dot_product_flash_attention.default(
            q, k, v, is_causal=True, scale=scale
        ),
        _flash_backward,
    ),
    "efficient_attention": Kernel(
        lambda q, k, v, scale: _aten._scaled_dot_product_efficient_attention.default(
            q, k, v, attn_bias=None, compute_log_sumexp=True, is_causal=True, scale=scale
        ),
        _efficient_backward,
    ),
    "cpu": Kernel(
        lambda q, k, v, scale: _aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, is_causal=True, scale=scale
        ),
        lambda grad, q, k, v, out, lse, scale: (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                grad, q, k, v, out, lse, dropout_p=0.0, is_causal=True, scale=scale
            )
        ),
    ),
}


def _kernel(q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    if not q.is_cuda:
        return KERNELS["cpu"]
    return KERNELS.get(backend_name(q, k, v), KERNELS["efficient_attention"])


def _by_token(x: Tensor) -> Tensor:
    """Return x (batch, heads, time, dim) with tokens as the outer dimension in memory.

    The kernels return this layout for such inputs, and some of them require it of `out` without checking.
    """
    batch, head, token, one = x.stride()
    return x if batch >= token >= head >= one == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _empty_outputs(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(q), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


@operator("sink_attend_backward", lambda grad, q, k, v, *rest: (_empty(q), _empty(k), _empty(v)))
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v = _by_token(q), _by_token(k), _by_token(v)
    # cuDNN's plan is chosen by the strides of q, k and v alone; those of out and its gradient have to agree.
    grad, mixed = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, mixed))
    found = _kernel(q, k, v).backward(grad, q, k, v, mixed, total.contiguous(), scale)
    return _by_token(found[0]), _by_token(found[1]), _by_token(found[2])


def _gradients(given: list[Any], grad: Tensor | None, _: Tensor | None) -> tuple[Tensor, ...]:
    if grad is None:  # nothing depends on the mixed values
        return ()
    q, k, v, bias, scale, mixed, total = given
    found = torch.ops.headtohead.sink_attend_backward(grad, q, k, v, mixed, total, scale)
    if bias is None:
        return tuple(found)
    pull = (grad.to(total.dtype) * mixed).sum(-1)
    return *found, -((bias.unsqueeze(-1) - total).exp() * pull).sum(-1).to(bias.dtype)


@operator("sink_attend", _empty_outputs, _gradients, saved=(0, 1))
def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the mixed values and the log of each softmax's sum with the sink; `bias` is (batch, heads)."""
    q, k, v = _by_token(q), _by_token(k), _by_token(v)
    mixed, sums = _kernel(q, k, v).forward(q, k, v, scale)[:2]
    sums = sums.reshape(*q.shape[:2], -1)[..., : q.shape[-2]]
    above = sums if bias is None else sums - bias.unsqueeze(-1)
    total = (sums - F.logsigmoid(above)).contiguous()
    return _by_token(mixed.mul_(above.sigmoid().unsqueeze(-1))), total
