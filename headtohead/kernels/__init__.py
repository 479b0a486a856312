"""Fused operations, each beside a plain PyTorch twin that defines it."""

from headtohead.kernels.attention import attend, attention_weights, backend_name
from headtohead.kernels.circle import circle, circle_pull
from headtohead.kernels.decode import attend_placed, decode, decode_serves
from headtohead.kernels.feedforward import swiglu
from headtohead.kernels.linear import linear_attend
from headtohead.kernels.loss import linear_cross_entropy, token_nats
from headtohead.kernels.norm import rms_norm
from headtohead.kernels.path import path_name, plain, stacking
from headtohead.kernels.prefix import prefix_softmax
from headtohead.kernels.projection import project, weights_kept
from headtohead.kernels.recurrence import decayed_scores, gated_scan
from headtohead.kernels.rotary import rotary_table, rotate
from headtohead.kernels.taylor import taylor_attend

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
