from __future__ import annotations

import json
from pathlib import Path

import pytest

from headtohead.cli.main import main


def run(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code


def test_forecast_prints_what_a_study_takes_and_could_find(
    story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "forecast",
        "--arms",
        "standard",
        "sharing:tie=kv",
        "--corpus",
        f"file:{story}",
        "--tokens",
        "2560",
    )
    words += ("--batch", "256", "--seeds", "2", "--device", "cpu", "--workers", "1")
    run(*words)
    out = capsys.readouterr().out
    for part in (
        "4 of 4 runs to do",
        "tokens:  10.2k",
        "FLOPs:",
        "time:",
        "disk:",
        "2 (planned)",
        "--spread NUMBER",
    ):
        assert part in out
    run(*words, "--spread", "0.01", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["spread"], found["seeds"]) == (4, 0.01, 2)
    run(*words, "--spread", "0.01", "--margin", "0.02")
    assert "as large as the margin (0.02) needs" in capsys.readouterr().out
    run("forecast", "--arms", "standrd", code=2)
    assert "did you mean 'standard'" in capsys.readouterr().err


def test_forecast_of_a_cluster_prints_hours_critical_path_and_what_it_assumes(
    story: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headtohead.study.judge.forecast._measure", lambda *given: 1000.0)
    words = ("forecast", "--arms", "standard", "diagonal", "--corpus", f"file:{story}", "--tokens", "256k")
    words += ("--batch", "256", "--seeds", "2", "--device", "cpu", "--on", "ray", "--nodes", "8")
    words += ("--gpus-per-node", "2", "--gpus-per-run", "0.5")
    run(*words)
    out = capsys.readouterr().out
    for part in (
        " on 8 nodes with 16 GPUs, 32 slots",
        "GPU-hours: 0.2",
        "utilization 12%",
        "1 node would take ",
        "assumed: every GPU is as fast as the device measured here, cpu (",
        "that is no GPU: run the forecast on a machine with one of the cluster's GPUs",
        "runs that share a GPU have their share of its speed",
        "critical path, which no number of nodes shortens: ",
        "standard, seed 1",
    ):
        assert part in out
    run(*words, "--json")
    found = json.loads(capsys.readouterr().out)["cluster"]
    assert (found["nodes"], found["slots"], found["enough_nodes"]) == (8, 32, 1)
    assert found["critical_path"][0]["name"] == "standard, seed 1"
    for wrong, message in (
        (("--nodes", "8"), "add --on ray"),
        (("--on", "ray", "--nodes", "0"), "nodes=0 must be a whole number from 1"),
        (("--on", "ray", "--nodes", "-1"), "nodes=-1"),
        (("--on", "ray", "--gpus-per-node", "1", "--gpus-per-run", "2"), "is more than a node has"),
    ):
        capsys.readouterr()
        run(*words[:14], *wrong, code=2)
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_verdict_judges_a_table_and_writes_only_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.csv"
    rows = [
        f"{arm},{seed},{2 + seed / 10 + extra * (1 + seed / 100)}"
        for arm, extra in (("a", 0), ("b", 0.3))
        for seed in range(5)
    ]
    file.write_text("\n".join(["arm,seed,loss", *rows]))
    words = ("verdict", str(file), "--arm", "arm", "--seed", "seed", "--metric", "loss")
    run(*words)
    out = capsys.readouterr().out
    assert "Nobody beat a: 1 worse." in out
    assert "verdicts.json" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["runs.csv"]
    run(*words, "--better", "higher", "--json")
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "better"
    run(*words, "--out", str(tmp_path / "out"))
    assert "report.html" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"verdicts.json", "report.html"}
    run(*words[:-1], "los", code=2)
    assert "did you mean 'loss'?" in capsys.readouterr().err


def test_report_shows_stability_when_asked(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("race", "--arms", "standard", "sharing:tie=kv", "--corpus", f"file:{story}", "--tokens", "7680")
    run(*words, "--batch", "256", "--seeds", "2", "--workers", "1", "--out", str(tmp_path / "out"))
    capsys.readouterr()
    run("report", str(tmp_path / "out"))
    assert "sample efficiency" not in capsys.readouterr().out
    run("report", str(tmp_path / "out"), "--stability")
    out = capsys.readouterr().out
    assert "stability and sample efficiency" in out
    assert "0/2" in out
    assert "1.000 x" in out
    assert (tmp_path / "out" / "runs.csv").is_file()
