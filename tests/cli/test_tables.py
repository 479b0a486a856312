from __future__ import annotations

from pathlib import Path

import pytest

from headtohead.api.judge import judge
from headtohead.cli.shared import tables
from headtohead.cli.shared.results import show_verdicts
from headtohead.cli.shared.tables import print_table

ARMS = ["standard", "a mechanism with a name of 35 chars", "sharing:tie=kv,kv_heads=2"]


@pytest.fixture
def eighty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as on a terminal of 80 columns."""
    monkeypatch.setattr(tables, "width", lambda: 80)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of three arms: one is worse than the baseline, one cannot be told from it."""
    rows = ["arm,seed,bits_per_byte"]
    for index, arm in enumerate(ARMS):
        for seed in range(6):
            value = (
                2.0 + 0.01 * seed + (0.1 * index + 0.003 * seed * index if index < 2 else 0.02 * (-1) ** seed)
            )
            rows.append(f'"{arm}",{seed},{value:.6f}')
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(rows))
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_verdicts_fit_80_columns_with_arm_and_verdict_first(
    eighty: None, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_verdicts(judge(runs, arm="arm", seed="seed", metric="bits_per_byte"))
    lines = printed(capsys)
    assert max(map(len, lines)) <= 80
    heads = next(line for line in lines if "verdict" in line)
    assert heads.split()[:2] == ["arm", "verdict"]
    rows = [line for line in lines if " worse " in line or " undecided " in line]
    assert [row.split()[0] for row in rows] == ["a", "sharing:tie=kv,kv"]
    assert any("+0.1" in row and " to " in row for row in rows)


def test_one_sentence_on_top_says_who_won(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_verdicts(judge(runs, arm="arm", seed="seed", metric="bits_per_byte"))
    first = next(line for line in printed(capsys) if line)
    assert first == "Nobody beat standard: 1 worse, 1 undecided."


def test_remarks_that_all_arms_share_are_printed_once(
    eighty: None, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = judge(runs, arm="arm", seed="seed", metric="bits_per_byte")
    for row in result.verdicts:
        row.notes.append("shared remark")
    result.verdicts[0].notes.append("own remark")
    show_verdicts(result)
    text = " ".join(printed(capsys))
    assert text.count("shared remark") == 1
    assert text.count("own remark") == 1
    assert text.index("all arms: ") < text.index("shared remark") < text.index("own remark")


def test_numbers_are_not_wrapped_and_headings_are_wrapped_before_text(
    eighty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ("arm", *(f"a heading of words {index}" for index in range(6)))
    print_table("", columns, [("name of twenty chars", *["1234567.8"] * 6)], right=columns[1:])
    lines = printed(capsys)
    assert max(map(len, lines)) <= 80
    assert sum("1234567.8" in line for line in lines) == 1
    print_table("", columns[:3], [("name of twenty chars", *["1234567.8"] * 2)], right=columns[1:])
    assert any("name of twenty chars  " in line for line in printed(capsys)), (
        "room enough: nothing is wrapped"
    )


def test_a_table_wider_than_the_terminal_loses_no_cell(
    eighty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = [f"c{index}" for index in range(12)]
    print_table("", columns, [[f"{index}2345678.9" for index in range(12)]], right=columns)
    row = printed(capsys)[-1]
    assert len(row.split()) == 12
