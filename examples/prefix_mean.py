"""A mechanism in one file: the output at each position is the mean of all values so far.

Race it:   h2h race --arms standard examples/prefix_mean.py:PrefixMean --tokens 200k --seeds 3
Check it:  h2h check examples/prefix_mean.py:PrefixMean
"""

import torch
from torch import nn

import headtohead as h2h


class PrefixMean(h2h.Mechanism):
    """The mean of all values so far, through an output projection."""

    supports = h2h.Supports(bidirectional=False, padding=False)

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.v = nn.Linear(shape.width, shape.width, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x, frame):
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return self.o(self.v(x).cumsum(1) / count[:, None])
