"""Kuramoto attention in the form that trains best so far, under a name of its own: gates from query and key token, phase
maps on both sides, and successor values.

    gate      softplus(g) * 2 sigmoid(W_gq [cos, sin] + b) of the query * 2 sigmoid(W_gk [cos, sin] + b) of the key
    phases    th + t w + W_q [cos, sin] in the query, th + t w + W_k [cos, sin] in the key
    step      dth[t, j] = kappa_j sum_(u < t) A[t, u] sin(th[u + 1, j] - th[t, j])

Within what the abstract of arXiv 2606.11585 fixes (phases as state and as values, gated cosine score, rotary drift,
Kuramoto update), and not its literal reading, which `kuramoto` keeps. All options are those of `kuramoto`, with other
defaults.

Claims: None of its own; those published are for `kuramoto` and for the kernel of arXiv 2606.18694.

Watch: Its maps cost 8 D² parameters a layer; `shape = params` takes them from the feed-forward part. Keys are made by
maps, so decoding keeps them beside the phases. Results of this form say nothing of the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from headtohead.mechanisms.kuramoto import Kuramoto
from headtohead.mechanisms.kuramoto_options import KuramotoOptions
from headtohead.mechanisms.options import Options, option


def _preset(name: str, value: Any) -> Any:
    """Return an option of `kuramoto` with another default."""
    known = next(field for field in fields(KuramotoOptions) if field.name == name)
    return option(value, known.metadata["help"], choices=known.metadata["choices"])


@dataclass(frozen=True)
class KuramotoGatedOptions(KuramotoOptions):
    """Options of `kuramoto` with the preset's defaults."""

    gate: str = _preset("gate", "pair")
    phase_map: str = _preset("phase_map", "both")
    successor: str = _preset("successor", "replace")
    ffn_start: str = _preset("ffn_start", "small")

    @classmethod
    def examples(cls) -> list[Options]:
        """The preset itself, then what `kuramoto` tries."""
        return [cls(), *super().examples()]


class KuramotoGated(Kuramoto):
    """Kuramoto attention with gates and phase maps of both tokens, coupled to successors."""

    name: ClassVar[str] = "kuramoto_gated"
    Options: ClassVar[type] = KuramotoGatedOptions
