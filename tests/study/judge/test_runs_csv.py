"""Tables of runs: foreign tables are judged like a study, and a study's own table gives its own verdicts."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import headtohead as h2h
from headtohead import Study, UserError, open_study
from headtohead.study.judge.runs_csv import COLUMNS, _text, csv_cell, runs_csv
from headtohead.study.store.run_store import Store
from tests.results import run_result

BASE = [2.50, 2.52, 2.48, 2.51, 2.49]


def table(
    path: Path, rows: list[tuple[Any, ...]], header: tuple[str, ...] = ("model", "seed", "loss")
) -> Path:
    file = path / "runs.csv"
    with open(file, "w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([header, *rows])
    return file


def arms(**values: list[Any]) -> list[tuple[Any, ...]]:
    return [(name, seed, value) for name, row in values.items() for seed, value in enumerate(row, 1)]


def judge(file: Path, **given: Any) -> h2h.StudyResult:
    return h2h.judge(file, **({"arm": "model", "seed": "seed", "metric": "loss"} | given))


def test_runs_trained_elsewhere_get_a_verdict_like_a_study(tmp_path: Path) -> None:
    better = [x - 0.02 - 0.001 * i for i, x in enumerate(BASE)]
    same = [x + 0.0005 * (-1) ** i for i, x in enumerate(BASE)]
    file = table(tmp_path, arms(base=BASE, new=better, same=same))
    rows = judge(file, margin=0.005, out=tmp_path / "out").verdicts
    assert [row.verdict for row in rows] == ["better", "equivalent"]
    assert rows[0].metric == "loss"
    assert rows[0].difference == pytest.approx(-0.022)
    assert not any(row.primary for row in rows), "a table does not state what was planned"
    assert judge(file, primary="new").verdicts[0].primary
    written = json.loads((tmp_path / "out" / "verdicts.json").read_text())
    assert [row["verdict"] for row in written] == ["better", "equivalent"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "new is better than base by 0.02" in page
    assert "read from runs.csv" in page
    definitions = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL)
    assert len(definitions) == 2
    assert "in loss (left is better)" in definitions[0]


def test_a_higher_metric_can_be_the_better_one(tmp_path: Path) -> None:
    file = table(tmp_path, arms(base=BASE, new=[x + 0.02 + 0.001 * i for i, x in enumerate(BASE)]))
    assert judge(file).verdicts[0].verdict == "worse"
    row = judge(file, better="higher").verdicts[0]
    assert (row.verdict, row.better) == ("better", "higher")
    assert row.difference == pytest.approx(0.022), "the difference stays arm minus baseline"
    assert judge(file, baseline="new", better="higher").verdicts[0].verdict == "worse"


def test_without_a_margin_nothing_is_equivalent_and_a_note_says_so(tmp_path: Path) -> None:
    row = judge(
        table(tmp_path, arms(base=BASE, new=[x + 1e-6 * (-1) ** i for i, x in enumerate(BASE)]))
    ).verdicts[0]
    assert row.verdict == "undecided"
    assert any("no margin" in note for note in row.notes)


def test_seeds_without_a_partner_and_empty_cells_are_noted(tmp_path: Path) -> None:
    rows = [*arms(base=[2.5, 2.6, "", 2.4], new=[2.4, 2.5, 2.3, ""]), ("new", 9, 2.2), ("base", 7, 2.2)]
    row = judge(table(tmp_path, rows)).verdicts[0]
    assert row.seeds == [1, 2]
    notes = "; ".join(row.notes)
    assert "seed 9 of new without a partner" in notes
    assert "seed 7 of base without a partner" in notes
    assert "seed 3 of base without a number" in notes
    assert "1 of its runs are not finished" in notes


def test_nan_is_a_diverged_run(tmp_path: Path) -> None:
    values = [x - 0.02 - 0.001 * i for i, x in enumerate(BASE)]
    row = judge(table(tmp_path, arms(base=BASE, new=[*values[:4], "NaN"]))).verdicts[0]
    assert (row.n, row.diverged, row.verdict) == (4, 1, "undecided")


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        ([("a", 1, 2.0), ("b", 1, 2.0), ("a", 1, 2.1)], {}, "row 4: arm 'a', seed 1 is already in row 2"),
        ([("a", 1, 2.0), ("b", 1, "two")], {}, "row 3, column 'loss': expected a number, got 'two'"),
        ([("a", 1, 2.0), ("b", "x", 2.0)], {}, "row 3, column 'seed': expected a whole number"),
        ([("a", 1, 2.0), ("b", 1.5, 2.0)], {}, "row 3, column 'seed': expected a whole number"),
        ([("a", 1, 2.0), ("", 1, 2.0)], {}, "row 3, column 'model': no arm"),
        ([("a", 1, 2.0), ("b", 1)], {}, "row 3: 2 cells, but the header has 3 columns"),
        ([("a", 1, 2.0), ("b", 1, 2.0)], {"metric": "los"}, "did you mean 'loss'?"),
        (
            [("a", 1, 2.0), ("b", 1, 2.0)],
            {"baseline": "aa"},
            "unknown arm given as baseline 'aa'; did you mean 'a'?",
        ),
        ([("a", 1, 2.0), ("b", 1, 2.0)], {"metric": "seed"}, "column 'seed' is given twice"),
        ([("a", 1, 2.0), ("b", 1, 2.0)], {"better": "up"}, "allowed: higher, lower"),
        ([("a", 1, 2.0), ("b", 1, 2.0)], {"margin": -1.0}, "0 or more"),
        ([("a", 1, 2.0), ("b", 1, 2.0)], {"primary": "a"}, "cannot be compared with itself"),
        ([("a", 1, 2.0), ("a", 2, 2.0)], {}, "two or more are needed"),
        ([], {}, "no rows"),
    ],
)
def test_errors_name_row_and_column(
    rows: list[tuple[Any, ...]], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        judge(table(tmp_path, rows), **given)
    assert message in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"a,a,loss\n1,2,3\n", b'"a\n'])
def test_files_that_are_no_table_are_rejected(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes(content)
    with pytest.raises(UserError):
        h2h.judge(file, arm="a", seed="seed", metric="loss")
    with pytest.raises(UserError, match="no such table"):
        judge(tmp_path / "nowhere.csv")


def test_other_delimiters_a_byte_order_mark_and_columns_in_any_order(tmp_path: Path) -> None:
    for delimiter in ";\t":
        file = tmp_path / "x.csv"
        lines = [("loss", "model", "seed"), (2.0, "a", "1.0"), (2.1, "a", 2), (2.5, "b", 1), (2.61, "b", 2)]
        text = "\ufeff" + "\r\n".join(delimiter.join(map(str, line)) for line in lines) + "\r\n\r\n"
        file.write_text(text, encoding="utf-8")
        row = judge(file).verdicts[0]
        assert (row.n, row.label) == (2, "b")


def test_columns_separate_contests(tmp_path: Path) -> None:
    rows = [
        (model, seed, 2.0 + 0.01 * seed + (model == "new") * sign * (0.1 + 0.001 * seed), depth)
        for depth, sign in ((4, -1), (8, 1))
        for model in ("base", "new")
        for seed in (1, 2, 3, 4)
    ]
    file = table(tmp_path, rows, ("model", "seed", "loss", "depth"))
    with pytest.raises(UserError, match="--by"):
        judge(file)
    found = judge(file, by=["depth"], out=tmp_path / "out").verdicts
    assert [(row.corpus, row.verdict) for row in found] == [("depth 4", "better"), ("depth 8", "worse")]


@pytest.fixture(scope="module")
def raced(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table") / "out"
    given = [
        "standard",
        {"arm": "sharing:tie=kv", "name": "=cmd|'/C calc'!A1"},
        {"arm": "sharing:tie=kv", "name": '-slow, "quoted"', "lr": 1e-4},
    ]
    settings: dict[str, Any] = {
        "tokens": 2560,
        "batch": 256,
        "seeds": 3,
        "shape": ["as_is", "params"],
        "lr": 5e-3,
    }
    Study(given, corpus=f"file:{story}", **settings).run(folder, workers=1, quiet=True)
    return folder


def test_every_study_has_a_tidy_table_of_its_runs(raced: Path) -> None:
    with open(raced / "runs.csv", newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 3 * 3 * 2
    results = open_study(raced).results
    for row in rows:
        result = results[row["run"]]
        assert row["status"] == "done"
        assert float(row["test_bits_per_byte"]) == result.test.values["bits_per_byte"]
        assert int(row["tokens"]) == 2560
        assert all(row[name] for name in COLUMNS), row
        assert not row["label"].startswith(("=", "-")), "a spreadsheet must not read a name as a formula"


def test_a_table_that_is_missing_is_written_again(raced: Path) -> None:
    before = (raced / "runs.csv").read_text()
    (raced / "runs.csv").unlink()
    open_study(raced).write(quiet=True, only_if_changed=True)
    assert (raced / "runs.csv").read_text() == before


def test_hostile_names_are_text_on_the_page(tmp_path: Path) -> None:
    hostile = "<script>document.title='owned'</script>"
    rows = arms(**{"base": BASE, hostile: [x + 0.1 for x in BASE]})
    judge(table(tmp_path, rows, ("model", "seed", "<b>loss")), metric="<b>loss", out=tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    body = re.sub(r"<script type=\"(module|application/json)\".*?</script>", "", page, flags=re.DOTALL)
    assert "<script>" not in body
    assert "<b>loss" not in body
    assert "&lt;script&gt;document.title" in body
    for definition in re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL
    ):
        assert "<" not in definition


def test_the_table_of_a_study_gives_the_studys_own_verdicts(raced: Path) -> None:
    known = open_study(raced).verdicts
    found = h2h.judge(raced / "runs.csv", arm="label", seed="seed", metric="test_bits_per_byte").verdicts
    names = (
        "label",
        "size",
        "shape",
        "length",
        "corpus",
        "metric",
        "seeds",
        "values",
        "baseline_values",
        "n",
    )
    names += (
        "difference",
        "ci_low",
        "ci_high",
        "p",
        "p_holm",
        "margin",
        "detectable",
        "correlation",
        "verdict",
    )
    for mine, theirs in zip(found, known, strict=True):
        assert {name: getattr(mine, name) for name in names} == {
            name: getattr(theirs, name) for name in names
        }


def test_unfinished_runs_and_added_seeds_are_in_the_table(raced: Path) -> None:
    result = open_study(raced)
    last = result.manifest.entries[-1]
    del result.results[last.run]
    result.results[result.manifest.entries[0].run] = run_result("diverged", tokens=256)
    result.added_seeds = frozenset({3})
    text = runs_csv(Store(raced), result.manifest, result.results, result.added_seeds)
    rows = list(csv.DictReader(text.splitlines()))
    assert rows[-1]["status"] == "not finished"
    assert rows[-1]["test_nats"] == ""
    assert (rows[0]["status"], rows[0]["tokens"]) == ("diverged", "256")
    assert {row["seed"] for row in rows if row["added_later"] == "1"} == {"3"}
    (file := raced.parent / "again.csv").write_text(text)
    found = h2h.judge(file, arm="label", seed="seed", metric="test_bits_per_byte").verdicts
    assert found[0].added_seeds == [3]
    assert found[0].seeds == [2, 3]


@pytest.mark.parametrize(
    "text", ["=1+1", "+x", "-x", "@x", "\tx", "'=x", "''", "'plain'", "plain", "a'=b", ""]
)
def test_texts_survive_the_table_and_none_is_a_formula(text: str) -> None:
    assert _text(csv_cell(text)) == text
    assert not csv_cell(text).startswith(("=", "+", "-", "@", "\t", "\r"))
