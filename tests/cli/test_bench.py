from __future__ import annotations

import json
from pathlib import Path

import pytest

from headtohead.bench.slice import Slice
from headtohead.cli.main import main


@pytest.mark.parametrize("name", ["kernels", "decode"])
def test_the_last_line_is_the_document(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--device", "cpu", "--out", str(file)])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == json.loads(file.read_text())
    assert "plain kernels" in out


def test_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "h2h bench kernels" in out
    assert "h2h race" not in out.split("Start with")[0]


def refusal(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a mistake is answered with."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    return shown.err


GROWTH = "bench growth --arms standard --size nano --device cpu --quiet"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{GROWTH} --context 16 32 --rounds -1", "rounds=-1 must be above 0"),
        (f"{GROWTH} --context 0 32", "context=0 must be above 0"),
        (f"{GROWTH} --for 0s", "seconds=0 must be above 0"),
        (f"{GROWTH} --workers -3 --compile", "workers=-3 must be 0"),
        (f"{GROWTH} --axes", "|parameters ... needs a value"),
        ("bench stack 2 --size nano --arms", "--arms ARM ... needs a value"),
        ("bench stack 2 1000000 --size nano", "seeds=1000000 is too large"),
    ],
)
def test_a_mistake_is_named_with_what_was_given(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(words, capsys)


@pytest.mark.parametrize("place", ["nowhere/x.png", "x.jpg", "folder.svg"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.svg").mkdir()
    out = tmp_path / "rows.json"
    assert place in refusal(f"{GROWTH} --context 16 32 --picture {tmp_path / place} --out {out}", capsys)
    assert not out.exists()


def test_what_was_measured_is_shown_where_it_is_too_little_for_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "x.svg"
    with pytest.raises(SystemExit) as ended:
        main(f"{GROWTH} --context 16 --axes context --rounds 1 --picture {picture}".split())
    assert ended.value.code == 2
    shown = capsys.readouterr().out
    assert "no picture: a growth chart needs rows at two contexts or more" in shown
    assert len(json.loads(shown.splitlines()[-1])["rows"]) == 1


@pytest.mark.parametrize("rows", ["5", '{"a": 1}', "[1, 2]"])
def test_a_file_whose_rows_are_none_is_damaged(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    file.write_text(f'{{"benchmark": "growth", "rows": {rows}}}')
    assert f"damaged file {file}" in refusal(f"{GROWTH} --context 16 32 --out {file}", capsys)


OLD: dict[str, dict[str, object]] = {
    "kernels": {"case": "coupled euler", "shape": [2], "dtype": "bf16", "seconds": 1e-3},
    "decode": {"case": {"batch": 1}, "seconds": 1e-3},
    "stack": {"arm": "standard", "seeds": 5},
    "train": {"size": "nano", "results": {}},
    "generate": {"arm": "standard"},
}
TINY = {
    "kernels": "--device cpu",
    "decode": "--device cpu",
    "stack": "1 --size nano --batch 128 --rounds 1 --precision float32 --no-processes --device cpu --quiet",
    "train": "nano --context 16 --batch 16 --rounds 1 --peers --precision float32 --device cpu --quiet",
    "generate": "--arms no_attention --size nano --batch 1 --cached 4 --new 2 --rounds 1 --peers --device cpu --quiet",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_rows_of_an_older_form_are_kept_and_counted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"benchmark": name, "rows": [OLD[name], {}]}))
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, *TINY[name].split(), "--out", str(file)])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "2 of " in shown
    assert "rows have an older format" in shown
    assert OLD[name] in json.loads(file.read_text())["rows"]


@pytest.mark.parametrize(
    ("out", "said"), [("", "nothing is kept"), ("rows.json", "rows measured so far are kept")]
)
def test_an_interruption_says_what_is_kept(
    out: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = iter([{"seconds": 1.0, "peak_bytes": None}])

    def measure(one: Slice) -> dict[str, object]:
        try:
            return next(measured)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(Slice, "measure", measure)
    with pytest.raises(SystemExit) as ended:
        main(f"{GROWTH} --context 16 32 {f'--out {tmp_path / out}' if out else ''}".split())
    assert ended.value.code == 130
    assert said in capsys.readouterr().err
    if out:
        assert len(json.loads((tmp_path / out).read_text())["rows"]) == 1
