"""Fused operations, each beside a plain PyTorch twin that defines it."""

from headtohead.kernels.attention import attend, attention_weights, backend_name
from headtohead.kernels.circle import circle, circle_pull
from headtohead.kernels.feedforward import swiglu
from headtohead.kernels.loss import linear_cross_entropy, token_nats
from headtohead.kernels.norm import rms_norm
from headtohead.kernels.path import plain
from headtohead.kernels.projection import project
from headtohead.kernels.rotary import rotary_table, rotate

__all__ = [
    "attend",
    "attention_weights",
    "backend_name",
    "circle",
    "circle_pull",
    "linear_cross_entropy",
    "plain",
    "project",
    "rms_norm",
    "rotary_table",
    "rotate",
    "swiglu",
    "token_nats",
]
