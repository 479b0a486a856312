"""docs/findings.md agrees with the shipped studies and the recorded results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headtohead.study.claims.paper import find_paper, read_paper

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
RUN = "run: python benchmarks/draw_findings.py"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes the page."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import draw_findings

    return draw_findings


def text(draw: ModuleType, results: Path = RESULTS) -> str:
    sections = draw.read_sections(results)
    return str(draw.page(sections, list(draw.pictures(sections))))


def section(page: str, name: str) -> str:
    return page.split(f'<a id="{name}"></a>')[1].split("<a id=")[0]


def test_the_page_agrees_with_the_results(draw: ModuleType) -> None:
    page = (ROOT / "docs" / "findings.md").read_text()
    assert page == text(draw), RUN
    drawn = {path.name for path in (ROOT / "docs" / "images").glob("findings-*.png")}
    assert drawn == set(re.findall(r"images/(findings-\w+\.png)", page)), RUN


def test_every_recorded_paper_has_a_summary_of_three_sentences(draw: ModuleType) -> None:
    recorded = [section for section in draw.read_sections(RESULTS) if section.results]
    assert recorded
    for one in recorded:
        sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", one.summary)
        assert len(sentences) == 3, f"results/{one.name}/summary.md: {len(sentences)} sentences"


def test_a_changed_number_changes_the_page(draw: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "faster_qk", tmp_path / "faster_qk", ignore=shutil.ignore_patterns("*.xz"))
    file = tmp_path / "faster_qk" / "claims.json"
    claims = json.loads(file.read_text())
    claims[8]["measured"][2]["difference"] = -0.05
    file.write_text(json.dumps(claims))
    row = "agreement: study agreement: QK x100 - r=1: {} (-0.0795 to -0.0562) accuracy, published +0.0098"
    assert row.format("-0.0679") in (ROOT / "docs" / "findings.md").read_text()
    assert row.format("-0.0500") in text(draw, tmp_path)


def test_a_paper_without_results_lists_its_claims_as_not_run(draw: ModuleType, tmp_path: Path) -> None:
    page = text(draw, tmp_path)
    for name in ("coupled", "sharing", "deconstructed", "faster_qk", "kuramoto"):
        part = section(page, name)
        assert "Not run yet." in part
        rows = [line for line in part.splitlines() if line.startswith(f"| {name}.")]
        assert len(rows) == len(read_paper(find_paper(name)).claims)
        assert all(row.endswith("| – | not run | – | not run |") for row in rows)
    assert "images/findings-" not in page


def test_open_claims_give_their_reason_and_reduced_ones_the_difference(
    draw: ModuleType, tmp_path: Path
) -> None:
    part = {"kind": "difference", "direction": "open", "size": None, "scale": "reduced scale"}
    part |= {
        "differs": "corpus a here, b published",
        "reason": "1 run failed | a (corpus a here, b published)",
    }
    claim = {"id": "coupled.1", "statement": "x", "published": "y", "measured": [], "direction": "open"}
    claim |= {"size": "open", "scale": "reduced scale", "reason": "z", "run": "small", "criteria": [part]}
    (tmp_path / "coupled").mkdir()
    (tmp_path / "coupled" / "claims.json").write_text(json.dumps([claim]))
    rows = section(text(draw, tmp_path), "coupled").splitlines()
    first, second = (next(row for row in rows if row.startswith(f"| coupled.{n} ")) for n in (1, 2))
    cells = "1 run failed \\| a | **open** | no size published | reduced<br>corpus a here, b published |"
    assert first.endswith(cells)
    assert "the recorded results do not have this claim" in second


def test_each_difference_from_the_published_scale_is_given_once(draw: ModuleType, tmp_path: Path) -> None:
    part = {
        "kind": "difference",
        "direction": "supported",
        "size": None,
        "scale": "reduced scale",
        "reason": "r",
    }
    differs = ["not published: a, b; t", "not published: b, a; t; 5 tokens here, 6 published"]
    claim = {"id": "coupled.1", "statement": "x", "published": "y", "direction": "supported", "run": "small"}
    claim |= {"size": "open", "scale": "reduced scale", "reason": "z"}
    claim["criteria"] = [part | {"differs": words} for words in differs]
    claim["measured"] = [{"criterion": index, "corpus": name} for index, name in enumerate(("c", "d"))]
    (tmp_path / "coupled").mkdir()
    (tmp_path / "coupled" / "claims.json").write_text(json.dumps([claim]))
    row = next(line for line in text(draw, tmp_path).splitlines() if line.startswith("| coupled.1 "))
    assert row.endswith("| reduced<br>not published: a, b<br>t<br>d: 5 tokens here, 6 published |")


def test_what_most_claims_share_is_said_once(draw: ModuleType, tmp_path: Path) -> None:
    part = {
        "kind": "difference",
        "direction": "supported",
        "size": None,
        "scale": "reduced scale",
        "reason": "r",
    }
    claim = {"statement": "x", "published": "y", "direction": "supported", "run": "small", "size": "open"}
    claim |= {"scale": "reduced scale", "reason": "z", "measured": []}
    claims = [
        claim
        | {"id": f"coupled.{index}", "marks": [f"mark {index > 2}"]}
        | {"criteria": [part | {"differs": "corpus a here; size b here" + also}]}
        for index, also in ((1, ""), (2, ""), (3, "; 5 tokens here"))
    ]
    (tmp_path / "coupled").mkdir()
    (tmp_path / "coupled" / "claims.json").write_text(json.dumps(claims))
    page = section(text(draw, tmp_path), "coupled")
    assert "*Reduced*, unless a row says more: corpus a here; size b here." in page
    first, second, third = (line for line in page.splitlines() if re.match(r"\| coupled\.[123] ", line))
    assert first.endswith("| **supported** <sup>1</sup> | no size published | reduced |")
    assert second.endswith("<sup>1</sup> | no size published | reduced |")
    assert third.endswith("<sup>2</sup> | no size published | reduced, also:<br>5 tokens here |")
    assert "<sup>1</sup> marked: mark False\n\n<sup>2</sup> marked: mark True" in page


def test_notes_on_single_claims_follow_the_table(draw: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "coupled", tmp_path / "coupled", ignore=shutil.ignore_patterns("*.xz"))
    (tmp_path / "coupled" / "notes.md").write_text("- **coupled.6**: a note\n")
    page = section(text(draw, tmp_path), "coupled")
    assert page.index("| coupled.16 ") < page.index("Notes:\n\n- **coupled.6**: a note")


def test_what_decided_a_claim_comes_first_and_what_is_only_shown_last(
    draw: ModuleType, tmp_path: Path
) -> None:
    outcome = {"kind": "difference", "size": None, "scale": "published scale", "differs": "", "reason": "r"}
    criteria = [outcome | {"direction": word} for word in ("supported", "contradicted", "contradicted")]
    criteria[2] |= {"decides": False}
    rows = [
        {"what": what, "difference": value, "criterion": index, "direction": criteria[index]["direction"]}
        for index, (what, value) in enumerate({"a - s": 0.1, "b - s": 0.2, "c - s": 0.3}.items())
    ]
    rows[2] |= {"decides": False}
    claim = {"id": "coupled.1", "statement": "x", "published": "y", "measured": rows, "size": "open"}
    claim |= {"direction": "contradicted", "scale": "published scale", "reason": "z", "criteria": criteria}
    (tmp_path / "coupled").mkdir()
    (tmp_path / "coupled" / "claims.json").write_text(json.dumps([claim]))
    lines = [
        "of 2 criteria 1 supported, 1 contradicted:",
        "b - s: +0.200",
        "a - s: +0.100",
        "c - s: +0.300 (shown, not judged)",
    ]
    assert f"| {'<br>'.join(lines)} | **contradicted** |" in section(text(draw, tmp_path), "coupled")


def test_lines_say_where_criteria_were_measured_if_that_differs(draw: ModuleType, tmp_path: Path) -> None:
    outcome = {"kind": "difference", "direction": "supported", "size": None, "scale": "published scale"}
    rows = [
        {"what": "a - s", "difference": value, "criterion": index, "direction": "supported"}
        | {"study": "time", "corpus": "c", "size": "nano", "length": length}
        for index, (value, length) in enumerate(((0.1, "time"), (0.2, "time_plain")))
    ]
    claim = {"id": "coupled.14", "statement": "x", "published": "y", "measured": rows, "size": "open"}
    claim |= {"direction": "supported", "scale": "published scale", "reason": "z"}
    claim["criteria"] = [outcome | {"differs": "", "reason": "r"}] * 2
    (tmp_path / "coupled").mkdir()
    (tmp_path / "coupled" / "claims.json").write_text(json.dumps([claim]))
    page = section(text(draw, tmp_path), "coupled")
    row = next(line for line in page.splitlines() if line.startswith("| coupled.14 "))
    assert "| equal time: a - s: +0.100<br>equal time_plain: a - s: +0.200 | **supported** |" in row
    assert "*our question* coherence is the cause" in row
    assert "*our question*" not in next(
        line for line in page.splitlines() if line.startswith("| coupled.13 ")
    )


def test_a_claim_that_the_scale_cannot_test_is_open_and_says_why(draw: ModuleType, tmp_path: Path) -> None:
    part = {"kind": "difference", "direction": "open", "size": None, "scale": "not tested", "differs": ""}
    part["reason"] = "size 454m is not part of scale tiny"
    claim = {"id": "coupled.1", "statement": "x", "published": "y", "measured": [], "direction": "open"}
    claim |= {"size": "open", "scale": "not tested", "reason": "z", "run": "tiny", "criteria": [part]}
    (tmp_path / "coupled").mkdir()
    (tmp_path / "coupled" / "claims.json").write_text(json.dumps([claim]))
    page = section(text(draw, tmp_path), "coupled")
    row = next(line for line in page.splitlines() if line.startswith("| coupled.1 "))
    assert row.endswith("| size 454m is not part of scale tiny | **open** | no size published | not tested |")
    assert "Run at scale tiny." in page


@pytest.mark.slow
def test_the_script_writes_and_checks_the_page(tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "benchmarks" / "draw_findings.py", "--docs", tmp_path, *arguments]
        words = [str(word) for word in command]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=300, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
        )

    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "findings-coupled.png").write_bytes(b"an older one")
    assert run("--check").returncode == 1
    done = run("--results", RESULTS)
    assert done.returncode == 0, done.stderr
    names = {path.parent.name for path in RESULTS.glob("*/claims.json")}
    drawn = {path.name for path in (tmp_path / "images").iterdir()}
    assert "findings.png" in drawn
    assert drawn <= {"findings.png", *(f"findings-{name}.png" for name in names)}
    assert "findings-faster_qk.png" in drawn
    assert run("--check").returncode == 0
