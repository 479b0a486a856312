"""Faithfulness of an explanation: delete the tokens it ranks highest, or keep only them, and run the model again.

Comprehensiveness is the probability lost without them, sufficiency the probability lost with only them (DeYoung et al.,
arXiv 1911.03429), of the answer on the whole sequence. Kept tokens stay in reading order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headtohead.interpret.readout import ReadBatch, chances, cut
from headtohead.model.classifier import Classifier, Pointer
from headtohead.model.decoder import Decoder

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Fractions of tokens; the mean over them is the AOPC."""
USUAL = 0.05


@torch.no_grad()
def deletions(
    model: Decoder,
    batch: ReadBatch,
    scores: Tensor,
    given: Tensor,
    before: Tensor,
    shares: Sequence[float] = SHARES,
    progress: Callable[[float], None] = lambda share: None,
) -> Tensor:
    """Return (batch, shares, 2): comprehensiveness and sufficiency of an explanation's scores (batch, time).

    `given` (batch,) is the answer on the whole sequence and `before` its probability. The token that is read is kept,
    except for a class, which is read at the last token left. A sequence of one token is not changed and loses nothing.
    """
    real = batch.real
    rows = torch.arange(len(real), device=real.device)
    fixed = torch.zeros_like(real)
    if not isinstance(model, Classifier):
        fixed[rows, batch.places] = True
    ranks = _ranks(scores.masked_fill(~real | fixed, -torch.inf))
    found: list[Tensor] = []
    counts = [cut(share, batch.lengths) for share in shares]
    for index, count in enumerate(counts):
        if index and torch.equal(count, counts[index - 1]):  # short sequences: several shares are one token
            found.append(found[-1])
            continue
        top = ranks < count[:, None]
        pair = []
        for kept in (real & ~top, top | fixed):
            kept = torch.where(kept.any(-1, keepdim=True), kept, real)
            after = _probability(model, batch, kept, given)
            pair.append(before - after)
        found.append(torch.stack(pair, -1))
        progress(len(found) / len(counts))
    return torch.stack(found, 1)


def _ranks(scores: Tensor) -> Tensor:
    """Return the rank of each token, 0 for the highest score; ties go to the earlier token."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranks)


def _probability(model: Decoder, batch: ReadBatch, kept: Tensor, given: Tensor) -> Tensor:
    """Return the probability of the given answer on only the kept tokens (batch, time)."""
    lengths = kept.sum(-1)
    time = int(lengths.max())
    order = (~kept).sort(dim=-1, stable=True).indices[:, :time]
    tokens = batch.tokens.gather(-1, order)
    real = torch.arange(time, device=kept.device) < lengths[:, None]
    padding = None if int(lengths.min()) == time else real
    positions = lengths - 1
    if not isinstance(model, Classifier):
        positions = kept.cumsum(-1).gather(-1, batch.places[:, None]).squeeze(-1) - 1
    found = chances(model, tokens, padding, positions, batch.ends)
    # The pointer's target moves with the tokens deleted before it.
    answer = positions if isinstance(model, Pointer) else given
    return found.gather(-1, answer[:, None]).squeeze(-1).double()
