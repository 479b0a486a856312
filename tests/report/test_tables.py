from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from headtohead import Study, UserError, open_study
from headtohead.cli.main import main

pytest.importorskip("altair")

HOSTILE = "a_b & 50% of {$x^2$} <b>~\\ | =1"


@pytest.fixture(scope="module")
def folder(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of two contests whose arm has a name that every format must escape."""
    out = tmp_path_factory.mktemp("tables") / "out"
    arms = [
        "standard",
        {"arm": "sharing:tie=kv", "name": HOSTILE},
        {"arm": "gated_linear", "name": "=SUM(A1)"},
    ]
    settings = {"tokens": 2560, "batch": 256, "seeds": 2, "shape": ["as_is", "params"]}
    Study(arms, corpus=f"file:{story}", **settings).run(out, workers=1, quiet=True)
    return out


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), *words])
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    return out


def test_latex_is_printed_alone_with_intervals_marks_and_escapes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(folder, capsys, "--table", "latex")
    lines = text.splitlines()
    assert lines[0] == r"% needs \usepackage{booktabs}"
    assert lines[-1] == r"\end{table}"
    for word in (r"\toprule", r"\bottomrule", r"\begin{tabular}{llrrrrrrrr}"):
        assert lines.count(word) == 2, "one table per contest"
    escaped = r"a\_b \& 50\% of \{\$x\textasciicircum{}2\$\} \textless{}b\textgreater{}\textasciitilde{}\textbackslash{} \textbar{} =1"
    rows = [line for line in lines if line.startswith(escaped)]
    assert len(rows) == 2
    for row in rows:
        cells = re.split(r"(?<!\\) & ", row.removesuffix(r" \\"))
        assert len(cells) == 10
        assert re.match(
            r"\$\\(uparrow|downarrow|approx|circ)\$ (better|worse|equivalent|undecided)", cells[1]
        )
        assert re.fullmatch(r"\$[+-][\d.]+\$", cells[3])
        assert re.fullmatch(r"\$\[[+-][\d.]+, [+-][\d.]+\]\$", cells[4])
        assert cells[5] == "0.50x"
    plain = re.sub(r"\\[&%$#_{}\\]", "", text)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0


def test_markdown_has_one_width_and_escapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(folder, capsys, "--table", "markdown")
    grid = [line for line in text.splitlines() if line.startswith("|")]
    assert len(grid) == 2 * 5
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in grid} == {11}
    assert r"a\_b & 50% of {$x^2$} \<b\>~\\ \| =1" in text
    assert open_study(folder).table() == text


def test_csv_has_the_numbers_of_the_verdicts_and_runs_no_formula(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(csv.DictReader(io.StringIO(printed(folder, capsys, "--table", "csv"))))
    verdicts = open_study(folder).verdicts
    arms = [row for row in rows if row["verdict"] != "baseline"]
    assert [float(row["difference"]) for row in arms] == [row.difference for row in verdicts]
    assert {row["arm"] for row in rows} == {"standard", HOSTILE, "'=SUM(A1)"}
    assert len({row["contest"] for row in rows}) == 2
    assert all(float(row["flops_per_token"]) > 0 for row in rows)
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)


def test_what_must_be_known_with_a_verdict_is_a_note(folder: Path) -> None:
    result = open_study(folder)
    result.verdicts[0].marks = ["seeds 2 were added after results existed"]
    assert "$^{1}$ seeds 2 were added after results existed." in result.table("latex")
    assert "undecided <sup>1</sup>" in result.table("markdown")


def test_mistakes_are_one_clear_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="unknown table format"):
        open_study(folder).table("html")
    for words in (["--table", "html"], ["--table", "csv", "--stability"]):
        with pytest.raises(SystemExit) as end:
            main(["report", str(folder), *words])
        out, err = capsys.readouterr()
        assert (end.value.code, out, err.count("\n")) == (2, "", 1)
