"""h2h generate."""

from __future__ import annotations

import sys
import time
from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import RunArgument, flag
from headtohead.common.errors import UserError
from headtohead.common.terminal import say
from headtohead.model.generation import Sampling


def command(
    run: RunArgument,
    /,
    *,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    trust_files: bool = False,
) -> int:
    """Generate text with a trained run: prefill the prompt, then decode from the cache.

    Example: h2h generate races/quick/0f3a --prompt "def main("

    Args:
        run: run directory, or STUDY/ID
        prompt: text to continue (required)
        tokens: tokens to generate
        temperature: sampling temperature; 0: greedy
        top_p: sample from the most likely tokens that hold this probability
        seed: sampling seed
        device: where to run
        trust_files: execute the mechanism file that the run names
    """
    if tokens < 1:
        raise UserError(f"--tokens {tokens} is too small; at least 1 is allowed")
    sampling = Sampling(temperature, top_p, seed)
    pieces = api.generate_text(
        run,
        prompt,
        tokens=tokens,
        sampling=sampling,
        device=device,
        trust_files=trust_files,
        warn=lambda words: say(words, file=sys.stderr),
    )
    first = next(pieces, "")
    began = time.monotonic()
    say(prompt + first, end="", flush=True)
    for piece in pieces:
        say(piece, end="", flush=True)
    rate = (tokens - 1) / max(1e-9, time.monotonic() - began)
    say()
    say(f"{tokens} tokens, {rate:.0f} tokens/s after the prompt", file=sys.stderr)
    return 0
