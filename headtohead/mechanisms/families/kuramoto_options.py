"""The options of Kuramoto attention: one for each detail its abstract leaves open, and for each control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.options import Options, option, value_text


@dataclass(frozen=True)
class KuramotoOptions(Options):
    """Options of Kuramoto attention."""

    cases: ClassVar[str] = """
        mask=inclusive mask=strict_null gate=token,gate_map=exp gate=pair,gate_map=free gate=const,drift=half
        gate_map=sigmoid_scaled,drift=learned phase_map=query,drift=none phase_map=key,cache=i16
        phase_map=both,gate=pair,successor=replace,ffn_start=small heads=full,gate=token
        heads=full,gate=pair,mask=strict_null,gain=capped,cache=features gain=one,update=embed
        value=dense,successor=replace successor=mix,heads=full coupling=uniform,successor=mix
        coupling=random_frozen coupling=off group=s3 group=so3,gate=pair,cache=features
        group=son,order=2,drift=learned group=sphere,successor=mix ffn=swiglu,readout=tied ffn=gelu,cache=i16
        ffn=tanh_bounded ffn=none spread=0.5,sharpness=4,gain_start=0.5 harmonics=3
        harmonics=2,successor=mix,cache=i16
    """

    mask: str = option(
        "strict",
        "what a token couples to: earlier tokens (strict), itself too (inclusive: with gates above 0 it then attends "
        "to itself and the layer becomes the identity), or earlier tokens and a learned null key of value 0 (strict_null)",
        choices=("strict", "inclusive", "strict_null"),
    )
    gate: str = option(
        "static",
        "g: learned per head and coordinate (static), shifted by the query token (token), by query and key token "
        "(pair), or fixed at its initial value (const)",
        choices=("static", "token", "pair", "const"),
    )
    gate_map: str = option(
        "softplus",
        "how a gate is made positive; free allows negative values, no longer a metric",
        choices=("softplus", "exp", "sigmoid_scaled", "free"),
    )
    phase_map: str = option(
        "none",
        "score phases th + W [cos, sin] for the query, the key, or both; values stay raw phases",
        choices=("none", "query", "key", "both"),
    )
    heads: str = option(
        "partition",
        "each head has its own coordinates, or every head scores and moves all of them (full)",
        choices=("partition", "full"),
    )
    drift: str = option(
        "fixed",
        "rates w_j of the drift with position, if the model's positions are rope: 10000^(-j/d) fixed or as initial "
        "value, on half of the coordinates, or none",
        choices=("fixed", "learned", "half", "none"),
    )
    gain: str = option(
        "learned",
        "kappa per coordinate: learned, fixed at its initial value (one), or 2 sigmoid of a learned number (capped)",
        choices=("learned", "one", "capped"),
    )
    value: str = option(
        "phase",
        "the value: raw phases through the tangent step, or a dense map of the mean, without it",
        choices=("phase", "dense"),
    )
    update: str = option(
        "tangent",
        "the tangent step, or the angle of the sum with the mean in the plane (embed)",
        choices=("tangent", "embed"),
    )
    successor: str = option(
        "none",
        "attend to u and couple to u (none), to its successor (replace), or to both with learned weights (mix)",
        choices=("none", "replace", "mix"),
    )
    harmonics: int = option(
        1,
        "terms of the coupling function: sum_k c_k sin(k (th_u - th_t)) for k up to this number, signed c_k "
        "learned per coordinate, initially kappa for k = 1 and 0 for the others",
        low=1,
        added_later=True,
    )
    coupling: str = option(
        "softmax",
        "controls: equal weights (uniform), fixed random weights (random_frozen), no coupling (off)",
        choices=("softmax", "uniform", "random_frozen", "off"),
    )
    group: str = option(
        "s1",
        "what a block of the state is: an angle, a unit quaternion, a rotation, a point of a sphere",
        choices=("s1", "s3", "so3", "son", "sphere"),
    )
    order: int = option(4, "n of son (n x n matrices) and sphere (in n dimensions)", low=2)
    ffn: str = option(
        "model",
        "the feed-forward block on the torus: the model's kind, one of them, swiglu with increments squashed to pi "
        "tanh, or none",
        choices=("model", "swiglu", "gelu", "tanh_bounded", "none"),
    )
    readout: str = option(
        "linear",
        "a matrix over [cos, sin], or scores against the embedding's phases (tied)",
        choices=("linear", "tied"),
    )
    cache: str = option(
        "f32",
        "the decoding cache: phases in float32, phases in 16-bit integers, or the features of keys and values",
        choices=("f32", "i16", "features"),
    )
    sharpness: float = option(6.0, "initial sum of a head's gates", low=1e-3)
    gain_start: float = option(1.0, "initial kappa; full heads share it")
    spread: float = option(
        1.0, "fraction of the circle in which the embedding's phases are initialized", low=0.0, high=1.0
    )
    ffn_start: str = option(
        "zero",
        "initial value of the feed-forward block's last matrix: zero, or normal with variance 0.25 / (2 m L)",
        choices=("zero", "small"),
    )

    def validate(self) -> None:
        """Raise if options contradict each other or would have no effect."""
        if self.successor != "none" and self.mask == "inclusive":
            raise UserError(
                f"successor={self.successor} with mask=inclusive would read the token after the query; use a "
                "strict mask"
            )
        idle: dict[str, Any]
        if self.coupling != "softmax":
            idle = {"gate": "static", "gate_map": "softplus", "phase_map": "none", "drift": "fixed"}
            self._reject(idle, f"coupling={self.coupling} has no scores to learn")
            if self.mask == "strict_null":
                raise UserError(f"mask=strict_null needs scores; coupling={self.coupling} has none to learn")
        if self.coupling == "off":
            idle = {"heads": "partition", "gain": "learned", "value": "phase", "update": "tangent"}
            idle |= {"successor": "none", "harmonics": 1, "cache": "f32"}
            self._reject(idle, "coupling=off disables the update")
        if self.gate == "const":
            self._reject({"gate_map": "softplus"}, "gate=const has no learned value to map")
        if self.value == "dense":
            idle = {"update": "tangent", "gain": "learned", "harmonics": 1}
            self._reject(idle, "value=dense takes no tangent step")
        if self.successor == "mix":
            self._reject(
                {"gain": "learned"}, "successor=mix learns its own two coefficients instead of the gain"
            )
        if self.harmonics > 1:
            self._reject({"gain": "learned"}, f"harmonics={self.harmonics} learn a coefficient each")
            self._reject({"update": "tangent"}, "a mean in the plane has no harmonics")
        if self.group != "s1":
            only = {"phase_map": "none", "update": "tangent", "harmonics": 1, "spread": 1.0}
            self._reject(only, f"group={self.group} has no angles")
            if self.cache == "i16":
                raise UserError(f"cache=i16 keeps angles; group={self.group} has none")
        if self.group not in ("son", "sphere"):
            self._reject({"order": 4}, f"order applies to son and sphere, not to group={self.group}")
        if self.ffn == "none":
            self._reject({"ffn_start": "zero"}, "ffn=none has no weights to initialize")
        if self.gain == "capped" and not 0 < self.gain_start < 2:
            raise UserError(f"gain=capped needs 0 < gain_start < 2; got gain_start={self.gain_start:g}")

    def _reject(self, idle: dict[str, Any], reason: str) -> None:
        for name, value in idle.items():
            if getattr(self, name) != value:
                raise UserError(f"{name}={value_text(getattr(self, name))} has no effect: {reason}")
