"""Generate text: prefill once, then decode token by token from the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder
from headtohead.model.decoding import decoding


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    """0 always takes the most likely token."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not math.isfinite(self.temperature):
            number = "" if self.temperature < 0 else "a number, "
            raise UserError(f"temperature={self.temperature:g} must be {number}0 or more")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} is out of range; it must fit in 64 bits")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p:g} must be above 0 and at most 1")


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return (batch, 1) tokens drawn from logits (batch, vocabulary)."""
    if sampling.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    chances = torch.softmax(logits.double() / sampling.temperature, -1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(-1, descending=True)
        # A token is kept while the more likely ones before it have not reached top_p; the first is always kept.
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        chances = torch.zeros_like(chances).scatter(-1, order, ordered.masked_fill(dropped, 0.0))
    return torch.multinomial(chances.cpu(), 1, generator=generator).to(logits.device)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt: Tensor,
    count: int,
    sampling: Sampling = Sampling(),  # noqa: B008  a frozen value
    padding: Tensor | None = None,
    warn: Callable[[str], None] = lambda words: None,
) -> Iterator[Tensor]:
    """Yield `count` times (batch, 1): the next token of each sequence in prompt (batch, time).

    Prompts of different lengths are padded on the left; `padding` (batch, time) is true at real tokens. A layout with a
    layer without a cache is recomputed in full at every step. On a GPU a decoding step is captured as a CUDA graph if the
    layers support it; otherwise `warn` gets the reason.
    """
    batch, time = prompt.shape
    if time == 0:
        raise UserError("the prompt is empty; give at least one token")
    limit = model.size.context
    if model.size.settings.positions == "learned" and time + count - 1 > limit:
        raise UserError(
            f"prompt and new tokens have {time + count} positions; the model has {limit} learned positions"
        )
    if (needed := model.companion_spec) and time + count - 1 > needed.length:
        raise UserError(
            f"prompt and new tokens have {time + count} positions; the companion has {needed.length} tokens"
        )
    if count < 1:
        return
    model.eval()
    generator = torch.Generator().manual_seed(sampling.seed)
    whole = None
    if padding is not None:
        whole = torch.cat((padding, padding.new_ones(batch, count)), 1)
        if model.rotary is not None:  # padded tokens index the table, possibly beyond the context
            model.rotary.reach(time + count)
    if not model.decodable:
        if model.readout.is_cuda:
            warn("every token recomputes the whole text: a layer has no cache")
        for _ in range(count):
            seen = None if whole is None else whole[:, : prompt.shape[1]]
            token = sample(model.logits(prompt, padding=seen)[:, -1], sampling, generator)
            prompt = torch.cat((prompt, token), 1)
            yield token
        return
    caches = model.new_caches(batch, time + count - 1, padding=whole)  # the last token is not an input
    last = torch.full((batch,), time - 1, device=prompt.device)
    scores = model.logits(prompt, caches=caches, rows=last)[:, -1]
    step = decoding(model, caches, count - 1, warn)
    for place in range(count):
        token = sample(scores, sampling, generator)
        yield token
        if place < count - 1:
            scores = step(token)
