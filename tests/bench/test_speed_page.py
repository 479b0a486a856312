"""docs/speed.md agrees with the rows in results/speed, and a picture is drawn only if it has rows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "results" / "speed"


def draw(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "draw_speed.py", *arguments]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300, cwd=ROOT
    )


@pytest.mark.slow
def test_the_page_agrees_with_the_rows(tmp_path: Path) -> None:
    agreed = draw("--check")
    assert agreed.returncode == 0, f"{agreed.stderr}\nrun: python benchmarks/draw_speed.py"
    page = (ROOT / "docs" / "speed.md").read_text()
    assert {path.name for path in (ROOT / "docs" / "images").glob("speed-*.png")} == set(
        re.findall(r"images/(speed-[a-z]+\.png)", page)
    )
    changed = tmp_path / "results"
    shutil.copytree(RESULTS, changed)
    document = json.loads((changed / "stack.json").read_text())
    document["rows"][0]["stacked_tokens_per_second"] *= 1.1
    (changed / "stack.json").write_text(json.dumps(document))
    assert draw("--check", "--results", changed).returncode == 1


@pytest.mark.slow
def test_a_picture_without_rows_is_left_out(tmp_path: Path) -> None:
    docs, results = tmp_path / "docs", tmp_path / "results"
    (docs / "images").mkdir(parents=True)
    results.mkdir()
    shutil.copy(ROOT / "docs" / "speed.md", docs)
    shutil.copy(RESULTS / "stack.json", results)
    (docs / "images" / "speed-train.png").write_bytes(b"an older one")
    done = draw("--results", results, "--docs", docs)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (docs / "images").iterdir()] == ["speed-stack.png"]
    assert (docs / "images" / "speed-stack.png").read_bytes().startswith(b"\x89PNG")
    page = (docs / "speed.md").read_text()
    assert "Not drawn: `results/speed/train-gpu.json` has no rows for it yet" in page
    assert "training step, `standard`, 51m | the faster of" in page
    assert page.count("not measured yet") > 10
    assert draw("--results", tmp_path / "nowhere", "--docs", docs).returncode == 2
