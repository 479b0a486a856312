"""Mechanisms as users write them: copies of standard, and cheats that each use forbidden information."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.nn import functional as F

import headtohead as h2h


class Copy(h2h.Mechanism):
    """Standard attention, written by hand."""

    supports = h2h.Supports(bidirectional=False)

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def mix(self, q, k, v, frame):
        return frame.attend(q, k, v)

    def heads(self, x):
        return x.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)

    def forward(self, x, frame):
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        return self.o(self.mix(frame.rotate(q), frame.rotate(k), v, frame).transpose(1, 2).flatten(2))


class Fused(Copy):
    """With PyTorch's kernel."""

    def mix(self, q, k, v, frame):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Masked(Copy):
    """With the whole map in memory."""

    window = 0

    def mix(self, q, k, v, frame):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if self.window:
            mask = mask & ~mask.tril(-self.window)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


class Windowed(Masked):
    """Computes the whole map and masks all of it except a window."""

    window = 8


class Understated(Copy):
    """Declares zero FLOPs."""

    def flops(self, context, batch=1, mode="train"):
        return h2h.Flops(1.0, 1.0)


class LooksAtValues(Fused):
    """FLOPs cannot be counted without values."""

    def forward(self, x, frame):
        return super().forward(x, frame) if bool(x.abs().max() < 1e9) else x


class OneContext(Copy):
    """Supports one context only."""

    def forward(self, x, frame):
        if x.shape[1] != self.shape.context:
            raise ValueError("another context")
        return super().forward(x, frame)


# Cheats.


class Peek(Copy):
    """No mask."""

    def mix(self, q, k, v, frame):
        return F.scaled_dot_product_attention(q, k, v)


class PeekBeyond64(Copy):
    """No mask in contexts of more than 64 tokens."""

    def mix(self, q, k, v, frame):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] <= 64)


class PeekFar(Copy):
    """A token attends to tokens more than 64 positions later."""

    def mix(self, q, k, v, frame):
        return frame.attend(q, k, v) + 0.1 * F.pad(v, (0, 0, 0, 65))[:, :, 65:]


class PeekInTraining(Copy):
    """No mask in training mode."""

    def mix(self, q, k, v, frame):
        return F.scaled_dot_product_attention(q, k, v, is_causal=not self.training)


class PeekInEvaluation(Copy):
    """No mask in evaluation mode."""

    def mix(self, q, k, v, frame):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.training)


class PeekInLargeBatches(Copy):
    """No mask in batches of more than 16 sequences."""

    def mix(self, q, k, v, frame):
        return F.scaled_dot_product_attention(q, k, v, is_causal=len(q) <= 16)


class PeekInPairs(Copy):
    """Tokens 0 and 1, 2 and 3, ... attend to each other."""

    def mix(self, q, k, v, frame):
        pairs = v.unflatten(2, (-1, 2)).flip(3).flatten(2, 3) if v.shape[2] % 2 == 0 else v
        return frame.attend(q, k, v) + 0.1 * pairs


class PeekAtTheEndsOfChunks(Copy):
    """Only the last token of every 48 reads the next one."""

    def mix(self, q, k, v, frame):
        read = torch.zeros_like(v)
        read[:, :, 47:-1:48] = 0.1 * v[:, :, 48::48]
        return frame.attend(q, k, v) + read


class PeekBehindAGate(Copy):
    """The next token, behind a parameter that starts at zero."""

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x, frame):
        return super().forward(x, frame) + self.open() * x.roll(-1, 1)

    def open(self):
        return self.gate


class PeekBehindARectifier(PeekBehindAGate):
    """The gate opens for one sign only."""

    def open(self):
        return self.gate.relu()


class PeekBehindARectifierDown(PeekBehindAGate):
    """The gate opens for the other sign only."""

    def open(self):
        return (-self.gate).relu()


class PeekInTheNoise(Copy):
    """A leak below larger noise that no seed repeats."""

    def forward(self, x, frame):
        generator = torch.Generator()
        generator.seed()
        noise = torch.randn(x.shape, generator=generator).to(x.device)
        return super().forward(x, frame) + 0.1 * x.roll(-1, 1) + 2 * noise


class PeekDetached(Copy):
    """A leak without a gradient."""

    def forward(self, x, frame):
        return super().forward(x, frame) + 0.1 * x.detach().roll(-1, 1)


class NormedOverTime(Copy):
    """Normalized with statistics over the whole sequence."""

    def forward(self, x, frame):
        return super().forward((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), frame)


