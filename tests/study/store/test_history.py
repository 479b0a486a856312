"""A study's history: marks persist when arms are added, dropped or renamed, and across exports."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from headtohead import Study, open_study
from headtohead.common.errors import UserError
from headtohead.study.judge.statistics import holm
from headtohead.study.judge.verdict import Verdict, study_verdicts
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.history import NAME, History, Marks
from headtohead.study.store.manifest import Rate
from headtohead.study.store.run_store import Store
from tests.story import story_file
from tests.study.judge.test_verdict import BASE, BETTER, manifest, results

SMALL = {"corpus": f"file:{story_file()}", "tokens": 512, "batch": 256, "lr": 5e-3}
ARMS = ["standard", "sharing:tie=kv", "diagonal"]


def race(folder: Path, arms: list[str] = ARMS, **values: Any) -> dict[str, Verdict]:
    """Run a study; return its verdicts by label, read from its directory."""
    Study(**(SMALL | {"arms": arms, "seeds": 2} | values)).run(folder, workers=1, quiet=True)
    return {row.label: row for row in open_study(folder).verdicts}


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    return [row for row in found if row["event"] == event]


def test_a_study_that_is_only_continued_has_no_marks_and_a_short_history(tmp_path: Path) -> None:
    for _ in range(3):
        verdicts = race(tmp_path)
    assert all(row.marks == [] for row in verdicts.values())
    assert [row.primary for row in verdicts.values()] == [True, False]
    assert (len(rows(tmp_path, "plan")), len(rows(tmp_path, "report"))) == (1, 1)
    assert rows(tmp_path, "plan")[0]["finished"] == []


def test_added_seeds_stay_marked_when_an_arm_is_added(tmp_path: Path) -> None:
    race(tmp_path, ARMS[:2])
    assert race(tmp_path, ARMS[:2], seeds=3)["(Q, K=V)"].added_seeds == [3]
    verdicts = race(tmp_path, ARMS, seeds=3)
    assert [row.added_seeds for row in verdicts.values()] == [[3], [3]]
    assert "this arm was added after results existed" in verdicts["diagonal"].marks
    assert "this arm was added after results existed" not in verdicts["(Q, K=V)"].marks
    for message in open_study(tmp_path).sentences():
        assert "seeds 3 were added after results existed" in message


@pytest.mark.slow
@pytest.mark.page
def test_a_dropped_arm_still_counts_and_makes_nothing_primary(tmp_path: Path) -> None:
    before = race(tmp_path)
    assert before["(Q, K=V)"].primary
    after = race(tmp_path, ["standard", "diagonal"])["diagonal"]
    assert not after.primary
    assert "became the primary comparison after results existed" in after.marks
    assert any(
        "counts 1 comparisons that were reported and later dropped" in message for message in after.marks
    )
    wanted = holm([before["diagonal"].p, before["(Q, K=V)"].p])[0]
    assert after.p_holm == pytest.approx(wanted)
    page = (tmp_path / "report.html").read_text()
    assert "became the primary comparison after results existed" in page


def test_another_baseline_or_setting_is_a_mark(tmp_path: Path) -> None:
    race(tmp_path, ARMS[:2])
    swapped = race(tmp_path, ARMS[:2], baseline="sharing:tie=kv")["standard"]
    assert any("the baseline was changed" in message for message in swapped.marks)
    assert not any("dropped" in message for message in swapped.marks), "it is the same comparison"
    longer = race(tmp_path, ARMS[:2], tokens=768)["(Q, K=V)"]
    assert "settings were changed after results existed: tokens" in longer.marks


GATED = {"arm": "gated", "name": "g"}


@pytest.mark.parametrize(
    ("changed", "values", "mark"),
    [
        (GATED, {"context": 64}, "settings were changed after results existed: context"),
        (GATED | {"lr": 1e-2}, {}, "g was changed after results existed: lr"),
        (GATED | {"arm": "sink"}, {}, "g was changed after results existed: its mechanism"),
    ],
    ids=["context", "lr", "mechanism"],
)
def test_a_change_under_the_same_labels_is_a_mark(
    tmp_path: Path, changed: dict[str, Any], values: dict[str, Any], mark: str
) -> None:
    assert race(tmp_path, ["standard", GATED])["g"].marks == []
    assert race(tmp_path, ["standard", changed], **values)["g"].marks == [mark]
    assert race(tmp_path, ["standard", GATED])["g"].marks == []


def test_a_changed_arm_marks_its_own_verdict_and_a_changed_baseline_all(tmp_path: Path) -> None:
    base = {"arm": "standard", "name": "b"}
    race(tmp_path, [base, GATED, "diagonal"])
    verdicts = race(tmp_path, [base | {"lr": 1e-3}, GATED | {"lr": 1e-2}, "diagonal"])
    mark = "{} was changed after results existed: lr"
    assert verdicts["g"].marks_about == {"g": [mark.format("g")], "b": [mark.format("b")]}
    assert verdicts["diagonal"].marks_about == {"b": [mark.format("b")]}


OWN = """from torch import nn


