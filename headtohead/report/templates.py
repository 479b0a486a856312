"""Page templates; all text is escaped."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import escape

from headtohead.common import VERSION
from headtohead.common.errors import UserError
from headtohead.common.files import digest, read_json, write_json
from headtohead.common.numbers import short_count, short_time
from headtohead.data.shards import cache_dir
from headtohead.report.charts import PAGE
from headtohead.report.facts import COSTS, common_remarks
from headtohead.study.judge.verdict import Verdict
from headtohead.study.store.manifest import Manifest, metric_label


def verdict_table(manifest: Manifest, verdicts: list[Verdict]) -> str:
    """Return the verdicts as an HTML table, for notebooks."""
    template = templates().get_template("verdicts.html.jinja")
    contests = manifest.contests()
    parts = []
    for contest in contests:
        rows = [row for row in verdicts if row.of(contest)]
        title = f"<h4>{escape(contest.title)}</h4>" if len(contests) > 1 else ""
        parts.append(title + template.render(verdicts=rows, manifest=manifest))
    return "".join(parts)


def render(
    template: str, assets: Sequence[str] = ("page.css", "theme.js", "table.js", "page.js"), **values: Any
) -> str:
    """Return a page with its style sheets and scripts inside."""
    style, script = ("".join(asset(name) for name in assets if name.endswith(end)) for end in (".css", ".js"))
    found = templates().get_template(template)
    return found.render(style=style, script=script, version=VERSION, **values)


@cache
def asset(name: str) -> str:
    """Return the text of a style sheet or script in this directory."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def templates() -> jinja2.Environment:
    """Return the template environment with the page's number formats."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    found = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.filters["signed"] = lambda value, digits=4: _shown(value, digits, "+")
    found.filters["fixed"] = _shown
    found.filters["definition"] = lambda chart: script_json(chart | {"config": PAGE})
    found.globals["chart_library"] = chart_library
    found.filters["metric"] = metric_label
    found.filters["common_remarks"] = common_remarks
    found.globals["cost_names"] = tuple(COSTS.values())
    found.filters["short"] = lambda value: "–" if value is None else short_count(value)
    found.filters["clock"] = lambda value: "–" if value is None else short_time(value)
    found.filters["whole"] = lambda value: "–" if value is None else f"{value:,.0f}"
    found.filters["percent"] = lambda value: "–" if math.isnan(value) else f"{value:.2%}"
    found.filters["amount"] = lambda value: f"{value:,.4g}" if value < 10_000 else short_count(value)
    # Three significant digits: 0.0497 is below 0.05, which 0.050 would not show.
    found.filters["chance"] = lambda value: "–" if value is None else f"{value:.3g}"
    return found


def _shown(value: float | None, digits: int = 4, sign: str = "") -> str:
    """Return a number with `digits` decimals, or two significant digits if those decimals would all be zero."""
    if value is None:
        return "–"
    return f"{value:{sign}.2g}" if 0 < abs(value) < 0.5 * 10**-digits else f"{value:{sign}.{digits}f}"


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script tag."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


_MAKE_BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode())
"""


@cache
def chart_library() -> str:
    """Return the chart library as one script; built once per version, in a subprocess since it needs 100 MB."""
    kept = cache_dir() / "pages" / f"charts-{version('vl-convert-python')}.json"
    try:
        found = read_json(kept)
        if digest(found["script"]) == found["sha256"]:
            return str(found["script"])
    except (UserError, KeyError, TypeError, AttributeError):
        pass
    made = subprocess.run([sys.executable, "-c", _MAKE_BUNDLE], capture_output=True, check=True)
    script = made.stdout.decode().replace("</script", "<\\/script")
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"sha256": digest(script), "script": script})
    return script
