from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headtohead.bench.harness import Case, Contender, Row, Rows, attempt, silent, take_turns

CPU = torch.device("cpu")


def case(name: str, found: Row) -> Case:
    """Return a case whose measurement is `found`."""
    return Case({"name": name}, name, lambda show: found)


def test_a_row_is_kept_as_soon_as_it_is_measured_and_measured_once(tmp_path: Path) -> None:
    out, shown = tmp_path / "rows.json", []

    def stop(show: Any) -> Row:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Rows("x", out, {"shared": 1}).run(
            [case("a", {"seconds": 1.0}), Case({"name": "b"}, "b", stop)], silent
        )
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["a"]
    cases = [Case({"name": "a"}, "a", stop), case("b", {"seconds": 2.0})]
    document = Rows("x", out, {"shared": 1}).run(cases, lambda message, share: shown.append((message, share)))
    assert [row["seconds"] for row in document["rows"]] == [1.0, 2.0]
    assert (document["shared"], document["benchmark"], shown) == (1, "x", [("b", 0.0)])


def test_the_document_is_the_stored_one_whenever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.count()
    monkeypatch.setattr("headtohead.bench.harness.provenance", lambda: {"date": str(next(moments))})
    rows = Rows("x", tmp_path / "rows.json", {})
    assert rows.run([case("a", {})], silent) == json.loads((tmp_path / "rows.json").read_text())


@pytest.mark.parametrize(
    ("found", "again"),
    [
        ({"error": "out of memory"}, True),
        ({"skipped": "too long"}, True),
        ({"error": None}, False),
        ({"error": 1e-3}, False),
        ({"failed": "no such layout"}, False),
    ],
)
def test_a_row_with_the_reason_of_an_error_or_skip_is_measured_again(found: Row, again: bool) -> None:
    rows, one = Rows("x", None, {}), case("a", found)
    rows.run([one], silent)
    assert rows.missing([one]) == ([one] if again else [])


def test_an_unusable_device_ends_the_benchmark() -> None:
    cases = [case("a", {"failed": "RuntimeError: CUDA error: misaligned address"}), case("b", {})]
    rows = Rows("x", None, {})
    assert [row["name"] for row in rows.run(cases, silent)["rows"]] == ["a"]
    assert [row["name"] for row in rows.run(cases, silent)["rows"]] == ["a", "b"]


def test_rows_of_another_commit_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, one = Rows("x", None, {}), case("a", {})
    rows.run([one], silent)
    rows.rows[0]["commit"] = "earlier"
    assert rows.missing([one]) == [one]
    assert len(rows.run([one], silent)["rows"]) == 1


def test_an_error_is_one_line() -> None:
    def fail() -> Row:
        raise ValueError("first\nsecond")

    assert attempt(fail) == {"failed": "ValueError: first"}
    assert attempt(fail, name="error") == {"error": "ValueError: first"}


def test_contenders_take_turns_and_a_failed_one_drops_out() -> None:
    steps: list[str] = []

    def build(name: str, last: int) -> Any:
        def step() -> None:
            steps.append(name)
            if steps.count(name) > last:
                raise RuntimeError("enough")

        return step

    def broken() -> Any:
        raise RuntimeError("cannot be built")

    contenders = [
        Contender("a", lambda: build("a", 99)),
        Contender("b", lambda: build("b", 3)),
        Contender("c", broken),
    ]
    timed = take_turns(contenders, CPU, silent, warm=1, burst=2, rounds=3)
    assert [one.name for one in timed] == ["a"]
    assert "".join(steps) == "ab" + "aabb" + "aab" + "aa"
    assert [len(one.times) for one in contenders] == [3, 1, 0]
    assert [one.error for one in contenders] == ["", "RuntimeError: enough", "RuntimeError: cannot be built"]
