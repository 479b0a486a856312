"""Published claims: the five paper files, claims judged from synthetic verdicts, and a study from end to end."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder
from headtohead.papers.faster_qk.findings import CHECKS
from headtohead.papers.faster_qk.work import Toy
from headtohead.study.claims import ClaimResult, judge_claims
from headtohead.study.claims.numbers import ProbeNumber
from headtohead.study.claims.paper import SCALES, Paper, find_paper, read_paper
from headtohead.study.claims.toy import ToyCheck, ToyOrder
from headtohead.study.config.spec import build_study
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.probes import PROBES
from headtohead.study.store.history import NO_MARKS, Marks
from headtohead.study.store.manifest import Contest, Entry, Manifest, Rate
from headtohead.study.store.result import RunResult
from headtohead.training.circuit_rates import assign
from tests.results import run_result

PAPERS = {"coupled": 16, "sharing": 14, "deconstructed": 15, "faster_qk": 13, "kuramoto": 11}
FIELDS = [
    "id",
    "statement",
    "published",
    "measured",
    "direction",
    "size",
    "scale",
    "reason",
    "run",
    "criteria",
    "marks",
]
FILE = """
[study]
arms = ["standard", {{arm = "sharing:tie=kv", name = "a"}}, {{arm = "sharing:tie=qk", name = "b"}}]
seeds = {seeds}
corpus = "file:{corpus}"
tokens = 1024
batch = 256
[scale.smoke]
[scale.small]
size = ["nano", "1m"]
[scale.paper]
[[claim]]
id = "p.1"
statement = "said"
published = "some"
at = {{size = "nano", tokens = 1024}}
criteria = [{criteria}]
"""
SINK = '{kind = "probe", probe = "indicators", path = "mean.sink", arm = "a"'
COST = '{kind = "cost", arm = "sharing:tie=kv", size = "nano", quantity = "cache", ratio = 0.5}'
CHANGE = '{kind = "change", arm = "a", over = "size", values = ["nano", "1m"], expect = "lower"}'
WORSE = '{kind = "difference", arm = "a", expect = "worse"'
# Common part of the seeds and own part of each arm: intervals of about +-0.005 at five seeds.
COMMON, OWN = (0.0, 0.3, -0.2, 0.1, 0.4), (0.004, -0.004, 0.002, -0.003, 0.001)


def written(folder: Path, criteria: str, seeds: int = 5, corpus: str = "x") -> Path:
    path = folder / "p.toml"
    path.write_text(FILE.format(criteria=criteria, seeds=seeds, corpus=corpus))
    return path


def judged(
    folder: Path,
    criteria: str,
    scale: str = "small",
    diverged: str = "",
    stretch: float = 0.0,
    marks: Marks = NO_MARKS,
    tuning: tuple[Rate, ...] = (),
    **means: list[float],
) -> ClaimResult:
    """Return the claim judged from synthetic runs: per arm, its mean difference from the baseline at each size."""
    paper = read_paper(written(folder, criteria))
    spec = build_study(paper.settings(scale))
    results: dict[str, RunResult] = {}
    entries = []
    for index, size in enumerate(spec.sizes):
        contest = Contest("file:x", "x", size, "as_is", "tokens")
        for label in ("standard", "a", "b"):
            for seed in range(5):
                run = f"{size}/{label}/{seed}"
                entries.append(Entry(run, label, seed + 1, contest))
                shift = (
                    0.0
                    if label == "standard"
                    else means[label][index] + OWN[(seed + index + 2 * (label == "b")) % 5]
                )
                value = 2.0 + COMMON[seed] * (1 + stretch * (label == "a")) + shift
                done = run_result(test={"bits_per_byte": value, "blocks": [[value, 1.0]]})
                results[run] = run_result("diverged") if run == diverged else done
    arms = tuple((arm.text, arm.label) for arm in spec.arms)
    manifest = Manifest("p", arms, "standard", "a", 0.005, (1, 2, 3, 4, 5), tuple(entries), tuning=tuning)
    (found,) = judge_claims(
        paper, scale, {"study": Analysis(manifest, study_verdicts(manifest, results, marks))}
    )
    return found


def test_a_claim_has_the_marks_of_the_verdicts_that_it_is_judged_by(tmp_path: Path) -> None:
    criteria = "{kind = 'difference', arm = 'a', expect = 'better'}"
    means = {"a": [-0.05, -0.05], "b": [0.0, 0.0]}
    changed = Marks(notes=("settings were changed after results existed: lr",))
    found = judged(tmp_path, criteria, marks=changed, **means)
    assert found.marks == ["settings were changed after results existed: lr"]
    assert found.reason.endswith("marked: settings were changed after results existed: lr")
    assert judged(tmp_path, criteria, **means).marks == []


def test_the_five_papers_are_complete() -> None:
    for name, count in PAPERS.items():
        paper = read_paper(find_paper(name))
        assert [claim.id for claim in paper.claims] == [f"{name}.{number}" for number in range(1, count + 1)]
        assert set(paper.scales) == set(SCALES) - ({"tiny"} if name == "faster_qk" else set())
        assert all(claim.statement and claim.published for claim in paper.claims)


@pytest.mark.parametrize("name", PAPERS)
def test_every_arm_of_a_paper_builds_at_every_scale(name: str) -> None:
    paper = read_paper(find_paper(name))
    for settings in (values for scale in paper.scales for values in paper.studies(scale).values()):
        spec = build_study(settings)
        for arm in spec.arms:
            size = spec.size(spec.sizes[0], arm)
            model = Decoder.on_meta(size, arm.layout.layers(size.layers))
            assert model.parameter_count() > 0
            if not spec.tasks:  # a task's model has its own head
                assign(spec.train_settings(arm).circuit_lr, model.circuits(), size.layers)


@pytest.mark.parametrize(
    ("mean", "direction", "size"),
    [
        (-0.020, "supported", "supported"),
        (-0.060, "supported", "contradicted"),
        (-0.002, "open", "contradicted"),
        (0.020, "contradicted", "contradicted"),
    ],
)
def test_direction_and_size_are_judged_separately(
    tmp_path: Path, mean: float, direction: str, size: str
) -> None:
    part = '{kind = "difference", arm = "a", expect = "better", effect = -0.02}'
    found = judged(tmp_path, part, a=[mean, 0.0], b=[0.0, 0.0])
    assert (found.direction, found.size, found.scale) == (direction, size, "published scale")
    assert found.measured[0]["difference"] == pytest.approx(mean)
    assert found.measured[0]["share_of_published"] == pytest.approx(mean / -0.02)


def test_an_interval_that_contains_the_effect_and_twice_the_effect_leaves_the_size_open(
    tmp_path: Path,
) -> None:
    part = '{kind = "difference", arm = "a", expect = "worse", effect = 0.004}'
    found = judged(tmp_path, part, a=[0.0065, 0.0], b=[0.0, 0.0])
    assert (found.direction, found.size) == ("supported", "open")


@pytest.mark.parametrize(("bound", "size"), [(0.01, "supported"), (0.05, "contradicted"), (0.021, "open")])
def test_bounds_on_the_size(tmp_path: Path, bound: float, size: str) -> None:
    part = f'{{kind = "difference", arm = "a", expect = "worse", at_least = {bound}}}'
    assert judged(tmp_path, part, a=[0.02, 0.0], b=[0.0, 0.0]).size == size


def test_effects_are_converted_to_bits_per_byte(tmp_path: Path) -> None:
    path = written(
        tmp_path, '{kind = "difference", arm = "a", expect = "worse", effect = 0.6931471805599453}'
    )
    path.write_text('[paper]\nunit = "nats_per_token"\nbytes_per_unit = 4\n' + path.read_text())
    effect = read_paper(path).claims[0].criteria[0].effect
    assert effect == pytest.approx((0.25,))


@pytest.mark.parametrize(("mean", "direction"), [(0.0, "supported"), (0.01, "open"), (0.03, "contradicted")])
def test_equivalence_between_two_arms(tmp_path: Path, mean: float, direction: str) -> None:
    part = '{kind = "equivalence", arm = "a", against = "b", margin = 0.01}'
    found = judged(tmp_path, part, a=[0.1 + mean, 0.0], b=[0.1, 0.0])
    assert found.direction == direction
    assert found.measured[0]["what"] == "a - b"


def test_order_and_all_criteria_of_a_claim_must_hold(tmp_path: Path) -> None:
    order = '{kind = "order", first = "a", then = ["standard"]}'
    worse = '{kind = "difference", arm = "b", expect = "worse"}'
    assert judged(tmp_path, f"{order}, {worse}", a=[-0.1, 0.0], b=[0.1, 0.0]).direction == "supported"
    assert judged(tmp_path, f"{order}, {worse}", a=[-0.1, 0.0], b=[0.0, 0.0]).direction == "open"
    assert judged(tmp_path, f"{order}, {worse}", a=[-0.1, 0.0], b=[-0.1, 0.0]).direction == "contradicted"
    found = judged(tmp_path, order, a=[-0.1, 0.0], b=[0.0, 0.0])
    assert found.size == "open"
    assert "no effect size was published" in found.reason


def test_a_change_over_sizes(tmp_path: Path) -> None:
    part = '{kind = "change", arm = "a", over = "size", values = ["nano", "1m"], expect = "lower", effect = -0.03}'
    found = judged(tmp_path, part, a=[0.05, 0.02], b=[0.0, 0.0])
    assert (found.direction, found.size, found.scale) == ("supported", "supported", "reduced scale")
    assert judged(tmp_path, part, a=[0.02, 0.05], b=[0.0, 0.0]).direction == "contradicted"
    either = part.replace('"1m"', '["5m", "1m"]')
    assert judged(tmp_path, either, a=[0.05, 0.02], b=[0.0, 0.0]).direction == "supported"
    assert "1m" in judged(tmp_path, part, "paper", a=[0.05], b=[0.0]).reason
    assert judged(tmp_path, part, "paper", a=[0.05], b=[0.0]).scale == "not tested"


@pytest.mark.parametrize(
    ("stretch", "direction"), [(0.0, "open"), (20.0, "supported"), (-0.98, "contradicted")]
)
def test_a_spread_is_judged_by_its_ratio(tmp_path: Path, stretch: float, direction: str) -> None:
    part = '{kind = "spread", arm = "a"}'
    found = judged(tmp_path, part, stretch=stretch, a=[0.0, 0.0], b=[0.0, 0.0])
    assert (found.direction, found.size) == (direction, "open")
    assert found.measured[0]["ratio"] == pytest.approx((1 + stretch) ** 2, rel=0.3, abs=0.001)


def test_smoke_decides_nothing_that_is_trained(tmp_path: Path) -> None:
    part = '{kind = "difference", arm = "a", expect = "better", effect = -0.02}'
    found = judged(tmp_path, part, "smoke", a=[-0.02], b=[0.0])
    assert (found.direction, found.size) == ("open", "open")
    assert "decides nothing" in found.reason
    assert found.measured[0]["difference"] == pytest.approx(-0.02)


@pytest.mark.parametrize(
    "part",
    [
        "{kind = 'change', arm = 'a', over = 'size', values = ['nano', '1m'], expect = 'lower'}",
        "{kind = 'interaction', arm = 'a', control = 'b', expect = 'lower'}",
    ],
)
def test_a_diverged_run_decides_no_difference_of_differences(tmp_path: Path, part: str) -> None:
    means = {"a": [-0.1, -0.3], "b": [0.0, 0.0]}
    assert judged(tmp_path, part, **means).direction == "supported"
    found = judged(tmp_path, part, diverged="nano/a/2", **means)
    assert found.direction == "open"
    assert "1 runs of a diverged" in found.reason


def test_a_diverged_run_does_not_support_better(tmp_path: Path) -> None:
    part = '{kind = "difference", arm = "a", expect = "better"}'
    found = judged(tmp_path, part, a=[-0.1, 0.0], b=[0.0, 0.0], diverged="nano/a/2")
    assert found.direction == "open"
    assert "1 runs of a diverged" in found.reason


@pytest.mark.parametrize(
    ("ratio", "direction", "size"),
    [
        (0.5, "supported", "supported"),
        (0.25, "supported", "contradicted"),
        (2.0, "contradicted", "contradicted"),
    ],
)
def test_a_cost_is_decided_without_training(tmp_path: Path, ratio: float, direction: str, size: str) -> None:
    part = f'{{kind = "cost", arm = "sharing:tie=kv", size = "sharing-300m", quantity = "cache", ratio = {ratio}}}'
    found = judged(tmp_path, part, "smoke", a=[0.0], b=[0.0])
    assert (found.direction, found.size, found.scale) == (direction, size, "published scale")


def test_an_open_criterion_gives_its_reason(tmp_path: Path) -> None:
    found = judged(tmp_path, '{kind = "open", reason = "needs GLUE"}', a=[0.0, 0.0], b=[0.0, 0.0])
    assert (found.direction, found.size, found.scale, found.reason) == (
        "open",
        "open",
        "not tested",
        "needs GLUE",
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            '{kind = "diference", arm = "a"}',
            "p.toml: claim p.1: unknown kind of criterion 'diference'; did you mean",
        ),
        ('{kind = "difference", arm = "c", expect = "better"}', "unknown arm 'c'"),
        ('{kind = "difference", arm = "a"}', "a difference criterion: expect is missing"),
        ('{kind = "difference", arm = "a", expect = "lower"}', "unknown value for expect 'lower'"),
        ('{kind = "difference", arm = "a", expect = "worse", efect = 1}', "did you mean 'effect'"),
        ('{kind = "difference", arm = "a", expect = "worse", effect = "x"}', "effect takes a number"),
        (
            '{kind = "change", arm = "a", over = "size", values = ["nano"], expect = "lower"}',
            "values takes two",
        ),
        ("", "criteria takes a list"),
    ],
)
def test_an_error_in_a_file_is_named(tmp_path: Path, part: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_paper(written(tmp_path, part))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ('{kind = "equivalence", arm = "a", margin = -1}', "margin takes a number, zero or more, got -1"),
        ('{kind = "equivalence", arm = "a", margin = 0}', "give a margin above 0"),
        ('{kind = "trend", arm = "a", over = "size", expect = "level", margin = -1}', "zero or more, got -1"),
        ('{kind = "curve", arm = "a", quantity = "spikes", margin = -1}', "zero or more, got -1"),
        (COST.replace("}", ", tolerance = -1}"), "tolerance takes a number, zero or more"),
        (COST.replace("0.5", "0"), "ratio takes a number above 0"),
        (COST.replace("0.5", "-1"), "ratio takes a number above 0"),
        (WORSE + ", at_least = 2, at_most = 1}", "at_least = 2 is above at_most = 1"),
        (WORSE + ", effect = 3, at_most = 1}", "effect = 3 is outside at_least and at_most"),
        (WORSE + ", effect = [1, 2], at_least = 3}", "effect = [1, 2] is outside at_least and at_most"),
        (WORSE + ", effect = -0.5}", "'worse' means a difference above 0 for a loss, got effect = -0.5"),
        (WORSE + ", at_most = 0}", "got at_most = 0"),
        (SINK + ', expect = "lower", at_least = 0}', "'lower' means a difference below 0, got at_least = 0"),
        (
            SINK + ', expect = "lower", compare = "ratio", effect = 2}',
            "means a ratio below 1, got effect = 2",
        ),
        (WORSE + ', against = "a"}', "arm 'a' is compared with itself: 'a' is the same arm"),
        (WORSE + ', against = "sharing:tie=kv"}', "'sharing:tie=kv' is the same arm"),
        (
            '{kind = "difference", arm = "standard", expect = "worse"}',
            "the baseline 'standard' is the same arm",
        ),
        ('{kind = "order", first = "a", then = ["b", "a"]}', "arm 'a' is compared with itself"),
        (
            '{kind = "interaction", arm = "a", control = "b", control_against = "b", expect = "lower"}',
            "arm 'b' is compared with itself",
        ),
        (WORSE + ", at = {epochs = -1}}", "at.epochs takes a number, zero or more, got -1"),
        (WORSE + ', at = {optimizer = "adamw:x/y"}}', "at.optimizer takes a name such as"),
        (WORSE + ', at = {optimizer = "sgd:0.9"}}', "at.optimizer takes a name such as"),
    ],
)
def test_a_criterion_that_nothing_can_fulfill_is_rejected(tmp_path: Path, part: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_paper(written(tmp_path, part))
    assert "p.toml: claim p.1: " in str(caught.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (WORSE + ', size = "nanoo"}', "unknown size of study 'nanoo'; did you mean 'nano'"),
        (WORSE + ', size = ["5m", "foo"]}', "unknown size of study '5m'"),
        (WORSE + ', shape = "foo"}', "unknown shape of study 'foo'"),
        (WORSE + ', length = "foo"}', "unknown length of study 'foo'"),
        (WORSE + ', corpus = "nosuch"}', "unknown corpus of study 'nosuch' (allowed: file:x)"),
        (WORSE + ', context = "abc"}', "unknown context of study 'abc' (allowed: none)"),
        (WORSE + ', branch = "1k"}', "unknown branch of study '1k' (allowed: none)"),
        (CHANGE.replace('"1m"', '"foo"'), "unknown size of study 'foo'"),
        (COST.replace("nano", "nanoo"), "unknown size 'nanoo'; did you mean 'nano'"),
        (COST.replace("sharing:tie=kv", "sharin"), "unknown mechanism 'sharin'"),
        (COST.replace("sharing:tie=kv", "gated:kv_heads=3"), "kv_heads=3"),
        (COST.replace("}", ', against = "gatd"}'), "unknown mechanism 'gatd'"),
        (WORSE + ", needs_tasks = true}", "unknown setting 'needs_tasks'"),
    ],
)
def test_a_misspelled_name_in_a_criterion_is_found_before_training(
    tmp_path: Path, part: str, message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_paper(written(tmp_path, part))


@pytest.mark.parametrize(
    "part",
    [
        WORSE + ', size = "1m"}',  # a size of scale small only
        WORSE + ', corpus = "file:x", shape = "as_is", length = "tokens"}',
        WORSE + ", effect = [-0.1, 0.2]}",
        WORSE + ', at = {optimizer = "adamw:0/0.95"}}',
        '{kind = "equivalence", arm = "a", margin = 0, expect = "no worse"}',
        SINK.replace('"a"', '"standard"') + ', compare = "value", expect = "lower", effect = 0.3}',
    ],
)
def test_a_criterion_that_can_be_fulfilled_is_valid(tmp_path: Path, part: str) -> None:
    assert len(read_paper(written(tmp_path, part)).claims) == 1


def test_a_claim_needs_an_id(tmp_path: Path) -> None:
    path = written(tmp_path, WORSE + "}")
    path.write_text(path.read_text().replace('"p.1"', '""'))
    with pytest.raises(UserError, match=r"p\.toml: a claim's id is empty; its statement is 'said'"):
        read_paper(path)


def test_a_missing_scale_a_study_without_claims_and_an_unknown_paper_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, '{kind = "open", reason = "x"}')
    path.write_text(path.read_text().replace("[scale.paper]", ""))
    with pytest.raises(UserError, match=r"\[scale.paper\] is missing"):
        read_paper(path)
    path.write_text('arms = ["standard"]')
    with pytest.raises(UserError, match="no \\[\\[claim\\]\\]"):
        read_paper(path)
    with pytest.raises(UserError, match="unknown paper 'cupled'; did you mean 'coupled'"):
        find_paper("cupled")


@pytest.mark.page
def test_reproduce_runs_judges_and_resumes(
    tmp_path: Path, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        '{kind = "difference", arm = "a", expect = "worse", effect = 0.02}',
        '{kind = "cost", arm = "sharing:tie=kv", size = "nano", quantity = "cache", ratio = 0.5}',
    ]
    path = written(tmp_path, ", ".join(parts), seeds=2, corpus=str(story))
    with pytest.raises(SystemExit) as left:
        main(
            [
                "reproduce",
                str(path),
                "--scale",
                "smoke",
                "--out",
                str(tmp_path / "o"),
                "--device",
                "cpu",
                "--workers",
                "1",
                "--quiet",
            ]
        )
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "p.1" in shown
    assert "claims.json" in shown
    rows = json.loads((tmp_path / "o" / "claims.json").read_text())
    assert "Claims of the paper" in (tmp_path / "o" / "report.html").read_text()
    assert [list(row) for row in rows] == [FIELDS]
    assert (rows[0]["direction"], rows[0]["size"]) == ("open", "open")
    assert rows[0]["measured"][0]["n"] == 2
    assert rows[0]["run"] == "smoke"
    again = h2h.reproduce(str(path), scale="smoke", out=tmp_path / "o", device="cpu", quiet=True)
    assert again.study.summary.done == 0
    assert [claim.as_dict() for claim in again.claims] == rows
    paper: Paper = read_paper(path)
    with pytest.raises(UserError, match="unknown scale 'large'"):
        paper.settings("large")


def judged_over_contexts(
    folder: Path, criteria: str, slope: float, contexts: tuple[int, ...] = (32, 64, 128)
) -> ClaimResult:
    """Return the claim judged from synthetic runs whose arm a changes by `slope` per doubling of the context."""
    path = written(folder, criteria)
    path.write_text(path.read_text().replace('size = ["nano", "1m"]', f"context = {list(contexts)}"))
    paper = read_paper(path)
    spec = build_study(paper.settings("small"))
    results: dict[str, RunResult] = {}
    entries = []
    for index, context in enumerate(contexts):
        contest = Contest("file:x", "x", "nano", "as_is", "tokens", str(context))
        for label in ("standard", "a", "b"):
            for seed in range(5):
                run = f"{context}/{label}/{seed}"
                entries.append(Entry(run, label, seed + 1, contest))
                shift = 0.03 + slope * index + OWN[(seed + index) % 5] if label == "a" else 0.0
                results[run] = run_result(test={"bits_per_byte": 2.0 + COMMON[seed] + shift})
    arms = tuple((arm.text, arm.label) for arm in spec.arms)
    manifest = Manifest("p", arms, "standard", "a", 0.005, (1, 2, 3, 4, 5), tuple(entries))
    finished = Analysis(manifest, study_verdicts(manifest, results), results)
    (found,) = judge_claims(paper, "small", {"study": finished})
    return found


@pytest.mark.parametrize(
    ("expect", "slope", "direction", "size"),
    [
        ("'lower', effect = -0.01", -0.01, "supported", "supported"),
        ("'lower', effect = -0.03", -0.01, "supported", "contradicted"),
        ("'higher'", -0.01, "contradicted", "open"),
        ("'lower'", 0.0, "open", "open"),
        ("'level', margin = 0.005", 0.0, "supported", "open"),
        ("'level', margin = 0.005", -0.02, "contradicted", "open"),
        ("'no higher', margin = 0.005", -0.02, "supported", "open"),
        ("'no higher', margin = 0.005", 0.02, "contradicted", "open"),
        ("'no higher', margin = 0.0001", 0.0, "open", "open"),
    ],
)
def test_a_trend_is_judged_by_the_slope_per_doubling(
    tmp_path: Path, expect: str, slope: float, direction: str, size: str
) -> None:
    criterion = f"{{kind = 'trend', arm = 'a', over = 'context', expect = {expect}}}"
    found = judged_over_contexts(tmp_path, criterion, slope)
    assert (found.direction, found.size) == (direction, size), found.reason
    assert "slope of a - standard per doubling of context" in found.reason
    assert found.measured[0]["difference"] == pytest.approx(slope, abs=0.003)


def test_a_trend_through_two_values_is_open(tmp_path: Path) -> None:
    criterion = "{kind = 'trend', arm = 'a', over = 'context', expect = 'lower'}"
    found = judged_over_contexts(tmp_path, criterion, -0.01, (32, 64))
    assert (found.direction, found.scale) == ("open", "published scale")
    assert "a trend needs 3 or more values of context, got 2" in found.reason


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        ("over = 'seed', expect = 'lower'", "unknown value for over 'seed'"),
        ("over = 'size', expect = 'better'", "unknown value for expect 'better'"),
        ("over = 'size', expect = 'level'", "takes a margin"),
        ("over = 'size', expect = 'lower', margin = 0.1", "takes a margin"),
    ],
)
def test_an_invalid_trend_criterion_is_rejected(tmp_path: Path, criterion: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_paper(written(tmp_path, f"{{kind = 'trend', arm = 'a', {criterion}}}"))


@pytest.mark.parametrize(
    ("mean", "direction"), [(0.05, "supported"), (0.0, "supported"), (-0.05, "contradicted")]
)
def test_no_better_ignores_the_other_side(tmp_path: Path, mean: float, direction: str) -> None:
    criterion = "{kind = 'equivalence', arm = 'a', expect = 'no better', margin = 0.01}"
    assert judged(tmp_path, criterion, a=[mean, 0.0], b=[0.0, 0.0]).direction == direction


def test_the_claims_about_trends_and_equal_time_can_be_decided() -> None:
    trends = (("sharing", 5), ("sharing", 6), ("sharing", 13), ("deconstructed", 13), ("kuramoto", 3))
    for name, number in (*trends, ("coupled", 6)):
        paper = read_paper(find_paper(name))
        (claim,) = (claim for claim in paper.claims if claim.id == f"{name}.{number}")
        assert "open" not in {criterion.kind for criterion in claim.criteria}
        for scale in ("tiny", "small", "paper"):
            for criterion in claim.criteria:
                spec = build_study(paper.settings(scale, criterion.study))
                values = {"context": spec.contexts, "tokens_per_parameter": spec.branches, "size": spec.sizes}
                assert criterion.kind != "trend" or len(values[criterion.over]) >= 3
                assert set(criterion.place.get("length", ())) <= set(spec.lengths)


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_claims_about_corpora_find_them_at_every_scale_that_runs_them(scale: str) -> None:
    paper = read_paper(find_paper("coupled"))
    corpora = build_study(paper.settings(scale, "corpora")).corpora
    criteria = [
        part for claim in paper.claims for part in claim.criteria if getattr(part, "study", "") == "corpora"
    ]
    assert len(criteria) == 3
    for criterion in criteria:
        assert all(set(place["corpus"]) & set(corpora) for place in criterion.places)


def test_each_data_set_of_faster_qk_is_judged_at_its_published_threshold() -> None:
    paper = read_paper(find_paper("faster_qk"))
    seven, eight = ({c.id: c for c in paper.claims}[f"faster_qk.{number}"] for number in (7, 8))
    used = {(part.study, part.path.rpartition(".")[2]) for part in seven.criteria if part.decides}
    assert used == {("hatexplain", "33"), ("subject", "10"), ("sentences", "10"), ("squad", "10")}
    assert {part.study for part in eight.criteria if part.decides} == {study for study, _ in used}


def test_corpora_that_are_compared_have_equal_unique_bytes() -> None:
    paper = read_paper(find_paper("coupled"))
    whole, others = (build_study(paper.settings("small", study)).corpora for study in ("study", "corpora"))
    assert [name.partition("(")[0] for name in (*whole, *others[:2])] == ["first:9M"] * 3
    assert len(others) == 4
    assert all(name.count("first:3M(") == 3 for name in others[2:])


def test_the_published_kernel_is_judged_with_delay_and_harmonics() -> None:
    paper = read_paper(find_paper("kuramoto"))
    (claim,) = (claim for claim in paper.claims if claim.id == "kuramoto.9")
    deciding = [criterion for criterion in claim.criteria if criterion.decides]
    assert {(one.kind, one.arm) for one in deciding} == {
        ("difference", "delay and harmonics"),
        ("probe", "delay and harmonics"),
    }
    for scale in paper.scales:
        spec = build_study(paper.settings(scale))
        (arm,) = (arm for arm in spec.arms if arm.label == "delay and harmonics")
        assert "successor=mix" in arm.text
        assert "harmonics=3" in arm.text
        assert any(probe.partition(":")[0] == "copies" for probe in spec.probes)


@pytest.mark.parametrize("scale", ["tiny", "small"])
@pytest.mark.parametrize("name", ["coupled", "sharing", "deconstructed", "kuramoto"])
def test_every_judged_study_is_tuned_and_has_five_seeds_or_more(name: str, scale: str) -> None:
    paper = read_paper(find_paper(name))
    used = {getattr(part, "study", "") for claim in paper.claims for part in claim.criteria}
    for study in used & set(paper.studies(scale)):
        spec = build_study(paper.settings(scale, study))
        assert len(spec.seeds) >= 5, study
        assert spec.tune is not None, study


EDGE = "the best learning rate of {} is at the edge of the grid"


@pytest.mark.parametrize(("against", "marked"), [("", ["a", "standard"]), (', against = "b"', ["a", "b"])])
def test_a_claim_has_the_marks_of_the_arms_that_it_compares(
    tmp_path: Path, against: str, marked: list[str]
) -> None:
    rates = tuple(
        Rate("file:x", size, "as_is", label, 1e-3, 2.0, chosen=True, edge=True)
        for size in ("nano", "1m")
        for label in LABELS
    )
    part = f'{{kind = "difference", arm = "a"{against}, expect = "better"}}'
    shift = [-0.1, -0.1]
    found = judged(tmp_path, part, marks=Marks(notes=("changed",)), tuning=rates, a=shift, b=shift)
    assert sorted(found.marks) == ["changed", *(EDGE.format(label) for label in marked)]


def test_a_claim_about_the_baseline_alone_has_the_marks_of_its_study(tmp_path: Path) -> None:
    part = SINK.replace('"a"', '"standard"') + ', compare = "value", expect = "higher"}'
    marks = Marks(notes=("changed",), added_arms=frozenset({("x, nano, shape as_is, length tokens", "a")}))
    assert (
        "this arm was added after results existed"
        in probed(tmp_path, SINK + ', expect = "lower"}', marks, standard=HIGH, a=LOW).marks
    )
    assert probed(tmp_path, part, marks, standard=HIGH).marks == ["changed"]


def probed(
    folder: Path,
    criteria: str,
    marks: Marks = NO_MARKS,
    diverged: str = "",
    **values: list[float],
) -> ClaimResult:
    """Return the claim judged from a probe's number for five synthetic seeds; arms that are not given have none."""
    paper = read_paper(written(folder, criteria))
    spec = build_study(paper.settings("paper"))
    contest = Contest("file:x", "x", "nano", "as_is", "tokens")
    entries = tuple(
        Entry(f"{label}/{seed}", label, seed, contest) for label in LABELS for seed in range(1, 6)
    )
    done = run_result(test={"bits_per_byte": 2.0, "blocks": [[2.0, 1.0]]})
    results = {entry.run: run_result("diverged") if entry.label == diverged else done for entry in entries}
    arms = tuple((arm.text, arm.label) for arm in spec.arms)
    manifest = Manifest(
        "p", arms, "standard", "a", 0.005, (1, 2, 3, 4, 5), entries, probes=("skip:64", "indicators")
    )

    class Probed(Analysis):
        def probe(self, run: str, name: str) -> dict[str, Any] | None:
            label, seed = run.split("/")
            if label not in values or name != "indicators":
                return None
            return {"mean": {"sink": values[label][int(seed) - 1], "base": 0.2}}

    finished = Probed(manifest, study_verdicts(manifest, results, marks), results)
    (claim,) = judge_claims(paper, "paper", {"study": finished})
    return claim


