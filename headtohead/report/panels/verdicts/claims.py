"""Judged claims of a paper: published and measured effects, and a table of all claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import altair as alt

from headtohead.common.errors import UserError
from headtohead.report.charts import (
    NARROW,
    OUTCOMES,
    PALETTE,
    Chart,
    Row,
    arm_axis,
    category,
    dots,
    legend,
    rule,
)
from headtohead.report.panels.base import Chip, Figure, Table, View
from headtohead.study.claims import ClaimResult
from headtohead.study.claims.recorded import CLAIMS, Effect, effects, read_claims

_HEAD = ("claim", "statement", "direction", "size", "published", "measured and reason", "scale")
_FIELDS = ("id", "statement", "direction", "size", "published", "reason", "scale")
_MAX_OPEN = 6
"""More claims than this are folded, so that the verdicts below stay visible."""
_LIMITS = (-2.0, 4.0)
"""Shares of the published effect beyond these are drawn at the edge, with their number."""
_STATEMENT = 56
"""Letters of a claim's statement beside the chart."""
_PLACE = ("corpus", "size", "context", "branch")
_ARROW = 12
"""Points between names and chart, for the arrow of an interval that continues beyond the left edge."""
_MARGIN = 0.03
"""Share of the axis that stays free on the left of the outermost number."""
READING = (
    "Diamonds are the published effects (100 %), dots with 95 % intervals are measured here; 0 % is no effect, "
    "below it the effect is opposite; arrows are intervals that continue. Colors say whether this comparison supports the direction of the claim, "
    "the word beside the claim what all of its criteria say. Claims without a published number are in the table only."
)


def figure(views: Sequence[View]) -> Figure | None:
    """Return the claims of the paper, if the study reproduces one."""
    if not views:
        return None
    try:
        claims = read_claims(views[0].path / CLAIMS)
    except UserError:
        return None
    if not claims:
        return None
    count = Counter(claim.direction for claim in claims)
    words = (
        "Direction: "
        + ", ".join(f"{count[word]} {word}" for word in OUTCOMES if count[word])
        + ". Size: whether the effect is as large as published."
    )
    rows = [
        [
            _chip(getattr(claim, name)) if name in ("direction", "size") else getattr(claim, name)
            for name in _FIELDS
        ]
        # Decided claims first.
        for claim in sorted(claims, key=lambda claim: claim.direction not in ("supported", "contradicted"))
    ]
    folded = f"All {len(rows)} claims" if len(rows) > _MAX_OPEN else ""
    table = Table(_HEAD, rows, left=len(_HEAD), folded=folded)
    chart, links = forest(claims), linked_pages(views[0].path)
    if chart is not None:
        words += f" {READING}"
    if links:
        words += " Pages of the paper's other studies:"
    return Figure("Claims of the paper.", words, chart, table=table, links=links)


def forest(claims: Sequence[ClaimResult]) -> Chart | None:
    """Return measured effects in percent of the published ones, or None if no claim has both.

    Claims have different units, and effects in one unit differ by factors of ten; a share has one axis for all.
    """
    compared = [
        (claim, effect)
        for claim in claims
        for effect in effects(claim)
        if effect.decides and effect.reference is not None
    ]
    if not compared:
        return None
    names = _names(compared)
    means = [_row(name, *pair) for name, pair in zip(names, compared, strict=True)]
    diamonds = [
        {"line": name, "low": effect.share(ends[0]), "high": effect.share(ends[1]), "middle": 1.0}
        for name, (_, effect) in zip(names, compared, strict=True)
        if (ends := effect.published)
    ]
    scale = alt.Scale(domain=_domain([*means, *diamonds]), clamp=True, nice=False)
    lines = arm_axis(limit=380)
    lines.labelPadding = _ARROW
    beyond = _beyond(means, _domain([*means, *diamonds]))
    y, there = category("line", names, lines), alt.Chart(alt.Data(values=diamonds))
    span = there.mark_rule(strokeWidth=9, opacity=0.3, color=PALETTE[5])
    mark = there.mark_point(shape="diamond", size=190, filled=True, opacity=1, color=PALETTE[5])
    under = [
        rule(0, scale=scale),
        span.encode(x=alt.X("low:Q", scale=scale), x2="high:Q", y=y),
        mark.encode(x=alt.X("middle:Q", scale=scale), y=y),
    ]
    for dx, color in dict.fromkeys((row["dx"], row["color"]) for row in beyond):
        heads = [row for row in beyond if (row["dx"], row["color"]) == (dx, color)]
        arrow = {"text": "◄" if dx < 0 else "►", "dx": dx, "dy": -1, "size": 14, "color": color}
        marks = alt.Chart(alt.Data(values=heads)).mark_text(baseline="middle", **arrow)
        under.append(marks.encode(x=alt.X("at:Q", scale=scale), y=y))
    for left in (True, False):
        # The number of a dot at an edge has its interval beside it, and is written towards the middle.
        edge = [row for row in means if (row["mean"] < _LIMITS[0] if left else row["mean"] > _LIMITS[1])]
        for color in dict.fromkeys(OUTCOMES[row["direction"]] for row in edge):
            values = [row for row in edge if OUTCOMES[row["direction"]] == color]
            text = alt.Chart(alt.Data(values=values)).mark_text(
                align="left" if left else "right", dx=-6 if left else 6, dy=-13, fontSize=12, color=color
            )
            under.append(text.encode(x=alt.X("mean:Q", scale=scale), y=y, text="beyond:N"))
    shown = [word for word in OUTCOMES if any(row["direction"] == word for row in means)]
    colors = alt.Scale(domain=shown, range=[OUTCOMES[word] for word in shown])
    colored = legend()
    colored.columns = alt.ExprRef(f"{NARROW} ? 1 : 3")
    return dots(
        means,
        [],
        names,
        alt.Color("direction:N", scale=colors, legend=colored),
        ["percent of the published", "effect (diamonds)"],
        field="line",
        about=("line", "direction", "measured", "published"),
        form=".0%",
        scale=scale,
        axis=alt.Axis(labelExpr="format(100 * datum.value, '.0f') + ' %'", tickCount=6),
        names=lines,
        under=under,
        height=58,
        bold=True,
    )


