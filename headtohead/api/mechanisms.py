"""Conformance checks and costs of mechanisms."""

from __future__ import annotations

from typing import Any

from headtohead.common.errors import UserError
from headtohead.evaluation.cost import arm_cost
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.registry import Kind
from headtohead.mechanisms.contract.terms import Composed, Term
from headtohead.model.check import Verification, check_composed
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import find_size


def check(arm: str | type[Mechanism], *, compile: bool = False) -> Verification:
    """Return the results of the conformance suite for a mechanism, at every example setting of its options."""
    composed = parse_layout(arm).pattern[0]
    return check_composed(check_settings(composed), compile)


def check_settings(composed: Composed) -> list[Composed]:
    """Return the settings to check: the given options if any, else every example."""
    base = composed.terms[0]
    given = base.options != _default(base.kind)
    if given or len(composed.terms) > 1 or not hasattr(base.kind.Options, "examples"):
        return [composed]
    return [
        Composed((Term(base.kind, options, base.path, base.source),))
        for options in base.kind.Options.examples()
    ]


def cost(
    arm: str | type[Mechanism], *, size: str = "nano", context: int = 0, batch: int = 1
) -> dict[str, Any]:
    """Return parameters, FLOPs per token and cache bytes per token of an arm at a size.

    `batch` is the number of sequences that share per-batch work (a companion's pass).
    """
    if batch < 1:
        raise UserError(f"batch={batch} must be at least 1")
    shape = find_size(size)
    layout = parse_layout(arm)
    facts = arm_cost(shape, layout.layers(shape.layers), context, batch=batch)
    return {"arm": layout.text, "label": layout.label, "size": size, "dims": shape.dims} | facts


def _default(kind: Kind) -> Any:
    try:
        return kind.Options()
    except TypeError:
        return None
