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

from msgspec import UNSET, Struct, UnsetType, convert

from headtohead.common.typed import Count, Number
from headtohead.interpret.faithfulness import THRESHOLDS, explain_model
from headtohead.study.probes.base import Found, Maybe, Probe, Subject, whole_number

EXAMPLES = 2000
"""Maximum number, spread evenly over the split and the same for all arms."""


class Lost(Struct, frozen=True):
    """The probability lost when tokens are deleted."""

    comprehensiveness: Maybe
    aopc_comprehensiveness: Maybe
    sufficiency: Maybe
    aopc_sufficiency: Maybe


class HeatMap(Struct, frozen=True):
    """Examples by relevant mass and probability of the correct answer."""

    edges: list[Number]
    counts: list[list[Count]]


class Explanation(Struct, frozen=True):
    """The numbers of one explanation."""

    heat_maps: dict[str, HeatMap]
    mass: Maybe
    over_uniform: Maybe
    confidence: dict[str, Maybe]
    confidence_correct: dict[str, Maybe]
    confidence_all: dict[str, Maybe]
    comprehensiveness: Maybe
    aopc_comprehensiveness: Maybe
    sufficiency: Maybe
    aopc_sufficiency: Maybe
    above_chance: Lost


class ReadOut(Struct, frozen=True, omit_defaults=True):
    """Means of the read-out row, and for one layer the indicators of whole maps."""

    entropy: Maybe
    sink: Maybe
    indicators: dict[str, Maybe] | UnsetType | None = UNSET


class Explained(Struct, frozen=True, kw_only=True):
    """The result; see the top of this file."""

    task: str
    examples: Count
    marked: Count
    marked_share: Number
    reads: Count = 0
    too_short: Count = 0
    accuracy: Number
    right: Number
    uniform: Maybe
    signed_layers: list[int]
    without_map: list[str]
    explanations: dict[str, Explanation]
    chance: Lost
    published: dict[str, Maybe]
    layers: dict[str, ReadOut]
    mean: ReadOut


def _measure(subject: Subject, argument: str) -> Found:
    limit = int(argument or EXAMPLES)
    found = explain_model(subject.model, subject.task, limit=limit, progress=subject.progress)
    return convert(found.summary(), Explained)


_ATTENTION = {"rollout": "attention rollout", "layer_mean": "attention averaged over heads"}
_WORDS = {
    f"explanations.{name}.{path}": f"{about}, {words}"
    for name, words in _ATTENTION.items()
    for path, about in {
        **{
            f"{key}.{percent}": f"percent of {of} examples with more than {percent} % on relevant tokens"
            for key, of in (("confidence", "marked"), ("confidence_all", "all"))
            for percent in THRESHOLDS
        },
        "comprehensiveness": "comprehensiveness",
        "aopc_comprehensiveness": "comprehensiveness over several shares of tokens",
        "above_chance.comprehensiveness": "comprehensiveness above chance",
    }.items()
}

PROBE = Probe(
    f"where a run trained on a task attends, over {EXAMPLES:,} test examples: attention on relevant tokens, Attention "
    "Confidence, comprehensiveness and sufficiency, compared with gradient and chance",
    _measure,
    Explained,
    lambda text: whole_number(text, "explain", "examples", EXAMPLES, 10**6),
    "number of examples",
    words=_WORDS,
    amount=True,
    of="tasks",
)
