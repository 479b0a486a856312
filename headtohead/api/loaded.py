"""A trained run in memory, for use from Python: its model and tokenizer, generation, logits and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.data.text import Array
from headtohead.data.tokenizers import Tokenizer
from headtohead.interpret.maps import layer_maps
from headtohead.model.classifier import Headed
from headtohead.model.decoder import Decoder
from headtohead.model.generation import Sampling, generate
from headtohead.study.store.run_spec import RunSpec

MAX_TOKENS = 1_000_000
"""Tokens that one call generates at most; the cache holds all of them."""


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A trained run; it unpacks into `model, tokenizer`."""

    spec: RunSpec
    model: Decoder
    tokenizer: Tokenizer
    """`encode("text")` returns token ids, `decode(ids)` text."""

    def generate(self, text: str, *, tokens: int = 200, sampling: Sampling | None = None) -> str:
        """Return the text that the model generates after `text`; `sampling` is an `h2h.Sampling`."""
        return "".join(self.stream(text, tokens=tokens, sampling=sampling))

    def stream(
        self,
        text: str,
        *,
        tokens: int = 200,
        sampling: Sampling | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> Iterator[str]:
        """Yield the same piece by piece; `warn` receives a message about a cut text and about slow decoding.

        A text longer than the context is cut on the left. On a GPU decoding steps run as a CUDA graph.
        """
        if self.spec.task:
            raise UserError(
                f"run {self.spec.id} was trained on a task and generates no text; score it with h2h evaluate"
            )
        check_tokens(tokens)
        read, context = self.tokenizer.encode(text), self.model.size.context
        if len(read) > context:
            warn(
                f"the prompt has {len(read):,} tokens and the context {context:,}: only the last {context:,} are read"
            )
        written: list[int] = []
        shown = ""
        for token in generate(
            self.model, self._row(read[-context:]), tokens, sampling or Sampling(), warn=warn
        ):
            written.append(int(token))
            whole = self.tokenizer.decode(written)
            # A multi-byte character is yielded once it is complete.
            if not whole.endswith("\ufffd"):
                yield whole[len(shown) :]
                shown = whole

    @torch.no_grad()
    def logits(self, text: str) -> Tensor:
        """Return (time, vocabulary): the logits of the next token after each token of `text`."""
        if isinstance(self.model, Headed):
            raise UserError(f"run {self.spec.id} predicts no tokens; see its answers with h2h look")
        return self.model.logits(self._read(text))[0]

    def attention(self, text: str) -> list[Tensor | None]:
        """Return the attention map (heads, time, time) of each layer on `text`; None for a layer without a map."""
        maps = layer_maps(self.model, self._read(text))
        return [None if layer.weights is None else layer.weights[0] for layer in maps]

    def _read(self, text: str) -> Tensor:
        """Return the tokens (1, time) of a text; raise if there are none, or more than the context."""
        tokens, context = self.tokenizer.encode(text), self.model.size.context
        if not 1 <= len(tokens) <= context:
            raise UserError(
                f"the text has {len(tokens):,} tokens; allowed: 1 to {context:,}, the model's context"
            )
        return self._row(tokens)

    def _row(self, tokens: Array) -> Tensor:
        return torch.tensor([tokens.tolist()], dtype=torch.long, device=self.model.readout.device)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def __repr__(self) -> str:
        spec = self.spec
        return f"LoadedRun({spec.id}: {spec.label}, seed {spec.seed}, {spec.corpus.label}, {self.model.size.dims})"


def check_tokens(count: int) -> None:
    """Raise if one call cannot generate so many tokens."""
    if count > MAX_TOKENS:
        raise UserError(f"tokens={count:,} is too many; at most {MAX_TOKENS:,}")
