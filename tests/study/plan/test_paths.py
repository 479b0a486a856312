from __future__ import annotations

from pathlib import Path

import pytest

from headtohead import Study
from headtohead.study.config.folder import default_folder
from headtohead.study.plan.dataset import split_notes
from headtohead.study.plan.planner import plan_study


def test_a_study_on_a_path_is_that_of_the_file(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_bytes(story.read_bytes())
    specs = [
        Study(["standard", "diagonal"], corpus=name, tokens=512, batch=256, seeds=1).spec
        for name in ("my.txt", f"file:{tmp_path / 'my.txt'}")
    ]
    plans = [plan_study(spec) for spec in specs]
    assert list(plans[0].runs) == list(plans[1].runs), "the same run ids"
    assert {run.corpus.name for run in plans[0].runs.values()} == {f"file:{tmp_path / 'my.txt'}"}
    assert split_notes(plans[0].datasets.values()) == [
        "my.txt: 1 document, cut in order: 90% train, 5% valid, 5% test"
    ]
    assert default_folder(specs[0]) == Path("races/standard-diagonal-on-my.txt")
