"""Text of others cannot control the terminal, and no character and no closed stream raises."""

from __future__ import annotations

import ast
import io
import json
import os
import sys
from pathlib import Path

import pytest

import headtohead
from headtohead.cli.main import COMMANDS, main
from headtohead.cli.shared.tables import print_table
from headtohead.common.progress import Live, Plain, progress_bar
from headtohead.common.terminal import printable, say, say_json

HOSTILE = "\x1b]0;title\x07\x1b[2Jred\r\x9b31m\u202eevil\u2066\ud800\x7f"
SHOWN = "\\x1b]0;title\\x07\\x1b[2Jred\\x0d\\x9b31m\\u202eevil\\u2066\\ud800\\x7f"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("two\nlines\tand – ümlaut 漢 \U0001f600") == "two\nlines\tand – ümlaut 漢 \U0001f600"
    assert printable("one\nline", keep="") == "one\\x0aline"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_encoding_lacks_are_escaped(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    say(f"漢{HOSTILE}", file=stream, flush=True)
    first = "漢" if encoding == "utf-8" else "\\u6f22"
    assert raw.getvalue().decode(encoding) == f"{first}{SHOWN}\n"


def test_json_stays_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({HOSTILE: [float("nan"), 1.5]})
    out = capsys.readouterr().out
    assert printable(out) == out
    assert json.loads(out) == {HOSTILE: [None, 1.5]}


@pytest.mark.parametrize("rows", [1, 600])
def test_tables_show_cells_titles_and_heads_escaped(rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(HOSTILE, (HOSTILE, "n"), [(f"{HOSTILE}\nx", 1)] * rows, right=(HOSTILE,))
    out = capsys.readouterr().out
    assert printable(out) == out
    assert out.count(SHOWN) == rows + 2
    assert f"{SHOWN}\\x0ax" in out


def test_a_table_is_printed_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    print_table("–", ("漢",), [("–",)])
    sys.stdout.flush()
    assert raw.getvalue().decode("ascii").count("\\u2013") == 2


def test_progress_shows_titles_and_messages_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(HOSTILE) as progress:
        progress(HOSTILE, 0.5)
    for display in (Live(), Plain()):
        display.begin(1, [])
        display.started("a", HOSTILE, 10)
        display.note(HOSTILE)
        display.ended("a", HOSTILE)
        display.end()
    drawn, printed = terminal.getvalue(), capsys.readouterr().out
    assert printable(printed) == printed
    assert printed.count(SHOWN) == 3
    for text in ("\x1b]0;", "\x1b[2Jred", "\x9b", "\u202e", "\ud800", "\x07"):
        assert text not in drawn


def test_errors_are_shown_escaped_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([HOSTILE], ["report", HOSTILE], ["check", HOSTILE], ["race", f"--{HOSTILE}"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("h2h: ")
        assert error.count("\n") == 1
        assert printable(error) == error
        assert "\\x1b]0;title" in error


def test_a_csv_of_others_is_judged_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = HOSTILE.replace("\ud800", "").replace("\r", "")
    lines = ["arm,seed,loss"] + [
        f"{arm},{seed},{1 + seed / 10}" for arm in ("base", hostile) for seed in range(3)
    ]
    (tmp_path / "runs.csv").write_text("\n".join(lines), encoding="utf-8")
    words = ["verdict", str(tmp_path / "runs.csv"), "--arm", "arm", "--seed", "seed", "--metric", "loss"]
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *extra])
        assert ended.value.code == 0
        found = capsys.readouterr()
        assert printable(found.out) == found.out
        assert "evil" in found.out
    assert [row["label"] for row in json.loads(found.out)] == [hostile]


def test_everything_is_printed_through_the_filter() -> None:
    root = Path(headtohead.__path__[0])
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert found == set()


def broken_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


@pytest.mark.parametrize(
    "words", ["", "--version", "list", "list --json", *(f"{name} -h" for name in COMMANDS)]
)
def test_a_reader_that_leaves_ends_a_command_quietly(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with broken_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        assert ended.value.code == 0
        stream.flush()  # as the interpreter does at exit
    assert capsys.readouterr().err == ""


def test_errors_without_a_reader_end_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    with broken_pipe() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(SystemExit):
            main(["rase"])
        stream.flush()


def test_closed_streams_take_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, code in ((["list", "--probes"], 0), (["list", "--json"], 0), (["rase"], 2)):
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", None)
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code
        for stream in (sys.stdout, sys.stderr):
            stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_the_output_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main(["list", "--probes"])
        assert ended.value.code == 2
        stream.flush()
    error = capsys.readouterr().err
    assert error.startswith("h2h: No space left on device")
    assert error.count("\n") == 1
