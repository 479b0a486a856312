"""Describe a mechanism for `h2h list` and for the pages in docs/mechanisms/.

Both come from the docstring of the mechanism's file, read paragraph by paragraph: the idea; the equation, from the first
indented block on; and the paragraphs that start with `Arms:` (arms with a row in the cost table), `Claims:` (the paper's
claims) and `Watch:` (what to watch in a comparison).
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from headtohead.mechanisms.contract.options import Options, describe_options, describe_variant_options
from headtohead.mechanisms.contract.projected import Stage
from headtohead.mechanisms.contract.registry import Kind
from headtohead.mechanisms.contract.score import Score

_OPENING = re.compile(r"(Arms|Claims|Watch): ")


@dataclass(frozen=True)
class Description:
    """The parts of a mechanism's docstring."""

    name: str
    summary: str
    """The first line of the class's docstring."""
    stage: bool
    options: list[dict[str, Any]]
    idea: str = ""
    equation: str = ""
    arms: tuple[str, ...] = ()
    claims: str = ""
    watch: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        return asdict(self) | {"arms": list(self.arms)}


def describe(kind: Kind) -> Description:
    """Return the parts of a mechanism's docstring; missing parts are empty."""
    sections: dict[str, list[str]] = {"idea": [], "equation": [], "arms": [], "claims": [], "watch": []}
    section = "idea"
    for paragraph in inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "").split("\n\n"):
        if opening := _OPENING.match(paragraph):
            section, paragraph = opening[1].lower(), paragraph[opening.end() :]
        elif section == "idea" and paragraph.startswith("    "):
            section = "equation"
        sections[section].append(paragraph)
    words: dict[str, Any] = {name: "\n\n".join(paragraphs) for name, paragraphs in sections.items()}
    words["arms"] = tuple(words["arms"].split())
    summary = inspect.cleandoc(vars(kind).get("__doc__") or kind.name).splitlines()[0]
    options = describe_options(kind.Options)
    return Description(kind.name, summary, issubclass(kind, Stage), options, **words)


def describe_variant(kind: Kind, value: str) -> Description:
    """Return the description of one variant, such as `flex:alibi`."""
    cls: type[Options] = kind.Options
    found, score = describe(kind), getattr(cls.variants()[value], "function", None)
    summary = score.summary if isinstance(score, Score) else found.summary
    options = describe_variant_options(cls, value)
    return replace(found, name=f"{kind.name}:{value}", summary=summary, options=options, arms=())
