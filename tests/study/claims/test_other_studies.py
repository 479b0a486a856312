"""Papers with several studies: each by its name, tasks by their own metric (higher is better)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.study.claims import ClaimResult, judge_claims
from headtohead.study.claims.paper import find_paper, read_paper
from headtohead.study.config.spec import build_study
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.store.manifest import Contest, Entry, Manifest, Measure, Rate
from headtohead.study.store.result import RunResult
from tests.results import run_result

FILE = """
[paper]
unit = "nats_per_token"
bytes_per_unit = 4.4
[study]
arms = ["standard", "diagonal"]
corpus = "file:{corpus}"
tokens = 1024
batch = 256
seeds = 2
[scale.smoke]
[scale.small]
[scale.paper]
[also.lists]
arms = ["standard", {{arm = "sharing:tie=qk", name = "a"}}, {{arm = "sharing:tie=qk,pos2d=true", name = "b"}}]
tasks = {tasks}
tokens = 2048
batch = 1024
seeds = 2
{scales}
[[claim]]
id = "p.1"
statement = "said"
published = "some"
criteria = [{criterion}]
"""
SCALES = "[also.lists.smoke]\n[also.lists.small]"
OWN = (0.004, -0.004, 0.002, -0.003, 0.001)
REPAIRS = '{kind = "tasks", study = "lists", arm = "b", against = "a", expect = "better", effect = 0.04}'
EVEN = {"recall": 0.06, "induction": 0.02}


def written(
    folder: Path,
    criterion: str,
    scales: str = SCALES,
    corpus: str = "x",
    tasks: tuple[str, ...] = ("recall:train=40", "induction:train=40"),
) -> Path:
    path = folder / "p.toml"
    path.write_text(FILE.format(scales=scales, criterion=criterion, corpus=corpus, tasks=list(tasks)))
    return path


def judged(
    folder: Path,
    gains: dict[str, float],
    *,
    scale: str = "small",
    criterion: str = REPAIRS,
    lost: str = "",
    guessed: dict[str, float] | None = None,
    tuning: tuple[Rate, ...] = (),
) -> ClaimResult:
    """Return the claim judged from synthetic runs: `gains` is b - a by task, and a equals standard (0.4).

    `guessed` is the score of a constant answer by task.
    """
    paper = read_paper(written(folder, criterion, tasks=("recall", "induction")))
    results: dict[str, RunResult] = {}
    entries = []
    for task, gain in gains.items():
        contest = Contest(task, task, "nano", "as_is", "tokens")
        for label, level in (("standard", 0.4), ("a", 0.4), ("b", 0.4 + gain)):
            for seed in range(5):
                run = f"{task}/{label}/{seed}"
                entries.append(Entry(run, label, seed + 1, contest))
                value = level + OWN[(seed + len(label) + (3 + len(task)) * (label == "b")) % 5]
                done = run_result(test={"accuracy": value})
                results[run] = run_result("diverged") if run == lost else done
    spec = build_study(paper.settings(scale, "lists"))
    arms = tuple((arm.text, arm.label) for arm in spec.arms)
    measures = dict.fromkeys(gains, Measure("accuracy", "higher", 0.01))
    lines = {task: {"chance": 0.1, "majority class": value} for task, value in (guessed or {}).items()}
    manifest = Manifest(
        *("p", arms, "standard", "a", 0.01, (1, 2, 3, 4, 5), tuple(entries)),
        references=lines,
        measures=measures,
        tuning=tuning,
    )
    (found,) = judge_claims(paper, scale, {"lists": Analysis(manifest, study_verdicts(manifest, results))})
    return found


@pytest.mark.parametrize(
    ("gains", "direction", "size"),
    [
        (EVEN, "supported", "supported"),
        ({"recall": 0.16, "induction": 0.12}, "supported", "contradicted"),
        ({"recall": -0.06, "induction": -0.02}, "contradicted", "contradicted"),
        ({"recall": 0.06, "induction": -0.06}, "open", "contradicted"),
    ],
)
def test_the_mean_of_the_tasks_decides(
    tmp_path: Path, gains: dict[str, float], direction: str, size: str
) -> None:
    found = judged(tmp_path, gains)
    assert (found.direction, found.size) == (direction, size)
    assert found.measured[0]["difference"] == pytest.approx(sum(gains.values()) / 2)
    assert found.measured[0]["unit"] == "accuracy"
    assert "mean of 2 tasks" in found.reason


def test_a_claim_about_the_mean_of_tasks_has_the_marks_of_all_tasks(tmp_path: Path) -> None:
    last = list(EVEN)[-1]
    rate = Rate(last, "nano", "as_is", "b", 1e-3, 0.5, chosen=True, edge=True)
    found = judged(tmp_path, EVEN, tuning=(rate,))
    assert found.marks == ["the best learning rate of b is at the edge of the grid"]
    assert found.measured[0]["corpus"] == ", ".join(EVEN)


@pytest.mark.parametrize(
    ("gain", "direction"), [(0.0, "supported"), (-0.1, "supported"), (0.1, "contradicted")]
)
def test_the_mean_of_the_tasks_is_no_better_than_a_margin(
    tmp_path: Path, gain: float, direction: str
) -> None:
    part = '{kind = "tasks", study = "lists", arm = "b", against = "a", expect = "no better", margin = 0.02}'
    found = judged(tmp_path, {"recall": gain, "induction": gain}, criterion=part)
    assert found.direction == direction, found.reason
    with pytest.raises(UserError, match="takes a margin if and only if"):
        judged(tmp_path, EVEN, criterion=part.replace(", margin = 0.02", ""))


ON_RECALL = ', study = "lists", corpus = "recall", arm = "b"'


@pytest.mark.parametrize(
    ("criterion", "up", "down"),
    [
        (f'{{kind = "difference"{ON_RECALL}, expect = "better"}}', "supported", "contradicted"),
        (f'{{kind = "difference"{ON_RECALL}, against = "a", expect = "worse"}}', "contradicted", "supported"),
        ('{kind = "order", study = "lists", first = "b", then = ["a"]}', "supported", "contradicted"),
        (
            f'{{kind = "equivalence"{ON_RECALL}, margin = 0.02, expect = "no worse"}}',
            "supported",
            "contradicted",
        ),
        (
            f'{{kind = "equivalence"{ON_RECALL}, margin = 0.02, expect = "no better"}}',
            "contradicted",
            "supported",
        ),
        (f'{{kind = "equivalence"{ON_RECALL}, margin = 0.02}}', "contradicted", "contradicted"),
        (
            f'{{kind = "interaction"{ON_RECALL}, control = "a", expect = "higher"}}',
            "supported",
            "contradicted",
        ),
        (
            '{kind = "change", study = "lists", arm = "b", over = "corpus", values = ["induction", "recall"], '
            'expect = "higher"}',
            *("supported", "contradicted"),
        ),
    ],
)
def test_higher_accuracy_is_better_in_every_kind(tmp_path: Path, criterion: str, up: str, down: str) -> None:
    for sign, direction in ((1, up), (-1, down)):
        found = judged(tmp_path, {"recall": 0.06 * sign, "induction": 0.0}, criterion=criterion)
        assert found.direction == direction
        assert found.measured[0]["unit"] == "accuracy"


ALIKE = f'{{kind = "equivalence"{ON_RECALL}, margin = 0.02, effect = 0.001}}'
AHEAD = f'{{kind = "difference"{ON_RECALL}, expect = "better", effect = 0.06}}'


@pytest.mark.parametrize(
    ("criterion", "gain", "guessed", "decided"),
    [
        (ALIKE, 0.0, 0.30, True),
        (ALIKE, 0.0, 0.38, True),
        (ALIKE, 0.0, 0.39, False),  # both within the margin of a constant answer
        (ALIKE, 0.0, 0.45, False),
        (AHEAD, 0.06, 0.40, True),  # one of them learned
        (AHEAD, 0.06, 0.47, False),
        ('{kind = "order", study = "lists", first = "b", then = ["a"]}', 0.06, 0.47, False),
    ],
)
def test_untrained_arms_decide_nothing(
    tmp_path: Path, criterion: str, gain: float, guessed: float, decided: bool
) -> None:
    gains = {"recall": gain, "induction": 0.0}
    found = judged(tmp_path, gains, criterion=criterion, guessed={"recall": guessed})
    assert found.direction == ("supported" if decided else "open")
    assert ("score no better than chance or a constant answer" in found.reason) is not decided
    assert decided or found.size == "open"


def test_a_mean_of_tasks_needs_one_learned_task(tmp_path: Path) -> None:
    high = dict.fromkeys(EVEN, 0.6)
    assert judged(tmp_path, EVEN, guessed=high | {"recall": 0.2}).direction == "supported"
    assert judged(tmp_path, EVEN, guessed=high).direction == "open"


@pytest.mark.parametrize(("share", "direction"), [(1.0, "open"), (0.5, "supported"), (2.0, "contradicted")])
def test_an_interaction_can_use_a_share_of_the_other_difference(
    tmp_path: Path, share: float, direction: str
) -> None:
    part = f'{{kind = "interaction"{ON_RECALL}, control = "b", share = {share}, expect = "higher"}}'
    assert judged(tmp_path, EVEN, criterion=part).direction == direction


def test_effects_on_tasks_stay_in_their_metric(tmp_path: Path) -> None:
    part = f'{{kind = "difference"{ON_RECALL}, expect = "better", effect = 0.06}}'
    found = judged(tmp_path, EVEN, criterion=part)
    assert (found.size, found.measured[0]["published"]) == ("supported", [0.06])


def test_a_criterion_can_have_its_own_published_setting(tmp_path: Path) -> None:
    part = f'{{kind = "difference"{ON_RECALL}, expect = "better", at = {{corpus = "recall", size = "{{}}", tokens = 2048}}}}'
    assert judged(tmp_path, EVEN, criterion=part.replace("{}", "nano")).scale == "published scale"
    assert judged(tmp_path, EVEN, criterion=part.replace("{}", "1m")).scale == "reduced scale"


def test_smoke_diverged_runs_and_missing_scales_decide_nothing(tmp_path: Path) -> None:
    assert judged(tmp_path, EVEN, scale="smoke").direction == "open"
    found = judged(tmp_path, EVEN, lost="recall/b/2")
    assert (found.direction, "1 runs diverged" in found.reason) == ("open", True)
    paper = read_paper(tmp_path / "p.toml")
    missing = (
        ("paper", "not tested", "is not part of scale paper"),
        ("small", "not run", "has not been run"),
    )
    for scale, state, reason in missing:
        (claim,) = judge_claims(paper, scale, {})
        assert (claim.scale, claim.reason) == (state, f"study lists {reason}")


@pytest.mark.parametrize(
    ("scales", "criterion", "message"),
    [
        ("smal = 1\n[also.lists.small]", REPAIRS, "also.lists.small: unknown study setting 'smal'"),
        (SCALES, REPAIRS.replace('"b"', '"c"'), "unknown arm 'c'"),
        (
            SCALES,
            REPAIRS.replace('"lists"', '"list"'),
            "unknown study of the paper 'list'; did you mean 'lists'",
        ),
        (SCALES, REPAIRS.replace('"lists"', '"study"'), "study 'study' has no tasks"),
        (
            SCALES,
            '{kind = "tasks", arm = "b", expect = "better"}',
            "a tasks criterion needs a study of tasks",
        ),
        ("", REPAIRS, r"\[also.lists\] has no scale"),
        (SCALES + "\n[also.toy.small]", REPAIRS, "a study name has"),
        (SCALES + "\n[also.A.small]", REPAIRS, "a study name has"),
        ("[also.lists.small]\ntasks = ['recal']", REPAIRS, "also.lists.small: unknown task 'recal'"),
        (SCALES + "\ncorpus = 'stdlib'", REPAIRS, "some scales use tasks, others corpora"),
    ],
)
def test_errors_in_another_study_are_named(tmp_path: Path, scales: str, criterion: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_paper(written(tmp_path, criterion, scales))


def test_an_effect_against_the_direction_of_a_metric_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"'better' means a difference above 0 for a task, got effect = -0.04"
    ):
        read_paper(written(tmp_path, REPAIRS.replace("0.04", "-0.04")))


def test_the_positional_terms_claim_has_a_study() -> None:
    paper = read_paper(find_paper("sharing"))
    claim = next(claim for claim in paper.claims if claim.id == "sharing.9")
    assert {(part.kind, part.study) for part in claim.criteria} == {("tasks", "tasks")}
    for scale in ("smoke", "small"):
        assert build_study(paper.settings(scale, "tasks")).causal is False


@pytest.mark.page
@pytest.mark.slow
def test_studies_run_together_or_one_by_one_and_claims_use_all_results(tmp_path: Path, story: Path) -> None:
    path = written(tmp_path, REPAIRS, corpus=str(story))
    out = tmp_path / "o"

    def done(only: str) -> h2h.Reproduction:
        return h2h.reproduce(str(path), out=out, only=only, device="cpu", quiet=True, workers=1)

    with pytest.raises(UserError, match="unknown study of p at scale smoke 'list'; did you mean 'lists'"):
        done("list")
    first = done("study")
    assert (first.ran, first.summary.done) == (["study"], 4)
    assert first.claims[0].reason == "study lists has not been run"
    second = done("lists")
    assert (second.ran, set(second.studies)) == (["lists"], {"study", "lists"})
    assert second.studies["lists"].path == out / "lists"
    assert (out / "lists" / "report.html").is_file()
    rows = json.loads((out / "claims.json").read_text())
    assert rows[0]["measured"][0]["n"] == 2
    again = done("")
    assert (again.ran, again.summary.done) == (["study", "lists"], 0)
    assert [claim.as_dict() for claim in again.claims] == rows
    assert 'href="lists/report.html"' in (out / "report.html").read_text()
    path.write_text(path.read_text().replace("tokens = 2048", "tokens = 4096"))
    assert "was run with other settings" in done("study").claims[0].reason


def test_a_missing_study_is_named(tmp_path: Path) -> None:
    alone = h2h.Reproduction("smoke", [], tmp_path / "claims.json", {"lists": None})  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"study 'study' has not been run in .*; available: lists"):
        _ = alone.study


def test_a_study_that_cannot_run_does_not_stop_the_others(tmp_path: Path, story: Path) -> None:
    path = written(tmp_path, REPAIRS, "[also.lists.smoke]\ntasks = ['hatexplain']", str(story))
    found = h2h.reproduce(
        str(path), out=tmp_path / "o", device="cpu", quiet=True, workers=1, data_dir=tmp_path / "none"
    )
    assert found.ran == ["study"]
    assert list(found.trouble) == ["lists"]
    assert "could not be run" in found.claims[0].reason


def test_a_study_that_was_not_started_is_work_left(
    tmp_path: Path, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, REPAIRS, corpus=str(story))
    words = ["reproduce", str(path), "--out", str(tmp_path / "o"), "--device", "cpu", "--workers", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--quiet", "--time-limit", "0s"])
    assert ended.value.code == 3
    assert "study lists was not started; repeat the same command to continue" in capsys.readouterr().out


def test_a_folder_with_another_study_is_rejected(tmp_path: Path, story: Path) -> None:
    path = written(tmp_path, REPAIRS, corpus=str(story))
    out = tmp_path / "o"
    h2h.reproduce(str(path), out=out, only="study", device="cpu", quiet=True, workers=1, seconds=0.0)
    kept = (out / "study.json").read_bytes()
    other = tmp_path / "q.toml"
    other.write_text(path.read_text())
    for given in ({"paper": str(other)}, {"paper": str(path), "scale": "small"}):
        with pytest.raises(UserError, match="holds the study 'p, smoke', not"):
            h2h.reproduce(**given, out=out, device="cpu", quiet=True, workers=1)
    assert (out / "study.json").read_bytes() == kept


@pytest.mark.parametrize("content", ["[]", '{"a"', '{"settings": 3}'])
def test_a_damaged_study_does_not_stop_the_judging_of_others(
    tmp_path: Path, story: Path, content: str
) -> None:
    path = written(tmp_path, REPAIRS, corpus=str(story))
    place = tmp_path / "o" / "lists" / "study.json"
    place.parent.mkdir(parents=True)
    place.write_text(content)
    found = h2h.reproduce(
        str(path), out=tmp_path / "o", only="study", device="cpu", quiet=True, workers=1, seconds=0.0
    )
    assert f"damaged file {place}" in found.trouble["lists"]
    assert "damaged file" in found.claims[0].reason
    assert found.path.is_file()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seeds = '1k'", "toy.smoke: the toy takes 1 to"),
        ("seeds = 1.5", "toy.smoke: seeds: expected a whole number"),
        ("long = {FACO = 'x'}", "toy.smoke: FACO: expected a count"),
    ],
)
def test_counts_of_the_toy_are_validated(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, REPAIRS)
    text = path.read_text()
    path.write_text(f"{text}[toy.smoke]\nruns = ['FACO']\n{line}\n")
    with pytest.raises(UserError, match=message):
        read_paper(path)
    path.write_text(f"{text}[toy.smoke]\nruns = ['FACO']\nseeds = '2'\nlong = {{FACO = '1'}}\n")
    assert read_paper(path).toy["smoke"].seeds == 2


@pytest.mark.parametrize("value", ["0", "-1", "1e-299", "1e299"])
def test_bytes_per_unit_outside_its_limits_are_rejected(tmp_path: Path, value: str) -> None:
    path = written(tmp_path, REPAIRS)
    path.write_text(path.read_text().replace("4.4", value))
    message = r"p\.toml: \[paper\]: bytes_per_unit takes a number from 0\.001 to 1,000,000, got"
    with pytest.raises(UserError, match=message):
        read_paper(path)


@pytest.mark.parametrize("share", ["0", "-1", "1e299"])
def test_a_share_must_be_positive(tmp_path: Path, share: str) -> None:
    criterion = f'{{kind = "interaction"{ON_RECALL}, control = "a", expect = "higher", share = {share}}}'
    with pytest.raises(UserError, match="share takes a number above 0, at most 1000, got"):
        read_paper(written(tmp_path, criterion))


def test_a_probe_that_does_not_apply_to_the_study_is_rejected(tmp_path: Path) -> None:
    criterion = '{kind = "probe", probe = "maps", study = "lists", path = "x", arm = "b", expect = "higher"}'
    with pytest.raises(UserError, match=r"claim p\.1: probe 'maps' applies to studies of corpora"):
        read_paper(written(tmp_path, criterion))


STARTED = """
[also.first]
arms = ["standard"]
tasks = ["recall:train=40"]
tokens = 2048
batch = 1024
seeds = 1
[also.first.smoke]
[also.lists]
arms = ["standard", {name = "b", arm = "standard", lr = 1e-3}]
tasks = ["recall:train=40"]
from = "also.first"
tokens = 2048
batch = 1024
seeds = 2
[also.lists.smoke]
"""


def starting(folder: Path, corpus: str = "x", **changes: str) -> Path:
    """Return a paper whose study `lists` starts from the run of `first`."""
    path = written(
        folder, '{kind = "difference", study = "lists", arm = "b", expect = "better"}', corpus=corpus
    )
    text = path.read_text()
    before, after = text.index("[also.lists]"), text.index("[[claim]]")
    changed = STARTED
    for old, new in changes.items():
        changed = changed.replace(old, new)
    path.write_text(text[:before] + changed + text[after:])
    return path


def test_models_start_from_the_run_of_an_earlier_study(tmp_path: Path, story: Path) -> None:
    path, out = starting(tmp_path, str(story)), tmp_path / "o"

    def done(only: str, place: Path = out, **more: Any) -> h2h.Reproduction:
        return h2h.reproduce(str(path), out=place, only=only, device="cpu", quiet=True, workers=1, **more)

    short = done("lists", seconds=0.0)
    assert (short.ran, short.summary.left) == (["first"], 1)
    found = done("lists")
    assert (found.ran, found.summary.done) == (["first", "lists"], 5)
    (start,) = found.studies["first"].results
    for run in found.studies["lists"].results:
        record = json.loads((out / "lists" / "runs" / run / "spec.json").read_text())
        assert record["start"] == start
    rows = [claim.as_dict() for claim in found.claims]
    assert done("lists").summary.done == 0
    # Judged again after another study, in another directory.
    moved = out.rename(tmp_path / "moved")
    assert set(done("study", moved).studies) == {"study", "first", "lists"}
    assert json.loads((moved / "claims.json").read_text()) == rows


def test_each_arm_can_start_from_a_study_of_its_own(tmp_path: Path, story: Path) -> None:
    path = starting(
        tmp_path,
        str(story),
        **{
            "[also.lists]": "[also.second]\narms = ['standard']\ntasks = ['recall:train=40']\ntokens = 4096\n"
            "batch = 1024\nseeds = 1\n[also.second.smoke]\n[also.lists]",
            "lr = 1e-3": 'from = "also.second"',
        },
    )

    def done() -> h2h.Reproduction:
        return h2h.reproduce(str(path), out=tmp_path / "o", only="lists", device="cpu", quiet=True, workers=1)

    found = done()
    assert found.ran == ["first", "second", "lists"]
    runs = tmp_path / "o" / "lists" / "runs"
    starts = {
        (spec["label"], spec["start"])
        for spec in (
            json.loads((runs / run / "spec.json").read_text()) for run in found.studies["lists"].results
        )
    }
    (first,), (second,) = (found.studies[name].results for name in ("first", "second"))
    assert starts == {("standard", first), ("b", second)}
    assert done().summary.done == 0


def test_models_do_not_start_from_a_run_that_diverged(tmp_path: Path, story: Path) -> None:
    path = starting(tmp_path, str(story), **{"seeds = 1\n": "seeds = 1\nlr = 1e9\n"})
    with pytest.raises(UserError, match="study lists initializes its models from study first"):
        h2h.reproduce(str(path), out=tmp_path / "o", only="lists", device="cpu", quiet=True, workers=1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'also.first"',
            'also.frist"',
            "from = 'also.frist': no earlier study has this name; earlier studies: study, first",
        ),
        ("seeds = 1\n", "seeds = 2\n", "from = 'also.first': that study has several runs"),
        ("[also.first.smoke]", "[also.first.small]", "from = 'also.first': that study has no scale smoke"),
        ('recall:train=40"]\ntokens', 'recall:train=40", "copy"]\ntokens', "that study has several runs"),
        ("lr = 1e-3", 'from = "also.frist"', "from = 'also.frist': no earlier study has this name"),
    ],
)
def test_an_invalid_start_is_rejected(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_paper(starting(tmp_path, **{old: new}))


@pytest.mark.parametrize(("ahead", "direction"), [(0.06, "supported"), (-0.06, "contradicted")])
def test_a_criterion_can_use_each_runs_best_step(tmp_path: Path, ahead: float, direction: str) -> None:
    """At the last step b equals standard; at its best step it differs."""
    part = f'{{kind = "difference"{ON_RECALL}, expect = "better", step = "best"}}'
    paper = read_paper(written(tmp_path, part, tasks=("recall", "induction")))
    contest = Contest("recall", "recall", "nano", "as_is", "tokens")
    entries, results = [], {}
    for label, level in (("standard", 0.5), ("a", 0.5), ("b", 0.5 + ahead)):
        for seed in range(5):
            run, own = f"{label}/{seed}", OWN[(seed + len(label) + 3 * (label == "b")) % 5]
            entries.append(Entry(run, label, seed + 1, contest))
            results[run] = run_result(
                test={"accuracy": 0.4 + own},
                best={"step": 3, "valid": {"accuracy": 0.6}, "test": {"accuracy": level + own}},
            )
    arms = (("standard", "standard"), ("a", "a"), ("b", "b"))
    manifest = Manifest(
        "p", arms, "standard", None, 0.01, (1, 2, 3, 4, 5), tuple(entries),
        measures={"recall": Measure("accuracy", "higher", 0.01)},
    )  # fmt: skip

    def judge() -> ClaimResult:
        study = Analysis(manifest, study_verdicts(manifest, results), results)
        (claim,) = judge_claims(paper, "small", {"lists": study})
        return claim

    found = judge()
    assert found.direction == direction
    assert found.measured[0]["difference"] == pytest.approx(ahead, abs=0.005)
    assert "b - standard at the best step" in found.reason
    results["b/2"] = run_result(test={"accuracy": 0.4})
    assert (judge().direction, "has no best step" in judge().reason) == ("open", True)


def test_only_runs_on_tasks_have_a_best_step(tmp_path: Path) -> None:
    part = '{kind = "difference", arm = "diagonal", expect = "better", step = "best"}'
    with pytest.raises(UserError, match="step applies to studies of tasks; study 'study' has no tasks"):
        read_paper(written(tmp_path, part))
