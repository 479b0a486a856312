"""h2h generate."""

from __future__ import annotations

import functools
import sys
import time

from headtohead import api
from headtohead.cli.shared.options import ModelOptions, RunArgument
from headtohead.common.errors import UserError
from headtohead.common.terminal import say
from headtohead.model.generation import Sampling


def command(
    run: RunArgument,
    *,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    model: ModelOptions = ModelOptions(),  # noqa: B008  frozen
) -> None:
    """Generate text with a trained run: prefill the prompt, then decode from the cache.

    Example: h2h generate races/quick/standard/1 --prompt "def main("

    Args:
        run: STUDY/ARM/SEED, STUDY/ID or run directory
        prompt: text to continue (required)
        tokens: tokens to generate
        temperature: sampling temperature; 0: greedy
        top_p: sample from the most likely tokens that hold this probability
        seed: sampling seed
    """
    if tokens < 1:
        raise UserError(f"--tokens {tokens} is too small; at least 1 is allowed")
    sampling, warn = Sampling(temperature, top_p, seed), functools.partial(say, file=sys.stderr)
    pieces = api.generate_text(run, prompt, tokens=tokens, sampling=sampling, warn=warn, **model.arguments())
    first = next(pieces, "")
    began = time.monotonic()
    say(prompt + first, end="", flush=True)
    for piece in pieces:
        say(piece, end="", flush=True)
    rate = (tokens - 1) / max(1e-9, time.monotonic() - began)
    say()
    say(f"{tokens} tokens, {rate:.0f} tokens/s after the prompt", file=sys.stderr)
