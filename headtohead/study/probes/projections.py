"""Probe `projections`: likeness of the trained query, key and value projections."""

from __future__ import annotations

from msgspec import Struct

from headtohead.common.typed import Count, Number
from headtohead.interpret.projections import Likeness, layer_projections
from headtohead.study.probes.base import Found, Probe, Subject, Unavailable, whole_number

WINDOWS = 4
Numbers = dict[str, dict[str, Number]]


class Projections(Struct, frozen=True):
    """The result; means are over the layers with separate q, k and v."""

    windows: Count
    chance: Number
    """Mean cosine of principal angles between random subspaces: the root of head width / width."""
    layers: list[Numbers | None]
    """None: a layer without separate q, k and v."""
    mean: Numbers
    kv_above_qk: dict[str, Number]
    """How much more alike keys and values are than queries and keys, by measure."""


def _measure(subject: Subject, argument: str) -> Found:
    size = subject.model.size
    windows = subject.windows(int(argument or WINDOWS), size.context)
    layers = layer_projections(subject.model, windows)
    known = [layer for layer in layers if layer is not None]
    if not known:
        return Unavailable("no layer has separate query, key and value projections")
    mean = _mean(known)
    above = {name: mean[name]["kv"] - mean[name]["qk"] for name in ("weights", "outputs", "angles")}
    return Projections(len(windows), size.heads**-0.5, list(layers), mean, above)


def _mean(layers: list[Likeness]) -> Likeness:
    return {
        measure: {
            name: sum(layer[measure][name] for layer in layers) / len(layers) for name in layers[0][measure]
        }
        for measure in layers[0]
    }


PROBE = Probe(
    f"cosines, principal angles and effective ranks of q, k and v of each layer, over {WINDOWS} held-out windows",
    _measure,
    Projections,
    lambda text: whole_number(text, "projections", "windows", WINDOWS, 4096),
    "number of windows",
    amount=True,
    words={
        "mean.weights.kv": "cosine of the weights of K and V",
        "kv_above_qk.weights": "cosine of the weights of K and V above that of Q and K",
        "kv_above_qk.outputs": "cosine of K and V above that of Q and K",
        "kv_above_qk.angles": "cosine of the principal angles of K and V above that of Q and K",
        "mean.rank_share.k": "effective rank of K as a share of its width",
        "mean.rank_share.v": "effective rank of V as a share of its width",
    },
)
