"""Models for tasks, on the mechanisms and layouts of the decoder: a reader, a classifier, one that points at a span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import linear_cross_entropy
from headtohead.mechanisms.contract.base import Frame
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Caches, Decoder, Text
from headtohead.model.sizes import Size


class Reader(Decoder):
    """A decoder that is asked for tokens at some places alone; it looks back, or both ways.

    Its parameters have the decoder's names, start values and circuits, so that it can start from a trained run.
    """

    def __init__(
        self,
        size: Size,
        layers: Sequence[Composed],
        seed: int | None = 0,
        companion: Text | None = None,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__(size, layers, seed, companion)
        self.causal = causal
        self._check_supported(padded=False, causal=causal)

    def hidden(
        self,
        tokens: Tensor,
        *,
        caches: Caches | None = None,
        padding: Tensor | None = None,
        causal: bool | None = None,
        frame: Frame | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the decoder's normed states (batch, time, features); looks both ways where the model does."""
        chosen = self.causal if causal is None else causal
        if caches is not None and not chosen:
            raise UserError("a model that looks both ways cannot decode from a cache")
        return super().hidden(tokens, caches=caches, padding=padding, causal=chosen, frame=frame, rows=rows)

    def forward(
        self, tokens: Tensor, targets: Tensor, smoothing: float = 0.0, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return (objective to descend, mean nats per target, the mechanisms' own loss terms).

        targets (batch, time) are -1 where nothing is asked; padding (batch, time) is true at real tokens.
        """
        frame = Frame()
        x = self.hidden(tokens, padding=padding, frame=frame)
        weight, bias = self._readout()
        objective, nats = linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), smoothing, bias)
        return self._with_own_terms(objective, nats, frame)

    def _with_own_terms(
        self, objective: Tensor, nats: Tensor, frame: Frame
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        for value in frame.losses.values():
            objective = objective + value
        return objective, nats, {name: value.detach() for name, value in frame.losses.items()}

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights of a trained decoder of the same shape; a head of another kind keeps its start values."""
        own = dict(self.state_dict())
        body = {name: tensor for name, tensor in weights.items() if not name.startswith("head.")}
        wanted = {name for name in own if not name.startswith("head.")}
        for name in sorted(wanted ^ body.keys()):
            where = "the trained run has none" if name in wanted else "this model has none"
            raise UserError(f"the trained run does not fit this model: {name}: {where}")
        for name in sorted(wanted):
            if body[name].shape != own[name].shape:
                shapes = f"{tuple(body[name].shape)}, and here {tuple(own[name].shape)}"
                raise UserError(f"the trained run does not fit this model: {name} is {shapes}")
        heads = {name: weights[name] for name in own if name in weights and name not in wanted}
        if all(heads[name].shape == own[name].shape for name in heads):
            body |= heads
        self.load_state_dict(own | body)


class Headed(Reader):
    """A reader with a small head of its own in place of the vocabulary."""

    outputs = 2

    def _head(self) -> nn.Module:
        return nn.Linear(self.spaces[-1].feature_width, self.outputs)

    def _readout(self) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self.head, nn.Linear)
        return self.head.weight, self.head.bias

    def _scores(self, x: Tensor) -> Tensor:
        weight, bias = self._readout()
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Classifier(Headed):
    """Reads one of several classes at the last real token of each sequence; targets hold it there."""

    def __init__(
        self,
        size: Size,
        layers: Sequence[Composed],
        classes: int,
        seed: int | None = 0,
        companion: Text | None = None,
        *,
        causal: bool = True,
    ) -> None:
        if classes < 2:
            raise UserError(f"{classes} classes leave nothing to decide; at least 2 are needed")
        self.outputs = classes
        super().__init__(size, layers, seed, companion, causal=causal)

    def scores(
        self, tokens: Tensor, ends: Tensor, padding: Tensor | None = None, frame: Frame | None = None
    ) -> Tensor:
        """Return (batch, classes) read at the places `ends` (batch,) of tokens (batch, time)."""
        return self._scores(self.hidden(tokens, padding=padding, rows=ends, frame=frame).squeeze(1))


class Pointer(Headed):
    """Points at the first and the last token of an answer: two scores at every token."""

    def forward(
        self, tokens: Tensor, targets: Tensor, smoothing: float = 0.0, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return what a reader returns; targets (batch, 2) are the places of the first and the last token."""
        frame = Frame()
        scores = self._ends(self.hidden(tokens, padding=padding, frame=frame), padding)
        chances = scores.flatten(0, 1).log_softmax(-1)
        objective = F.nll_loss(chances, targets.flatten())
        nats = objective.detach()
        if smoothing:  # over real tokens alone
            real = torch.isfinite(chances)
            spread = -chances.masked_fill(~real, 0.0).sum(-1) / real.sum(-1)
            objective = (1 - smoothing) * objective + smoothing * spread.mean()
        return self._with_own_terms(objective, nats, frame)

    def spans(self, tokens: Tensor, padding: Tensor | None = None, most: int = 30) -> Tensor:
        """Return (batch, 2): first and last token of the likeliest span of at most so many tokens."""
        first, last = self.chances(tokens, padding).unbind(1)
        time = tokens.shape[1]
        both = first[:, :, None] + last[:, None, :]
        distance = (
            torch.arange(time, device=tokens.device) - torch.arange(time, device=tokens.device)[:, None]
        )
        best = both.masked_fill((distance < 0) | (distance >= most), -torch.inf).flatten(1).argmax(-1)
        return torch.stack([best // time, best % time], 1)

    def chances(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return (batch, 2, time): the logarithm of each token's chance to be the first, and the last."""
        return self.ends(tokens, padding).log_softmax(-1)

    def ends(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return (batch, 2, time): scores of each token as the first and as the last of the answer."""
        return self._ends(self.hidden(tokens, padding=padding), padding)

    def _ends(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return (batch, 2, time): scores of each token as the first and as the last, none at padding."""
        scores = self._scores(x).transpose(1, 2).float()
        return scores if padding is None else scores.masked_fill(~padding[:, None], -torch.inf)
