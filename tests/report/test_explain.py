"""Panels about the attention of runs trained on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair")

from headtohead import Study
from headtohead.report.gather import ArmFacts
from headtohead.report.panels import View
from headtohead.report.panels.attention import explain, heat
from headtohead.study.probes import read_found
from headtohead.study.store.manifest import Contest, Manifest
from tests.browser import framed

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
CONTEST = Contest("t", "t", "nano", "as_is", "tokens")


def found(
    mass: float, *, names: tuple[str, ...] = ("rollout", "gradient"), marked: int = 4
) -> dict[str, Any]:
    counts = [[1, 0], [0, max(0, marked - 1)]]
    lost = dict.fromkeys(("comprehensiveness", "sufficiency", "aopc_sufficiency"))
    above = {"10": 75.0, "33": 50.0, "50": None}
    one = {
        "mass": mass,
        "over_uniform": None,
        **dict.fromkeys(("confidence", "confidence_correct", "confidence_all"), above),
        **lost,
        "aopc_comprehensiveness": 0.3,
        "above_chance": lost | {"aopc_comprehensiveness": 0.2},
        "heat_maps": {"common": {"edges": [0.0, 0.5, 1.0], "counts": counts}},
    }
    layer = {"entropy": None, "sink": None}
    return {
        "task": "t",
        "examples": 4,
        "marked": marked,
        **dict.fromkeys(("marked_share", "accuracy", "right"), 0.5),
        "published": {},
        "mean": layer,
        "uniform": 0.25,
        "signed_layers": [],
        "without_map": [] if "rollout" in names else ["layer 2 (no_attention)"],
        "layers": {"1": layer, "2": layer},
        "explanations": dict.fromkeys(names, one),
        "chance": lost | {"aopc_comprehensiveness": 0.1},
    }


def arm(label: str, *seeds: dict[str, Any], name: str = "explain:4") -> ArmFacts:
    return ArmFacts(
        label,
        label,
        None,
        2,
        {},
        [],
        {},
        {name: {seed: read_found(name, one) for seed, one in enumerate(seeds, 1)}},
    )


def view(*arms: ArmFacts) -> View:
    names = tuple((one.label, one.label) for one in arms)
    return View(Path(), Manifest("s", names, names[0][0], None, 0.01, (1, 2), ()), CONTEST, list(arms), [])


def test_every_measure_is_in_percent_with_its_reference() -> None:
    rows = explain.explained_rows(
        [arm("a", found(0.5), found(0.7)), arm("bare", found(0.5, names=("gradient",)))]
    )
    mine = [row for row in rows if (row["arm"], row["explanation"], row["seed"]) == ("a", "rollout", 2)]
    assert [(row["value"], row["against"]) for row in mine] == [
        (pytest.approx(70), 25.0),
        (75.0, None),
        (50.0, None),
        (pytest.approx(30), 10.0),
    ]
    assert {row["explanation"] for row in rows if row["arm"] == "bare"} == {"gradient"}
    (mean,) = [
        row
        for row in explain._means(rows)
        if row["arm"] == "a" and row["against"] == 25.0 and row["explanation"] == "rollout"
    ]
    # Two seeds .2 apart: a t interval of 12.7 x .1, cut at 0 and 100 %.
    assert (mean["mean"], mean["low"], mean["high"]) == (pytest.approx(60), 0.0, 100.0)


def test_the_figure_names_arms_without_maps_and_tasks_without_marks() -> None:
    figure = explain.figure(
        view(arm("a", found(0.5), found(0.7)), arm("bare", found(0.5, names=("gradient",))))
    )
    assert figure is not None
    assert figure.chart is not None
    drawn = figure.chart.to_dict(validate=True)
    assert list(drawn["usermeta"]["axes"]) == ["rollout", "gradient"]
    assert "no rollout: bare in 1 of 2 layers." in figure.words
    assert figure.table is not None
    assert [row[:4] for row in figure.table.rows] == [
        ("a", "attention rollout", "2", "0.600"),
        ("a", "gradient x input", "2", "0.600"),
        ("bare", "gradient x input", "1", "0.500"),
    ]
    bare = explain.figure(view(arm("a", found(0.5, marked=0))))
    assert bare is not None
    assert "No test example has relevant tokens" in bare.words
    assert explain.figure(view(arm("a"))) is None


def test_heat_maps_sum_over_seeds_and_leave_out_mismatched_grids() -> None:
    rows, name = heat.heat_rows(
        [arm("a", found(0.5), found(0.7)), arm("bare", found(0.5, names=("gradient",)))]
    )
    assert name == "rollout"
    assert [
        (row["arm"], row["mass"], row["right"], row["examples"], row["share"])
        for row in rows
        if row["examples"]
    ] == [
        ("a", "0–50", "0–50", 2, 0.25),
        ("a", "50–100", "50–100", 6, 0.75),
    ]
    odd = found(0.5)
    odd["explanations"]["rollout"] = odd["explanations"]["rollout"] | {
        "heat_maps": {"common": {"edges": [0.0, 1.0], "counts": [[1], [2]]}}
    }
    assert heat.heat_rows([arm("odd", odd)]) == ([], "")
    assert heat.heat_rows([arm("two", odd, found(0.5))]) == ([], "")
    figure = heat.figure(view(arm("a", found(0.5))))
    assert figure is not None
    assert figure.chart is not None
    assert figure.chart.to_dict(validate=True)
    assert "Without attention map" not in figure.words
    figure = heat.figure(
        view(arm("a", found(0.5)), arm("bare", found(0.5, names=("gradient",))), arm("none"))
    )
    assert figure is not None
    assert figure.words.endswith("Without attention map: bare.")


def test_in_a_real_browser_it_is_drawn_and_fits_a_phone(tmp_path: Path) -> None:
    arms = ["standard", {"arm": "sharing:tie=kv", "name": HOSTILE}, "no_attention"]
    settings: dict[str, Any] = {"tokens": 1500, "batch": 300, "seeds": 2, "lr": 5e-3}
    study = Study(arms, tasks=["grammar:train=60"], probes=["explain"], **settings)
    study.run(tmp_path / "out", workers=1, quiet=True)
    emit = """<script type="module">
    while (document.documentElement.dataset.drawn !== "all") await new Promise((done) => setTimeout(done, 100));
    const dots = () => document.querySelectorAll("#explain1 svg .mark-symbol path").length;
    const before = dots();
    [...document.querySelector('.axes[data-for="explain1"]').children].at(-1).click();
    await new Promise((done) => setTimeout(done, 500));
    const maps = document.querySelectorAll("#heat1 svg .mark-rect path").length;
    parent.postMessage([document.documentElement.scrollWidth <= innerWidth, before, dots(), maps, document.title.startsWith("owned")], "*");
    </script>"""
    page = (tmp_path / "out" / "report.html").read_text()
    ((fits, before, after, maps, owned),), _ = framed(tmp_path, page, emit, [390])
    assert (fits, owned) == (True, False)
    # Three arms in the legend; two arms with maps x two seeds x five measures, four diamonds; by gradient the third arm too.
    assert (before, after) == (27, 39)
    # Two maps of 16 cells.
    assert maps == 32
