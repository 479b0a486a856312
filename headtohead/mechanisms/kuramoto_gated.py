"""Kuramoto attention with the options that have trained best so far, as a separate mechanism: gates from query and key
token, sharp from the start, and successor values.

    gate      softplus(g) * 2 sigmoid(W_gq [cos, sin] + b) of the query * 2 sigmoid(W_gk [cos, sin] + b) of the key
    step      dth[t, j] = kappa_j sum_(u < t) A[t, u] sin(th[u + 1, j] - th[t, j])

It stays within what the abstract of arXiv 2606.11585 specifies (phases as state and as values, gated cosine score, rotary
drift, Kuramoto update), but it is not the literal reading, which is `kuramoto`. It has the options of `kuramoto`, with other
defaults.

Claims: None of its own; the published claims are for `kuramoto` and for the kernel of arXiv 2606.18694.

Watch: Its gates add 4 D² parameters per layer; `shape = params` takes them from the feed-forward block. Keys depend on
learned maps, so the decoding cache stores them in addition to the phases. It trains best at a higher learning rate than
standard, with the feed-forward block at half of it (`circuit_lr = {ffn = "0.5x"}`). Results of this form do not apply to
the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.families.kuramoto_options import KuramotoOptions
from headtohead.mechanisms.kuramoto import Kuramoto


def _preset(name: str, value: Any) -> Any:
    """Return an option of `kuramoto` with another default."""
    known = next(field for field in fields(KuramotoOptions) if field.name == name).metadata
    return option(value, known["help"], choices=known["choices"], low=known["low"], high=known["high"])


@dataclass(frozen=True)
class KuramotoGatedOptions(KuramotoOptions):
    """Options of `kuramoto` with the preset's defaults."""

    gate: str = _preset("gate", "pair")
    successor: str = _preset("successor", "replace")
    sharpness: float = _preset("sharpness", 16.0)
    ffn_start: str = _preset("ffn_start", "small")

    @classmethod
    def examples(cls) -> list[Options]:
        """Return the preset itself, then the examples of `kuramoto`."""
        return [cls(), *(cls(**vars(case)) for case in KuramotoOptions.examples())]


class KuramotoGated(Kuramoto):
    """Kuramoto attention with gates from both tokens, coupled to successors."""

    name: ClassVar[str] = "kuramoto_gated"
    Options: ClassVar[type] = KuramotoGatedOptions