def _names(compared: Sequence[tuple[ClaimResult, Effect]]) -> list[str]:
    """Return a name of three lines for each effect: the claim, its statement, and what was compared, with its place if it has several."""
    found: list[str] = []
    for claim, effect in compared:
        alike = [other.place for same, other in compared if same.id == claim.id]
        place = [effect.place[key] for key in telling_apart(alike, _PLACE) if key in effect.place]
        full = _name(claim, effect, *place)
        same = sum(other == full or other.startswith(f"{full} (") for other in found)
        found.append(f"{full} ({same + 1})" if same else full)
    return found


def telling_apart(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """Return the names of the fields that tell the rows apart, as few as needed in this order."""
    found: list[str] = []
    for name in names:
        before, after = (
            len({tuple(row.get(one) for one in chosen) for row in rows}) for chosen in (found, [*found, name])
        )
        found += [name] if after > before else []
    return found


def _name(claim: ClaimResult, effect: Effect, *place: str) -> str:
    statement = shorten(claim.statement, _STATEMENT, placeholder=" …").replace("|", "/")
    outcome = f", {claim.direction}" if claim.direction in OUTCOMES else ""
    # A number of one arm is not a score.
    unit = [] if " - " in effect.what else [effect.unit]
    return f"{claim.id}{outcome}|{statement}|{', '.join(filter(None, [effect.what, *unit, *place]))}"


def _row(name: str, claim: ClaimResult, effect: Effect) -> Row:
    ends = [None if end is None else effect.share(end) for end in (effect.low, effect.high)]
    share, direction = effect.share(effect.value), effect.direction or claim.direction
    # A negative published effect swaps the ends of the interval.
    low, high = (None, None) if None in ends else sorted(end for end in ends if end is not None)
    words, beyond = _percent(share), ""
    if not _LIMITS[0] <= share <= _LIMITS[1]:
        interval = "" if low is None or high is None else f" ({_percent(low)} to {_percent(high)})"
        words, beyond = "", f"← {words}{interval}" if share < 0 else f"{words}{interval} →"
    return {
        "line": name,
        "direction": direction if direction in OUTCOMES else "open",
        "mean": share,
        "low": low,
        "high": high,
        "words": words,
        "beyond": beyond,
        "measured": effect.measured,
        "published": effect.stated,
    }


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %".replace("-", "−")


def _beyond(rows: Sequence[Row], domain: Sequence[float]) -> list[Row]:
    """Return the head of an arrow for each interval that continues beyond the axis, unless its dot does, too."""
    low, high = domain
    heads = []
    for row in rows:
        about = {"line": row["line"], "color": OUTCOMES[row["direction"]]}
        if row["low"] is not None and row["low"] < low <= row["mean"]:
            heads.append({**about, "at": low, "dx": -3})
        if row["high"] is not None and row["high"] > high >= row["mean"]:
            heads.append({**about, "at": high, "dx": 3})
    return heads


def _domain(rows: Sequence[Row]) -> list[float]:
    """Return the ends of the axis: all intervals, no effect and twice the published one, within the limits."""
    ends = [end for row in rows for end in (row["low"], row["high"], row.get("mean")) if end is not None]
    low, high = min(-0.25, *ends), max(2.0, *ends)
    high = min(high, _LIMITS[1])
    # The names of the claims are on the left.
    return [max(low - _MARGIN * (high - low), _LIMITS[0]), high]


def linked_pages(path: Path) -> list[tuple[str, str]]:
    """Return the pages of the paper's other studies, in subdirectories of this one, and of its toy."""
    pages = [page.relative_to(path).as_posix() for page in sorted(path.glob("*/report.html"))]
    found = [(page.partition("/")[0], page) for page in pages]
    return found + ([("toy", "toy.html")] if (path / "toy.html").is_file() else [])


def _chip(word: str) -> Chip:
    return Chip(word, word if word in OUTCOMES else "open")
