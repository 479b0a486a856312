"""Models for tasks, with the mechanisms and layouts of the decoder: a reader, a classifier and a span pointer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Frame
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.decoder import Decoder, Text
from headtohead.model.sizes import Size


class Reader(Decoder):
    """A decoder that predicts tokens only at selected positions, causal or bidirectional.

    Its parameters have the decoder's names, initial values and circuits, so that it can start from a trained run.
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

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a trained decoder of the same shape; a head of another kind keeps its initial values."""
        own = dict(self.state_dict())
        body = {name: tensor for name, tensor in weights.items() if not name.startswith("head.")}
        wanted = {name for name in own if not name.startswith("head.")}
        for name in sorted(wanted ^ body.keys()):
            where = "missing in the trained run" if name in wanted else "missing in this model"
            raise UserError(f"the trained run does not fit this model: {name} is {where}")
        for name in sorted(wanted):
            if body[name].shape != own[name].shape:
                shapes = f"{tuple(body[name].shape)}, but {tuple(own[name].shape)} here"
                raise UserError(f"the trained run does not fit this model: {name} is {shapes}")
        heads = {name: weights[name] for name in own if name in weights and name not in wanted}
        if all(heads[name].shape == own[name].shape for name in heads):
            body |= heads
        self.load_state_dict(own | body)


class Headed(Reader):
    """A reader with a small head instead of the vocabulary."""

    outputs = 2

    def _head(self) -> nn.Module:
        return nn.Linear(self.spaces[-1].feature_width, self.outputs)

    def _readout(self) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self.head, nn.Linear)
        return self.head.weight, self.head.bias


class Classifier(Headed):
    """Predicts one of several classes at the last real token of each sequence, where `targets` has the class."""

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
            raise UserError(f"a classifier needs at least 2 classes; got {classes}")
        self.outputs = classes
        super().__init__(size, layers, seed, companion, causal=causal)

    def scores(
        self, tokens: Tensor, ends: Tensor, padding: Tensor | None = None, frame: Frame | None = None
    ) -> Tensor:
        """Return (batch, classes) at the positions `ends` (batch,) of tokens (batch, time)."""
        return self._scores(self.hidden(tokens, padding=padding, rows=ends, frame=frame).squeeze(1))


class Pointer(Headed):
    """Predicts the first and the last token of an answer: two scores at every token."""

    def forward(
        self, tokens: Tensor, targets: Tensor, smoothing: float = 0.0, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the same as `Reader.forward`; targets (batch, 2) are the positions of the first and the last token."""
        frame = Frame()
        scores = self._ends(self.hidden(tokens, padding=padding, frame=frame), padding)
        chances = scores.flatten(0, 1).log_softmax(-1)
        objective = F.nll_loss(chances, targets.flatten())
        nats = objective.detach()
        if smoothing:  # over real tokens only
            real = torch.isfinite(chances)
            spread = -chances.masked_fill(~real, 0.0).sum(-1) / real.sum(-1)
            objective = (1 - smoothing) * objective + smoothing * spread.mean()
        return self._with_own_terms(objective, nats, frame)

    def spans(self, tokens: Tensor, padding: Tensor | None = None, most: int = 30) -> Tensor:
        """Return (batch, 2): first and last token of the most likely span of at most `most` tokens."""
        first, last = self.chances(tokens, padding).unbind(1)
        time = tokens.shape[1]
        both = first[:, :, None] + last[:, None, :]
        places = torch.arange(time, device=tokens.device)
        distance = places - places[:, None]
        best = both.masked_fill((distance < 0) | (distance >= most), -torch.inf).flatten(1).argmax(-1)
        return torch.stack([best // time, best % time], 1)

    def chances(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return (batch, 2, time): log probability of each token to be the first, and the last."""
        return self.ends(tokens, padding).log_softmax(-1)

    def ends(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return (batch, 2, time): scores of each token as the first and as the last of the answer."""
        return self._ends(self.hidden(tokens, padding=padding), padding)

    def _ends(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return (batch, 2, time): scores of each token as the first and as the last, -inf at padding."""
        scores = self._scores(x).transpose(1, 2).float()
        return scores if padding is None else scores.masked_fill(~padding[:, None], -torch.inf)
