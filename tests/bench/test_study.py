"""h2h bench study: where the time of a whole study goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headtohead import Study, bench_study
from headtohead.cli.main import main
from headtohead.common.errors import UserError


@pytest.mark.slow
def test_the_phases_add_up_and_all_tokens_are_counted(story: Path, tmp_path: Path) -> None:
    tune = {"lr": [1e-3, 1e-2, 1e-1], "tokens": 2560}
    study = Study(
        ["standard", "diagonal"], corpus=f"file:{story}", batch=256, tokens=5120, seeds=2, tune=tune
    )
    document = bench_study(study, out=tmp_path / "study", workers=1, quiet=True)
    assert document["left"] == 0
    assert document["tokens"] >= 4 * 5120 + 6 * 2560, "the tuning may have been extended"
    phases = document["phases"]
    assert {"tune", "prepare", "train", "score", "report"} <= phases.keys()
    assert 0.5 * document["seconds"] < sum(phases.values()) <= 1.01 * document["seconds"]
    assert document["tokens_per_second"] == pytest.approx(document["tokens"] / document["seconds"], rel=0.01)
    with pytest.raises(UserError, match="is not empty"):
        bench_study(study, out=tmp_path / "study")


def test_the_command_prints_a_table_and_one_document(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arms", "standard", "--corpus", f"file:{story}", "--tokens", "2560", "--batch", "256"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "study", *arguments, "--seeds", "1", "--workers", "1", "--quiet"])
    assert ended.value.code == 0
    *shown, last = capsys.readouterr().out.strip().splitlines()
    assert any("train" in line for line in shown)
    assert json.loads(last)["runs"] == 1