class Own(nn.Module):
    def __init__(self, shape, options):
        super().__init__()
        self.v = nn.Linear(shape.width, shape.width)

    def forward(self, x, frame):
        return 1.0 * self.v(x)
"""


def test_edited_user_code_is_a_mark_and_an_edited_comment_is_none(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    arms = ["standard", f"{file}:Own"]
    file.write_text(OWN)
    race(tmp_path / "a", arms)
    file.write_text(f"{OWN}# a comment\n")
    assert race(tmp_path / "a", arms)["Own"].marks == []
    file.write_text(OWN.replace("1.0", "2.0"))
    assert race(tmp_path / "a", arms)["Own"].marks == ["Own was changed after results existed: its code"]
    assert str(tmp_path) not in (tmp_path / "a" / NAME).read_text()


def test_a_history_without_definitions_gives_no_marks_until_there_is_another_change(tmp_path: Path) -> None:
    race(tmp_path, ["standard", GATED])
    path = tmp_path / NAME
    found = [json.loads(line) for line in path.read_text().splitlines()]
    older = [{key: row[key] for key in row.keys() - {"definitions", "checksum"}} for row in found]
    assert older != found
    path.write_text("".join(f"{json.dumps(row)}\n" for row in older))
    for _ in range(2):
        assert race(tmp_path, ["standard", GATED])["g"].marks == []
    assert len(rows(tmp_path, "plan")) == 2
    mark = "g was changed after results existed: lr"
    assert race(tmp_path, ["standard", GATED | {"lr": 1e-2}])["g"].marks == [mark]


def test_changes_before_there_are_results_are_no_mark(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    Study(**(SMALL | {"arms": ARMS, "seeds": 2})).run(folder, workers=1, quiet=True, seconds=0.0)
    verdicts = race(folder, ["standard", "diagonal"], seeds=3)
    assert verdicts["diagonal"].marks == []
    assert verdicts["diagonal"].primary


def test_an_export_includes_the_history(tmp_path: Path) -> None:
    race(tmp_path / "a", ARMS[:2])
    race(tmp_path / "a", ARMS[:2], seeds=3)
    export_runs(Store(tmp_path / "a"), tmp_path / "a.tar.gz")
    import_runs(Store(tmp_path / "b"), tmp_path / "a.tar.gz")
    row = race(tmp_path / "b", ARMS[:2], seeds=3)["(Q, K=V)"]
    assert row.added_seeds == [3]
    assert not any("plan unknown" in message for message in row.marks)
    assert str(tmp_path) not in (tmp_path / "b" / NAME).read_text()
    assert str(story_file().parent) not in (tmp_path / "b" / NAME).read_text()


def test_an_import_without_history_is_marked(tmp_path: Path) -> None:
    race(tmp_path / "a", ARMS[:2])
    (tmp_path / "a" / NAME).unlink()
    export_runs(Store(tmp_path / "a"), tmp_path / "a.tar.gz")
    import_runs(Store(tmp_path / "b"), tmp_path / "a.tar.gz")
    row = race(tmp_path / "b", ARMS[:2])["(Q, K=V)"]
    assert any("plan unknown" in message for message in row.marks)
    assert any("plan unknown" in message for message in race(tmp_path / "b", ARMS[:2])["(Q, K=V)"].marks)


@pytest.mark.slow
def test_a_study_older_than_its_history_keeps_its_marks(tmp_path: Path) -> None:
    race(tmp_path, ARMS[:2])
    race(tmp_path, ARMS[:2], seeds=3)
    (tmp_path / NAME).unlink()
    verdicts = race(tmp_path, ARMS, seeds=3)
    assert verdicts["(Q, K=V)"].marks == ["seeds 3 were added after results existed"]
    assert "this arm was added after results existed" in verdicts["diagonal"].marks


def test_an_unterminated_last_row_is_ignored_and_a_damaged_one_is_reported(tmp_path: Path) -> None:
    race(tmp_path, ARMS[:2])
    content = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(content + b'{"event": "pl')
    assert History.read(tmp_path).damaged == 0
    (tmp_path / NAME).write_bytes(b'{"event": "plan"}\n' + content)
    (row,) = open_study(tmp_path).verdicts
    assert any("history is damaged: 1 rows" in message for message in row.marks)


def test_a_best_rate_at_the_edge_of_the_grid_is_a_mark() -> None:
    one = manifest(["base", "up"])
    contest = one.contests()[0]
    rate = Rate(contest.corpus, contest.size, contest.shape, "base", 1e-3, 2.0, chosen=True, edge=True)
    found = results({"base": BASE, "up": BETTER})
    (row,) = study_verdicts(replace(one, tuning=(rate,)), found, Marks())
    assert row.marks == ["the best learning rate of base is at the edge of the grid"]
    assert study_verdicts(replace(one, tuning=(replace(rate, edge=False),)), found)[0].marks == []


@pytest.mark.parametrize(
    ("lead", "seeds", "marked"), [(0.9, 2, True), (1.1, 2, False), (1.1, 1, True), (0.0, 1, True)]
)
def test_a_rate_chosen_by_less_than_the_noise_of_its_trials_is_a_mark(
    lead: float, seeds: int, marked: bool
) -> None:
    one = manifest(["base", "up"])
    contest = one.contests()[0]
    noise = stdev(BASE)
    best = Rate(contest.corpus, contest.size, contest.shape, "base", 2e-3, 2.0, True, False, seeds=seeds)
    other = replace(best, lr=4e-3, score=2.0 + lead * noise, chosen=False)
    far = replace(best, lr=1e-3, score=9.0, chosen=False)
    found = results({"base": BASE, "up": BETTER})
    (row,) = study_verdicts(replace(one, tuning=(far, best, other)), found, Marks())
    assert [note.split(":")[0] for note in row.marks] == [
        "the learning rate of base could as well be 0.004"
    ] * marked


def test_the_noise_of_an_arms_rate_does_not_depend_on_the_arm_it_is_compared_with() -> None:
    one = manifest(["base", "up", "short"])
    contest = one.contests()[0]
    best = Rate(contest.corpus, contest.size, contest.shape, "base", 2e-3, 2.0, True, False)
    tuning = (best, replace(best, lr=4e-3, score=2.0001, chosen=False))
    found = results({"base": BASE, "up": BETTER, "short": BETTER[:3]})
    full, short = study_verdicts(replace(one, tuning=tuning), found, Marks())
    assert (full.n, short.n) == (5, 3)
    assert len(full.marks_about["base"]) == 1
    assert short.marks_about["base"] == full.marks_about["base"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "another"}, "name: study; given: another"),
        ({"size": "1m", "batch": 512}, "sizes: nano; given: 1m"),
        ({"shape": ["as_is", "params"]}, "shape rules: as_is; given: as_is, params"),
        ({"corpus": "stdlib"}, "datasets: file:.*; given: stdlib"),
    ],
)
def test_a_folder_with_another_study_is_rejected_unless_it_is_extended(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    race(tmp_path, ARMS[:2], seeds=1)
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(UserError, match=message):
        race(tmp_path, ARMS[:2], seeds=1, **values)
    assert (tmp_path / "study.json").read_bytes() == before


def test_a_study_may_be_extended_on_request(tmp_path: Path) -> None:
    race(tmp_path, ARMS[:2], seeds=1)
    wider = Study(**(SMALL | {"arms": ARMS[:2], "seeds": 1, "shape": ["as_is", "params"]}))
    wider.run(tmp_path, workers=1, quiet=True, extend=True)
    assert {row.shape for row in open_study(tmp_path).verdicts} == {"as_is", "params"}
    assert len(rows(tmp_path, "plan")) == 2


def test_a_study_without_a_name_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arms in (ARMS[:2], ["standard", "diagonal"]):
        Study(**(SMALL | {"arms": arms, "seeds": 1})).run(workers=1, quiet=True)
    found = sorted(path.name for path in (tmp_path / "races").iterdir())
    assert found == ["standard-diagonal-on-story.txt", "standard-sharing_tie=kv-on-story.txt"]
    assert all(re.fullmatch(r"[A-Za-z0-9._=-]+", name) for name in found)
