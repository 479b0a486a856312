"""Claims that a study of tasks decides: by the mean of its tasks, seed by seed, fewer wrong answers being better."""

from __future__ import annotations

from pathlib import Path

import pytest

from headtohead.common.errors import UserError
from headtohead.study.claims import ClaimResult, TaskStudy, judge_claims
from headtohead.study.outline import Contest, Entry, Measure, Outline
from headtohead.study.published import find_paper, read_paper
from headtohead.study.spec import build_study
from headtohead.study.verdict import study_verdicts

FILE = """
[study]
arms = ["standard", "diagonal"]
tokens = 8192
[scale.smoke]
[scale.small]
[scale.paper]
[task_study]
arms = ["standard", {{arm = "sharing:tie=qk", name = "a"}}, {{arm = "sharing:tie=qk,pos2d=true", name = "b"}}]
tasks = ["recall", "induction"]
{scales}
[[claim]]
id = "p.1"
statement = "said"
published = "some"
criteria = [{criterion}]
"""
OWN = (0.004, -0.004, 0.002, -0.003, 0.001)
REPAIRS = '{kind = "tasks", arm = "b", against = "a", expect = "better", effect = -0.04}'


def judged(
    folder: Path, gains: dict[str, float], *, scale: str = "small", criterion: str = REPAIRS, lost: str = ""
) -> ClaimResult:
    """Return what made runs say: by task, by how much b is above a."""
    path = folder / "p.toml"
    path.write_text(FILE.format(scales="[task_scale.smoke]\n[task_scale.small]", criterion=criterion))
    paper = read_paper(path)
    results, entries = {}, []
    for task, gain in gains.items():
        contest = Contest(task, task, "nano", "as_is", "tokens")
        for label, level in (("standard", 0.5), ("a", 0.4), ("b", 0.4 + gain)):
            for seed in range(5):
                run = f"{task}/{label}/{seed}"
                entries.append(Entry(run, label, seed + 1, contest))
                value = level + OWN[(seed + len(label) + 2 * (label == "b")) % 5]
                done = {"status": "done", "test": {"accuracy": value, "blocks": {}}}
                results[run] = {"status": "diverged"} if run == lost else done
    spec = build_study(paper.tasks[scale])
    arms = tuple((arm.text, arm.label) for arm in spec.arms)
    measures = dict.fromkeys(gains, Measure("accuracy", "higher", 0.01))
    outline = Outline("p", arms, "standard", "a", 0.01, (1, 2, 3, 4, 5), tuple(entries), measures=measures)
    tasks = TaskStudy(outline, study_verdicts(outline, results))
    main = build_study(paper.settings(scale))
    empty = Outline("p", tuple((arm.text, arm.label) for arm in main.arms), "standard", None, 0.005, (1,), ())
    (found,) = judge_claims(paper, scale, main, empty, [], tasks=tasks)
    return found


@pytest.mark.parametrize(
    ("gains", "direction", "size"),
    [
        ({"recall": 0.06, "induction": 0.02}, "supported", "supported"),
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
    mean = sum(gains.values()) / 2
    assert found.measured[0]["difference"] == pytest.approx(-mean)
    assert found.measured[0]["unit"] == "share_wrong"
    assert "mean of 2 tasks" in found.reason


def test_smoke_diverged_runs_and_missing_scales_decide_nothing(tmp_path: Path) -> None:
    gains = {"recall": 0.06, "induction": 0.02}
    assert judged(tmp_path, gains, scale="smoke").direction == "open"
    found = judged(tmp_path, gains, lost="recall/b/2")
    assert (found.direction, "1 runs diverged" in found.reason) == ("open", True)
    paper = read_paper(tmp_path / "p.toml")
    spec = build_study(paper.settings("paper"))
    arms = tuple((arm.text, arm.label) for arm in spec.arms)
    outline = Outline("p", arms, "standard", None, 0.005, (1,), ())
    (claim,) = judge_claims(paper, "paper", spec, outline, [])
    assert (claim.scale, claim.reason) == ("not run", "the study of tasks is not part of scale paper")


@pytest.mark.parametrize(
    ("scales", "criterion", "words"),
    [
        ("[task_scale.smal]", REPAIRS, "unknown scale of the study of tasks 'smal'"),
        ("[task_scale.small]", REPAIRS.replace('"b"', '"c"'), "unknown arm 'c'"),
        ("[task_scale.small]\ntasks = ['recal']", REPAIRS, "task_scale.small: unknown task 'recal'"),
        ("[task_scale.small]\ncorpus = 'stdlib'", REPAIRS, "task_scale.small: it has no tasks"),
    ],
)
def test_mistakes_in_a_study_of_tasks_are_named(
    tmp_path: Path, scales: str, criterion: str, words: str
) -> None:
    path = tmp_path / "p.toml"
    path.write_text(FILE.format(scales=scales, criterion=criterion))
    with pytest.raises(UserError, match=words):
        read_paper(path)


def test_the_positional_terms_claim_has_a_study() -> None:
    paper = read_paper(find_paper("sharing"))
    claim = next(claim for claim in paper.claims if claim.id == "sharing.9")
    assert {part.kind for part in claim.criteria} == {"tasks"}
    for scale in ("smoke", "small"):
        assert build_study(paper.tasks[scale]).causal is False
