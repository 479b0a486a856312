"""Fused operations, each with a plain PyTorch reference that defines it."""

# ruff: noqa: F401  the names below are the package's interface

from headtohead.kernels.attention.decode import attend_placed, decode, decode_serves
from headtohead.kernels.attention.linear import linear_attend
from headtohead.kernels.attention.prefix import prefix_softmax
from headtohead.kernels.attention.recurrence import gated_scan, scan_weights
from headtohead.kernels.attention.scored import scored_attend, scored_weights
from headtohead.kernels.attention.sink import sink_attend
from headtohead.kernels.attention.softmax import attend, attention_weights, backend_name
from headtohead.kernels.attention.taylor import taylor_attend
from headtohead.kernels.matmul.loss import linear_cross_entropy, token_nats
from headtohead.kernels.matmul.projection import project, project_joined, weights_kept
from headtohead.kernels.path import path_name, plain, stacking
from headtohead.kernels.pointwise.circle import circle, circle_harmonics, circle_pull
from headtohead.kernels.pointwise.convolution import short_convolution, short_convolution_plain
from headtohead.kernels.pointwise.feedforward import swiglu
from headtohead.kernels.pointwise.norm import rms_norm
from headtohead.kernels.pointwise.rotary import rotary_table, rotate