LABELS = ("standard", "a", "b")
LOW, HIGH = [0.10, 0.11, 0.12, 0.11, 0.10], [0.20, 0.22, 0.23, 0.20, 0.21]


@pytest.mark.parametrize(
    ("rest", "direction", "size"),
    [
        (', expect = "lower"}', "supported", "open"),
        (', expect = "higher"}', "contradicted", "open"),
        (', expect = "lower", effect = -0.10}', "supported", "supported"),
        (', expect = "lower", effect = -0.30}', "supported", "contradicted"),
        (', expect = "lower", compare = "ratio", at_most = 0.6}', "supported", "supported"),
        (', expect = "lower", compare = "ratio", effect = 0.51}', "supported", "supported"),
        (', expect = "higher", compare = "value", at_least = 0.05}', "supported", "supported"),
        (', expect = "higher", compare = "value", at_least = 0.15}', "supported", "contradicted"),
        (", margin = 0.2}", "supported", "open"),
        (", margin = 0.05}", "contradicted", "open"),
        (', expect = "no higher", margin = 0.02}', "supported", "open"),
        (', expect = "no lower", margin = 0.02}', "contradicted", "open"),
        (', expect = "no lower", margin = 0.2}', "supported", "open"),
        (', expect = "lower", guard = ["mean.base", 0.1]}', "supported", "open"),
        (', expect = "lower", guard = ["mean.base", 0.3]}', "open", "open"),
    ],
)
def test_a_probes_number_decides_a_claim(tmp_path: Path, rest: str, direction: str, size: str) -> None:
    found = probed(tmp_path, SINK + rest, standard=HIGH, a=LOW)
    assert (found.direction, found.size) == (direction, size), found.reason
    assert found.measured[0]["n"] == 5
    assert "share of attention on the first token (indicators)" in found.measured[0]["unit"]


