"""Self-contained page with the attention on one text: tokens colored by weight, per layer and head."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtohead.common.files import write_output
from headtohead.interpret.inspection import Inspection
from headtohead.report.templates import render, script_json

_STEPS = 32767
"""Weights are stored as 16-bit integers relative to the largest."""


@dataclass(frozen=True)
class InspectionView:
    """One model with its inspection of a text."""

    label: str
    about: str
    """Description of the run."""
    tokens: Sequence[str]
    inspection: Inspection
    relevant: Sequence[bool] = ()
    """By token; empty if none are marked."""
    right: str = ""
    """The correct answer, if known."""
    apart: bool = False
    """Whether to separate tokens by spaces: symbols of a synthetic task, not pieces of a text."""
    notes: Sequence[str] = field(default_factory=tuple)


def write_look(path: Path, views: Sequence[InspectionView]) -> Path:
    """Write the page of one model, or of several in columns; return its path."""
    page = render(
        "look.html.jinja",
        ("page.css", "look.css", "theme.js", "look.js"),
        views=views,
        sentences=[sentence(view) for view in views],
        marked=any(any(view.relevant) for view in views),
        signed=any(layer.signed for view in views for layer in view.inspection.layers),
        data=script_json([_data(view) for view in views]),
        title=" and ".join(view.label for view in views),
    )
    write_output(path, page)
    return path


def sentence(view: InspectionView) -> str:
    """Return a summary: the prediction, the spread of attention and its share on relevant tokens."""
    inspection = view.inspection
    guess = inspection.guesses[inspection.place if len(inspection.guesses) > 1 else 0][0]
    what = {"class": "Answer", "token": "Prediction", "span": "Span"}[inspection.kind]
    text = f"{what}: “{_shown(guess.words)}” ({_percent(guess.probability)})"
    if view.right:
        text += ", correct" if view.right == guess.words else f"; correct is “{_shown(view.right)}”"
    row = read_row(inspection)
    if row is None:
        return f"{text}."
    seen = inspection.place + 1 if inspection.causal else len(view.tokens)
    half = int((row.sort(descending=True).values.cumsum(0) < 0.5).sum()) + 1
    text = f"{text}. Half of its attention is on {half} of {seen} tokens"
    if not any(view.relevant):
        return f"{text}."
    marks = torch.tensor(list(view.relevant))
    mass, even = float(row[marks].sum()), float(marks[:seen].sum()) / seen
    return f"{text}, {_percent(mass)} on the underlined ones (uniform attention: {_percent(even)})."


def read_row(inspection: Inspection) -> Tensor | None:
    """Return (time,): absolute attention of the read-out row, mean over heads and layers; None without a map."""
    maps = [layer.weights[0, :, inspection.place] for layer in inspection.layers if layer.weights is not None]
    if not maps:
        return None
    rows = [row.double().cpu().nan_to_num(0.0).abs() for row in maps]
    return torch.stack([(row / row.sum(-1, keepdim=True).clamp_min(1e-30)).mean(0) for row in rows]).mean(0)


def _shown(text: str) -> str:
    return text.replace("\n", "↵").replace(" ", "␣") if text.strip() != text else text.replace("\n", "↵")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\u00a0%" if share >= 0.095 or share == 0 else f"{100 * share:.2g}\u00a0%"


def _data(view: InspectionView) -> dict[str, Any]:
    inspection = view.inspection
    return {
        "tokens": list(view.tokens),
        "relevant": [bool(mark) for mark in view.relevant],
        "apart": view.apart,
        "causal": inspection.causal,
        "place": inspection.place,
        "kind": inspection.kind,
        "guesses": [
            [[guess.words, round(guess.probability, 5)] for guess in row] for row in inspection.guesses
        ],
        "layers": [
            {"mechanism": layer.mechanism, "signed": layer.signed}
            | (_packed(layer.weights[0], inspection.causal) if layer.weights is not None else {"heads": 0})
            for layer in inspection.layers
        ],
        "phases": [
            {
                "stage": stage.stage,
                "order": round(stage.order, 4),
                "angles": [[round(angle, 4) for angle in row] for row in stage.angles.tolist()],
            }
            for stage in inspection.phases
        ],
    }


def _packed(weights: Tensor, causal: bool) -> dict[str, Any]:
    """Return maps (heads, time, time) as base64: 16 bits per weight, row by row, without masked entries if causal."""
    weights = weights.double().nan_to_num(0.0).cpu()
    largest = max(1.0, float(weights.abs().max()))
    steps = (weights / largest * _STEPS).round().to(torch.int16)
    heads, time, _ = steps.shape
    kept = steps[:, torch.ones(time, time, dtype=torch.bool).tril()] if causal else steps.flatten(1)
    content = kept.numpy().astype("<i2").tobytes()
    return {"heads": heads, "largest": largest, "weights": base64.b64encode(content).decode()}
