"""Fused operations, each with a plain PyTorch reference that defines it."""

from headtohead.kernels.attention.decode import attend_placed, decode, decode_serves
from headtohead.kernels.attention.linear import linear_attend
from headtohead.kernels.attention.prefix import prefix_softmax
from headtohead.kernels.attention.recurrence import decayed_scores, gated_scan
from headtohead.kernels.attention.softmax import attend, attention_weights, backend_name
from headtohead.kernels.attention.taylor import taylor_attend
from headtohead.kernels.matmul.loss import linear_cross_entropy, token_nats
from headtohead.kernels.matmul.projection import project, weights_kept
from headtohead.kernels.path import path_name, plain, stacking
from headtohead.kernels.pointwise.circle import circle, circle_pull
from headtohead.kernels.pointwise.feedforward import swiglu
from headtohead.kernels.pointwise.norm import rms_norm
from headtohead.kernels.pointwise.rotary import rotary_table, rotate

__all__ = [
    "attend",
    "attend_placed",
    "attention_weights",
    "backend_name",
    "circle",
    "circle_pull",
    "decayed_scores",
    "decode",
    "decode_serves",
    "gated_scan",
    "linear_attend",
    "linear_cross_entropy",
    "path_name",
    "plain",
    "prefix_softmax",
    "project",
    "rms_norm",
    "rotary_table",
    "rotate",
    "stacking",
    "swiglu",
    "taylor_attend",
    "token_nats",
    "weights_kept",
]