@pytest.mark.parametrize("name", PAPERS)
def test_numbers_of_probes_in_claims_have_words(name: str) -> None:
    criteria = [part for claim in read_paper(find_paper(name)).claims for part in claim.criteria]
    paths = {(part.probe.partition(":")[0], part.path) for part in criteria if isinstance(part, ProbeNumber)}
    assert {path for probe, path in paths if path not in PROBES[probe].words} == set()


def test_a_probe_that_was_not_taken_leaves_a_claim_open(tmp_path: Path) -> None:
    marks = Marks(notes=("changed",))
    found = probed(tmp_path, SINK + ', expect = "lower"}', marks, standard=HIGH)
    assert (found.direction, found.scale) == ("open", "not run")
    assert "probe indicators was not taken" in found.reason
    assert found.marks == [], "there is no measurement that they could qualify"


def test_a_claim_about_a_probe_of_diverged_runs_is_run_and_open(tmp_path: Path) -> None:
    found = probed(tmp_path, SINK + ', expect = "lower"}', diverged="a", standard=HIGH)
    assert (found.direction, found.scale) == ("open", "published scale")


def test_a_probe_that_the_scale_does_not_take_is_not_tested(tmp_path: Path) -> None:
    part = '{kind = "probe", probe = "projections", path = "mean.weights.kv", arm = "a", expect = "lower"}'
    found = probed(tmp_path, part, standard=HIGH, a=LOW)
    assert (found.direction, found.scale) == ("open", "not tested")
    assert found.reason == "probe projections is not part of scale paper"


