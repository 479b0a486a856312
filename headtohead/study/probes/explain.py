"""Probe `explain`: where a run trained on a task attends on its test split, and whether that explains its answers.

The result is the summary of `interpret/faithfulness.py`, as printed by `h2h explain RUN --json`. Its numbers by path, null
if undefined; E is rollout, layer_mean or gradient, T is 10, 33 or 50, N a layer counted from 1, and D is
comprehensiveness, sufficiency (at 5 %), aopc_comprehensiveness or aopc_sufficiency:

    accuracy, right                     share of examples with every read-out correct; probability of the correct answer
    examples, marked, marked_share      number of examples, and of those with relevant tokens
    uniform                             relevant mass of uniform attention
    explanations.E.mass                 relevant mass; explanations.E.over_uniform is its ratio to that of uniform attention
    explanations.E.confidence.T         per cent of marked examples with more mass than T %
    explanations.E.confidence_correct.T the same, and answered correctly; explanations.E.confidence_all.T of all examples
    explanations.E.D, chance.D          probability lost; explanations.E.above_chance.D is the difference of the two
    published.own                       the paper's rule for the task; published.squad, .agreement, .hatexplain: each rule
    mean.entropy, mean.sink             of the read-out row, over layers; layers.N.entropy and layers.N.sink per layer
    layers.N.indicators.NAME            of whole maps

Rollout is missing if a layer has no map, both attention explanations if no layer has one. The heat maps are in
explanations.E.heat_maps.GRID as edges and counts.
"""

from __future__ import annotations

from headtohead.interpret.faithfulness import THRESHOLDS, explain_model
from headtohead.study.probes.base import NUMBER, Found, Probe, Subject, whole_number

EXAMPLES = 2000
"""Maximum number, spread evenly over the split and the same for all arms."""


def _measure(subject: Subject, argument: str) -> Found:
    limit = int(argument or EXAMPLES)
    return explain_model(subject.model, subject.task, limit=limit, progress=subject.progress).summary()


_ABOVE = dict.fromkeys(THRESHOLDS, NUMBER)
_LOST = dict.fromkeys(
    ("comprehensiveness", "sufficiency", "aopc_comprehensiveness", "aopc_sufficiency"), NUMBER
)
PROBE = Probe(
    f"where a run trained on a task attends, over {EXAMPLES:,} test examples: attention on relevant tokens, Attention "
    "Confidence, comprehensiveness and sufficiency, compared with gradient and chance",
    _measure,
    {
        "task": str,
        "examples": int,
        "marked": int,
        "marked_share": float,
        "accuracy": float,
        "right": float,
        "uniform": NUMBER,
        "signed_layers": [int],
        "without_map": [str],
        "explanations": {
            str: {
                "mass": NUMBER,
                "over_uniform": NUMBER,
                "confidence": _ABOVE,
                "confidence_correct": _ABOVE,
                "confidence_all": _ABOVE,
                **_LOST,
                "above_chance": _LOST,
                "heat_maps": {str: {"edges": [float], "counts": [[int]]}},
            }
        },
        "chance": _LOST,
        "published": {str: NUMBER},
        "layers": {str: {"entropy": NUMBER, "sink": NUMBER, "indicators": ({str: NUMBER}, None)}},
        "mean": {"entropy": NUMBER, "sink": NUMBER},
    },
    lambda text: whole_number(text, "explain", "examples", EXAMPLES, 10**6),
    "number of examples",
    amount=True,
    of="tasks",
)
