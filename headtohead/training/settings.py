"""Training settings: equal for all arms unless an arm overrides them, and part of the run's hash."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from headtohead.common.choices import check_choices
from headtohead.common.errors import UserError, unknown
from headtohead.common.numbers import is_number, parse_count
from headtohead.model.sizes import Size
from headtohead.training.circuit_rates import STORED, Rule, parse_rules, rates_of_rules

_HIGHEST = {"warmup": 1, "floor": 1, "decay_share": 1, "beta1": 0.9999, "beta2": 0.99999, "smoothing": 0.99}
_COUNTS = {"tokens", "batch", "evaluations"}


@dataclass(frozen=True)
class TrainSettings:
    """Everything the trainer needs except model and data."""

    tokens: int = 2_000_000
    """tokens each run is trained on, rounded down to whole steps."""
    batch: int = 4096
    """tokens per step; a multiple of the context."""
    lr: float = 2e-3
    """peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine; wsd: warm-up, stable, then a linear decay; constant after warm-up."""
    warmup: float = 0.02
    """fraction of the steps over which the learning rate rises."""
    floor: float = 0.1
    """final learning rate as a fraction of the peak."""
    decay_share: float = 0.2
    """fraction of the steps that decay, under wsd."""
    weight_decay: float = 0.1
    """AdamW's weight decay, applied to matrices."""
    beta1: float = 0.9
    """AdamW's beta1."""
    beta2: float = 0.95
    """AdamW's beta2."""
    clip: float = 1.0
    """maximum gradient norm; 0 disables clipping."""
    smoothing: float = 0.0
    """label smoothing of the training objective."""
    precision: Literal["float32", "bf16"] = "float32"
    """arithmetic; under bf16 the master weights stay float32."""
    evaluations: int = 0
    """number of evaluations on the valid split during training; the end is always scored."""
    circuit_lr: tuple[Rule, ...] = ()
    """rules that multiply the learning rate of circuits, such as [{tag = "qk", factor = 30}] or {qk = "30x"}."""
    circuit_decay: Literal["equal", "coupled"] = "equal"
    """equal: divide a circuit's decay by its ratio, so that lr x decay is equal for all circuits; coupled: do not."""

    def __post_init__(self) -> None:
        check_choices(self)
        object.__setattr__(self, "circuit_lr", parse_rules(self.circuit_lr))
        for name in ("tokens", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is too small; at least 1 is allowed")
        for name, top in _HIGHEST.items():
            if not 0 <= getattr(self, name) <= top:
                raise UserError(f"{name}={getattr(self, name):g} is not between 0 and {top:g}")
        for name in ("lr", "weight_decay", "clip", "evaluations"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name):g} is not a finite number of at least 0")
        if self.schedule == "wsd" and self.warmup + self.decay_share > 1:
            raise UserError(
                f"warmup={self.warmup:g} and decay_share={self.decay_share:g} add up to more than 1"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values; circuit settings are left out when unused.

        Coupled constant ratios are stored as `rates`, so that existing run ids do not change.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name not in STORED]
        record = {name: getattr(self, name) for name in names}
        if not self.circuit_lr:
            return record
        if self.circuit_decay == "coupled" and (rates := rates_of_rules(self.circuit_lr)):
            return record | {"rates": rates}
        rules = [rule.as_dict() for rule in self.circuit_lr]
        return record | {"circuit_lr": rules, "circuit_decay": self.circuit_decay}

    def steps(self, context: int) -> int:
        """Return the number of steps for a context length."""
        if self.batch % context:
            raise UserError(f"batch={self.batch} tokens per step is not a multiple of the context {context}")
        steps = self.tokens // self.batch
        if steps < 1:
            raise UserError(f"tokens={self.tokens} do not fill one step of batch={self.batch} tokens")
        return steps

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate at `step`, 0..steps-1."""
        rise = max(1, round(self.warmup * steps)) if self.warmup else 0
        if step < rise:
            return self.lr * (step + 1) / rise
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "wsd":
            fall = round(self.decay_share * steps)
            share = (step - (steps - fall) + 1) / max(1, fall)
            return self.lr * (1 - (1 - self.floor) * max(0.0, share))
        share = (step - rise) / max(1, steps - 1 - rise)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share)))


DEFAULTS: dict[str, dict[str, Any]] = {
    "nano": {"tokens": 500_000, "batch": 1024, "lr": 4e-3},
    "1m": {"tokens": 4_000_000, "batch": 4096, "lr": 2e-3},
    "5m": {"tokens": 20_000_000, "batch": 8192, "lr": 2e-3},
    "10m": {"tokens": 50_000_000, "batch": 16_384, "lr": 2e-3},
    "60m": {"tokens": 300_000_000, "batch": 65_536, "lr": 1e-3},
    "150m": {"tokens": 750_000_000, "batch": 131_072, "lr": 6e-4},
    "350m": {"tokens": 1_750_000_000, "batch": 262_144, "lr": 4e-4},
    "454m": {"tokens": 2_300_000_000, "batch": 262_144, "lr": 4e-4},
}
"""Default settings of each size on a corpus: enough to beat the bigram reference (results/calibration)."""


def defaults_of(size: Size) -> dict[str, Any]:
    """Return the default settings of a size, with the batch rounded up to whole windows."""
    found = dict(DEFAULTS.get(size.name, {}))
    if "batch" in found:
        found["batch"] = -(-found["batch"] // size.context) * size.context
    return found


def train_settings(given: dict[str, Any]) -> TrainSettings:
    """Return settings from plain values; counts may be written 120k or 65M."""
    fields = {field.name: field for field in dataclasses.fields(TrainSettings)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in fields:
            raise unknown("training setting", name, fields)
        if name in _COUNTS:
            value = parse_count(value, name)
        elif isinstance(fields[name].default, float):
            if not is_number(value):
                raise UserError(f"{name} takes a number, got {value!r}")
            if name == "lr" and not value > 0:  # checked here and not above: stored runs may have any rate
                raise UserError(f"lr={value:g} trains nothing; expected a rate above 0, such as 2e-3")
            value = float(value)
        elif name != "circuit_lr" and not isinstance(value, str):
            raise UserError(f"{name} takes a string, got {value!r}")
        values[name] = value
    return TrainSettings(**values)
