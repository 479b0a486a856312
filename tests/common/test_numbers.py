import pytest

from headtohead.common.errors import UserError
from headtohead.common.numbers import (
    exact_count,
    parse_count,
    parse_duration,
    parse_number,
    short_bytes,
    short_count,
    short_time,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("120000", 120_000),
        ("120k", 120_000),
        ("65M", 65_000_000),
        ("1.5B", 1_500_000_000),
        ("1_000", 1000),
        ("1,234,567", 1_234_567),
        ("1,500k", 1_500_000),
        (7, 7),
        ("0", 0),
    ],
)
def test_parse_count(text: object, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(4_000_000, "4M"), (1_500_000, "1500k"), (2_000_000_000, "2B"), (2560, "2560"), (0, "0")],
)
def test_an_exact_count_is_short_and_round_trips(value: int, text: str) -> None:
    assert exact_count(value) == text
    assert parse_count(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12x",
        "-3",
        "1.5",
        "k",
        "1e3",
        "1__0",
        "1_",
        "_1",
        "１２",
        -1,
        1.5,
        True,
        None,
        10**400,
        float("nan"),
        float("inf"),
    ],
)
def test_invalid_counts_are_rejected(text: object) -> None:
    with pytest.raises(UserError):
        parse_count(text)


@pytest.mark.parametrize("text", ["4", "-4", "1e1", ".5", "+3"])
def test_a_number_is_read_as_python_reads_it(text: str) -> None:
    assert parse_number(text, float) == float(text)


@pytest.mark.parametrize("text", ["４", "1_0", "x", ""])
def test_a_number_has_ascii_digits_alone(text: str) -> None:
    for kind in (int, float):
        with pytest.raises(ValueError, match=text or "empty|convert|invalid"):
            parse_number(text, kind)


@pytest.mark.parametrize("text", ["2048,4096", "1,23", "1234,567", "1,,000", ",100", "1,000,", "12,3456k"])
def test_a_comma_separates_thousands_only(text: str) -> None:
    with pytest.raises(UserError, match=r"cache_at: .*; a comma separates thousands, as in 1,234,567"):
        parse_count(text, "cache_at")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("8m", 480), ("1.5h", 5400), ("2d", 172_800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "8 weeks", "-1m", "m"])
def test_invalid_durations_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="duration"):
        parse_duration(text)


def test_numbers_for_display() -> None:
    assert short_count(1_234_567) == "1.23M"
    assert short_count(999_999) == "1M"
    assert short_count(12) == "12"
    assert short_time(200) == "3 m 20 s"
    assert short_time(7500) == "2 h 05 m"
    assert short_bytes(3 * 2**20) == "3 MiB"