def test_probe_criteria_are_adjusted_together(tmp_path: Path) -> None:
    one = SINK + ', expect = "lower"}'
    two = one + ", " + one.replace('"a"', '"b"')
    alone, both = (probed(tmp_path, criteria, standard=HIGH, a=LOW, b=LOW) for criteria in (one, two))
    assert both.measured[0]["p_holm"] == pytest.approx(2 * alone.measured[0]["p_holm"])


@pytest.mark.parametrize(
    ("means", "direction"),
    [((-0.05, -0.01), "supported"), ((-0.01, -0.05), "contradicted"), ((-0.02, -0.02), "open")],
)
def test_an_interaction_is_a_difference_of_differences(
    tmp_path: Path, means: tuple[float, float], direction: str
) -> None:
    criterion = '{kind = "interaction", arm = "a", control = "b", expect = "lower"}'
    found = judged(tmp_path, criterion, a=[means[0]] * 2, b=[means[1]] * 2)
    assert found.direction == direction, found.reason
    assert found.measured[0]["difference"] == pytest.approx(means[0] - means[1], abs=1e-9)


def test_a_median_needs_six_seeds(tmp_path: Path) -> None:
    found = judged(tmp_path, '{kind = "median", arm = "a", expect = "better"}', a=[-0.05, 0], b=[0, 0])
    assert found.direction == "open"
    assert "a median needs 6 paired seeds, got 5" in found.reason


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (SINK + "}", "takes either expect or the margin"),
        (SINK.replace("indicators", "indicator") + ', expect = "lower"}', "unknown probe 'indicator'"),
        (SINK + ', expect = "better"}', "lower"),
        (
            SINK + ', expect = "lower", compare = "ratio", effect = -1.0}',
            "must be above 0 with compare = 'ratio'",
        ),
        (SINK + ', expect = "lower", guard = "mean.sink"}', "a path and a number"),
        ('{kind = "interaction", arm = "a", expect = "lower"}', "control is missing"),
    ],
)
def test_an_invalid_probe_criterion_is_rejected(tmp_path: Path, criterion: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_paper(written(tmp_path, criterion))


def test_every_criterion_is_recorded_with_its_outcome_and_place(tmp_path: Path) -> None:
    part = '{kind = "difference", arm = "a", expect = "better", effect = -0.02, size = "1m"}'
    found = judged(tmp_path, f"{part}, {COST}", a=[0.0, -0.02], b=[0.0, 0.0])
    differs = "size 1m here, nano published"
    assert [(one["kind"], one["scale"], one["differs"]) for one in found.criteria] == [
        ("difference", "reduced scale", differs),
        ("cost", "published scale", ""),
    ]
    assert [row["criterion"] for row in found.measured] == [0, 1]
    assert [found.measured[0][key] for key in ("study", "corpus", "size")] == ["study", "x", "1m"]


def test_a_criterion_that_cannot_be_judged_does_not_stop_the_others(tmp_path: Path) -> None:
    short = LOW[:2]  # reading the probe of the third seed raises
    found = probed(tmp_path, f'{SINK}, expect = "lower"}}, {COST}', standard=HIGH, a=short)
    assert [one["direction"] for one in found.criteria] == ["open", "supported"]
    assert found.direction == "open"
    assert "a probe criterion cannot be judged: IndexError: list index out of range" in found.reason


def test_a_malformed_study_leaves_only_its_own_criteria_open(tmp_path: Path) -> None:
    part = '{kind = "difference", arm = "a", expect = "better"}'
    paper = read_paper(written(tmp_path, f"{part}, {COST}"))
    contest = Contest("file:x", "x", "nano", "as_is", "tokens")
    entries = tuple(Entry(f"{label}/1", label, 1, contest) for label in LABELS)
    arms = tuple((arm.text, arm.label) for arm in build_study(paper.settings("paper")).arms)
    manifest = Manifest("p", arms, "standard", "a", 0.005, (1,), entries)
    done = run_result(test={"bits_per_byte": 2.0, "blocks": [[2.0, 1.0]]})
    rows = study_verdicts(manifest, {entry.run: done for entry in entries})
    broken = [dataclasses.replace(row, values=[2.0, 2.1]) for row in rows]
    (found,) = judge_claims(paper, "paper", {"study": Analysis(manifest, broken)})
    assert [one["direction"] for one in found.criteria] == ["open", "supported"]
    assert "study study cannot be judged: ValueError" in found.reason


def test_a_toy_that_was_stopped_is_not_run_and_one_without_the_numbers_is_not_tested() -> None:
    check = ToyCheck(checks=(next(iter(CHECKS)),))
    order = ToyOrder(quantity="alpha", order=("FAFO", "FACO"), losses=(0.1,))
    for left, scale in ((3, "not run"), (0, "not tested")):
        toy = Toy([], left, [], {}, [])
        assert {part.outcome(toy, False).scale for part in (check, order)} == {scale}
