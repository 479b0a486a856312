"""How far an explanation is the model's own: delete the tokens it names, or keep them alone, and ask again.

Comprehensiveness is the probability lost without them, sufficiency what is lost with them alone (DeYoung et al.,
arXiv 1911.03429), of the answer given on the whole sequence. Kept tokens stay in reading order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headtohead.interpret.readout import ReadBatch, chances, cut, fixed_place
from headtohead.model.classifier import Pointer
from headtohead.model.decoder import Decoder

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Of the tokens, whose mean is the AOPC."""
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

    `given` (batch,) is the answer on the whole sequence and `before` its probability. The token that is read stays,
    unless a class is read: then it is read at the last token left. One token alone cannot be cut, and loses nothing.
    """
    real = batch.real
    rows = torch.arange(len(real), device=real.device)
    stays = torch.zeros_like(real)
    if fixed_place(model):
        stays[rows, batch.places] = True
    ranks = _ranks(scores.masked_fill(~real | stays, -torch.inf))
    found: list[Tensor] = []
    counts = [cut(share, batch.lengths) for share in shares]
    for place, count in enumerate(counts):
        if place and torch.equal(count, counts[place - 1]):  # of few tokens several shares are one token
            found.append(found[-1])
            continue
        top = ranks < count[:, None]
        pair = []
        for kept in (real & ~top, top | stays):
            kept = torch.where(kept.any(-1, keepdim=True), kept, real)
            after = _probability(model, batch, kept, given)
            pair.append(before - after)
        found.append(torch.stack(pair, -1))
        progress(len(found) / len(counts))
    return torch.stack(found, 1)


def _ranks(scores: Tensor) -> Tensor:
    """Return the rank of each token, 0 the highest; of equal ones the earlier comes first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    )


def _probability(model: Decoder, batch: ReadBatch, kept: Tensor, given: Tensor) -> Tensor:
    """Return the probability of the given answer when the kept tokens (batch, time) are all there is."""
    lengths = kept.sum(-1)
    time = int(lengths.max())
    order = (~kept).sort(dim=-1, stable=True).indices[:, :time]
    tokens = batch.tokens.gather(-1, order)
    padding = (
        None if int(lengths.min()) == time else torch.arange(time, device=kept.device) < lengths[:, None]
    )
    places = lengths - 1
    if fixed_place(model):
        places = kept.cumsum(-1).gather(-1, batch.places[:, None]).squeeze(-1) - 1
    found = chances(model, tokens, padding, places, batch.ends)
    # What a pointer points at has moved with the tokens deleted before it.
    answer = places if isinstance(model, Pointer) else given
    return found.gather(-1, answer[:, None]).squeeze(-1).double()