class BatchNormed(Copy):
    """Normalized with statistics over sequences and time, and running ones in evaluation."""

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.norm = nn.BatchNorm1d(shape.width)

    def forward(self, x, frame):
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2), frame)


class AcrossTheBatch(Copy):
    """Adds the mean of all sequences."""

    def forward(self, x, frame):
        return super().forward(x, frame) + 0.1 * x.mean(0, keepdim=True)


class Keeps(Copy):
    """Stores the last input in a buffer."""

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.register_buffer("last", torch.zeros(shape.width), persistent=False)

    def forward(self, x, frame):
        output = super().forward(x, frame) + 0.1 * self.last
        self.last = x.detach().mean((0, 1))
        return output


class KeepsASum(Keeps):
    """Stores the sum of all inputs so far in a buffer."""

    def forward(self, x, frame):
        before = self.last
        output = super().forward(x, frame)
        self.last = before + self.last
        return output


_SEEN = {}


class KeepsOutside(Copy):
    """Stores the last input in a module-level variable."""

    def forward(self, x, frame):
        output = super().forward(x, frame) + 0.1 * _SEEN.get("x", torch.zeros_like(x[0, 0]))
        _SEEN["x"] = x.detach().mean((0, 1))
        return output


class NotFinite(Copy):
    """Divides zero by zero."""

    def forward(self, x, frame):
        return super().forward(x, frame) + 0 * x / (x - x)


class IgnoresPadding(Copy):
    """Treats padding as tokens; bidirectional if the frame is."""

    supports = h2h.Supports()

    def mix(self, q, k, v, frame):
        frame.padding = None
        return frame.attend(q, k, v)


# No cheats.


class Dropped(Copy):
    """Dropout inside."""

    def forward(self, x, frame):
        return F.dropout(super().forward(x, frame), 0.3, self.training)


class AddsLoss(Copy):
    """A training loss over the whole sequence, with a parameter that nothing else trains."""

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.scale = nn.Parameter(torch.ones(shape.width))

    def forward(self, x, frame):
        output = super().forward(x, frame)
        frame.add_loss("size", 1e-3 * (output.mean(1) * self.scale).square().mean())
        return output


class Rolls(Copy):
    """Adds noise that no seed repeats."""

    def forward(self, x, frame):
        generator = torch.Generator()
        generator.seed()
        return super().forward(x, frame) * (1 + 1e-3 * torch.rand(x.shape, generator=generator).to(x.device))


class Idle(Copy):
    """Has an unused parameter."""

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.unused = nn.Parameter(torch.ones(3))


class Narrow(Copy):
    """Takes the logarithm of a parameter, which is defined only near its initial value."""

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.decay = nn.Parameter(torch.full((shape.width,), 0.02))

    def forward(self, x, frame):
        return super().forward(x, frame) * self.decay.log()


class GlobalShift(Copy):
    """Subtracts the largest score of the whole map: future tokens have an effect only by rounding."""

    def mix(self, q, k, v, frame):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        weights = (scores - scores.amax((-2, -1), keepdim=True)).exp() * mask
        return weights @ v / weights.sum(-1, keepdim=True)


class Fourier(Copy):
    """A causal convolution by Fourier transform: future tokens have an effect only by rounding."""

    def forward(self, x, frame):
        time = x.shape[1]
        kernel = torch.exp(-torch.arange(time, device=x.device) / 8.0)[:, None]
        wide = torch.fft.rfft(self.v(x).float(), 2 * time, dim=1) * torch.fft.rfft(kernel, 2 * time, dim=0)
        return self.o(torch.fft.irfft(wide, 2 * time, dim=1)[:, :time].to(x.dtype))


class Awakes(Copy):
    """A leak that opens between two values of a parameter, which training passes and noise does not hit."""

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x, frame):
        frame.add_loss("open", (self.gate - 1).square().mean())
        size = self.gate.abs()
        opened = bool(((size > 0.002) & (size < 0.1)).all())
        return super().forward(x, frame) + (x.roll(-1, 1) if opened else 0.0)


class Raises(Copy):
    """Its FLOPs can be counted, but it cannot run."""

    def forward(self, x, frame):
        if x.device.type != "meta":
            raise ValueError("no such luck")
        return super().forward(x, frame)


class Kills(Copy):
    """Terminates its process."""

    def forward(self, x, frame):
        if x.device.type != "meta":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x, frame)


class Prints(Copy):
    """Prints without a newline."""

    def forward(self, x, frame):
        print("forward", end=" ")
        return super().forward(x, frame)
