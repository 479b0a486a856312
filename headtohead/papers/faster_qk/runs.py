"""Toy runs: form, initialization, schedule of the ratio lr_QK / lr_OV, length; and the published runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headtohead.common.errors import UserError, unknown
from headtohead.common.files import canonical_json, digest
from headtohead.data.tasks.toy import Source
from headtohead.papers.faster_qk.forms import ADAM_FORMS, ATTENTION, OUTPUT

RATE = 0.01
ADAM_RATE = 1e-3
LOSSES = (1.0, 0.1, 0.01, 0.001)
"""Losses at which runs are compared: at the first epoch whose mean loss is below."""
SEEDS = (1234, 1235, 1236, 1237, 1238)
STARTS = ("tiny", "default")
EPOCHS = (50, 100, 200, 250)
"""Allowed numbers of batches per epoch."""
RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
# Approximate epochs after which a form's mean loss falls below .01 and .001; used only to estimate the time left.
_USUAL = {
    "FAFO": (340, 720),
    "FACO": (1220, 2800),
    "CAFO": (700, 1550),
    "CACO": (3300, 22800),
    "EACO": (1110, 2600),
}
_USUAL_ADAM = {"FAFO": (60, 90), "FACO": (175, 285), "CAFO": (40, 80), "CACO": (175, 265)}
# Increment when the arithmetic of a toy run changes; stored runs are then trained again.
_NUMERICS = 1


@dataclass(frozen=True)
class ToyRun:
    """One toy model with one seed."""

    name: str
    form: str
    """FAFO, FACO, CAFO, CACO; EA: collapsed attention with a factored part's rate, IA: imposed attention, BO: with bias."""
    seed: int = SEEDS[0]
    qk_start: str = "tiny"
    ov_start: str = "tiny"
    ratio: float = 1.0
    """lr_QK / lr_OV at the first step."""
    ratio_end: float | None = None
    """The ratio of a linear ramp at step epochs * batches; None: constant."""
    length: int = 64
    epochs: int = 2500
    batches: int = 250
    stops: bool = True
    """End by the published rule: once per 100 epochs, stop if that epoch's mean loss <= 1e-3."""
    until: float = 0.0
    """Continue beyond `epochs`, up to `most`, until an epoch's mean loss is below this."""
    most: int = 0
    brief: bool = False
    """End as soon as `until` is reached."""
    share: float | None = None
    """The mass imposed on distinct tokens."""
    label_in_input: bool = False
    batch: int = 32
    adam: float | None = None
    """The learning rate of OV under Adam, without decay; None: plain SGD."""

    def __post_init__(self) -> None:
        if self.form[:2] not in ATTENTION or self.form[2:] not in OUTPUT:
            raise unknown("toy form", self.form, [a + o for a in ATTENTION for o in OUTPUT])
        for start in (self.qk_start, self.ov_start):
            if start not in STARTS:
                raise unknown("start", start, STARTS)
        if self.batches not in EPOCHS:
            raise UserError(f"batches takes {', '.join(map(str, EPOCHS))}, got {self.batches!r}")
        end = self.ratio if self.ratio_end is None else self.ratio_end
        if not (0 <= self.ratio < math.inf and 0 <= end < math.inf):
            raise UserError(f"ratio takes numbers of at least 0, got {self.ratio!r} to {end!r}")
        if self.length < 3 or self.epochs < 1 or self.batch < 1 or self.seed < 0:
            raise UserError(
                "a toy run needs length >= 3, epochs >= 1, batch >= 1 and seed >= 0, got "
                f"length {self.length}, epochs {self.epochs}, batch {self.batch}, seed {self.seed}"
            )
        if (self.share is None) != (self.form[:2] != "IA") or not 0 <= (self.share or 0.0) <= 1:
            raise UserError(f"share takes a mass from 0 to 1 and only with form IA.., got {self.share!r}")
        if self.adam is not None:
            if self.form not in ADAM_FORMS:
                raise UserError(f"Adam trains {', '.join(ADAM_FORMS)}, got form {self.form}")
            if not 0 < self.adam < math.inf:
                raise UserError(f"adam takes a rate above 0, got {self.adam!r}")

    @property
    def optimizer(self) -> str:
        """The name of its optimizer."""
        return "sgd" if self.adam is None else "adam"

    @property
    def source(self) -> Source:
        """The source of its sequences."""
        return Source(self.seed, self.length, self.batch, self.share is not None, self.label_in_input)

    @property
    def ramp(self) -> tuple[float, float]:
        """The ratio at the first step, and its increment per step."""
        rise = 0.0 if self.ratio_end is None else self.ratio_end - self.ratio
        return self.ratio, rise / (self.epochs * self.batches)

    @property
    def expected_steps(self) -> int:
        """The approximate number of steps."""
        to_01, to_001 = (_USUAL if self.adam is None else _USUAL_ADAM).get(self.form, (0, 0))
        reach = 0
        if self.until:
            reach = to_001 if self.until <= 1e-3 else to_01 if self.until <= 0.01 else to_01 // 2
        if self.brief:
            return (reach or self.epochs) * self.batches
        stop = min(self.epochs, to_001) if self.stops and to_001 else self.epochs
        return max(reach, stop) * self.batches

    @property
    def key(self) -> str:
        """The hash of everything that can change its result."""
        return digest(canonical_json([_NUMERICS, self.as_dict()]))[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return the settings, JSON-ready; without `adam` if None, so that existing keys do not change."""
        return {key: value for key, value in asdict(self).items() if key != "adam" or value is not None}


_CACO = ToyRun("CACO", "CACO", qk_start="default", ov_start="default", batches=200, until=1e-2, most=30000)
_CACO_LONG = replace(_CACO, name="CACO L=128", length=128, epochs=2000, batches=100, until=0.0, most=0)
_FIXED = ToyRun(
    "fixed", "IACO", qk_start="default", ov_start="default", epochs=500, stops=False, batch=128, share=1.0
)
# Epochs are short because Adam converges within a few thousand steps.
_ADAM = ToyRun("Adam", "FAFO", epochs=600, batches=50, stops=False, until=1e-3, brief=True, adam=ADAM_RATE)
_RUNS = (
    ToyRun("FAFO default", "FAFO", qk_start="default", until=1e-3, most=2500),
    ToyRun("FAFO", "FAFO", until=1e-3, most=2500),
    ToyRun("FACO", "FACO", until=1e-3, most=4000),
    ToyRun("CAFO", "CAFO", epochs=5000, batches=200, until=1e-3, most=5000),
    _CACO,
    ToyRun("FAFO r=20", "FAFO", ratio=20, epochs=1000, batches=100, stops=False),
    ToyRun("FAFO ramp 1->40", "FAFO", ratio_end=40, epochs=2000, batches=100, stops=False),
    _CACO_LONG,
    replace(_CACO_LONG, name="CACO r=5 L=128", ratio=5),
    replace(_CACO_LONG, name="CACO ramp 1->10 L=128", ratio_end=10, stops=False),
    ToyRun("FACO emulated", "EACO", until=1e-3, most=4000),
    *(
        replace(_CACO, name=f"CACO sweep r={ratio:g}", ratio=ratio, epochs=1, until=0.1, most=6000)
        for ratio in RATIOS
    ),
    *(
        replace(_FIXED, name=f"{name} alpha={share:g}", form=form, share=share, label_in_input=variant)
        for name, form, variant in (
            ("fixed collapsed", "IABO", True),
            ("fixed factorised", "IAFO", True),
            ("fixed collapsed, no bias", "IACO", True),
            ("fixed collapsed, own label", "IACO", False),
            ("fixed factorised, own label", "IAFO", False),
        )
        for share in SHARES
    ),
    *(
        replace(_ADAM, name=f"Adam {form}", form=form, qk_start=start, ov_start=start)
        for form, start in (("FAFO", "tiny"), ("FACO", "tiny"), ("CAFO", "tiny"), ("CACO", "default"))
    ),
    replace(_ADAM, name="Adam FAFO r=10", ratio=10.0),
    replace(_ADAM, name="Adam CACO r=10", form="CACO", qk_start="default", ov_start="default", ratio=10.0),
)
RUNS = {run.name: run for run in _RUNS}
"""Every run of the published tables, the sweep of ratios, and the forms under Adam, by name."""

_OWN_PREFIXES = ("CACO sweep", "FACO emulated", "Adam ", "fixed collapsed,", "fixed factorised,")
PUBLISHED_RUNS = frozenset(name for name in RUNS if not name.startswith(_OWN_PREFIXES))
"""Runs with published settings; the others are ours: the sweep, the emulation, Adam, and variants of imposed attention."""


def choose_runs(names: Iterable[str], seeds: Sequence[int] = SEEDS, **changes: Any) -> list[ToyRun]:
    """Return runs by name, once per seed; a trailing * matches a prefix."""
    chosen = []
    for name in names:
        prefix = name[:-1] if name.endswith("*") else None
        found = [
            run for key, run in RUNS.items() if key == name or (prefix is not None and key.startswith(prefix))
        ]
        if not found:
            raise unknown("toy run", name, RUNS)
        chosen += [replace(run, seed=seed, **changes) for run in found for seed in seeds]
    return chosen
