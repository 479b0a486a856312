from __future__ import annotations

import pytest

from headtohead.study.judge.intervals import over_seeds


def test_every_number_becomes_its_mean_and_t_interval() -> None:
    rows = [{"a": 1.0, "b": {"c": [1, 5]}}, {"a": 3.0, "b": {"c": [2, 5]}}, {"a": 5.0, "b": {"c": [3, 5]}}]
    found = over_seeds(rows)
    # sd 2, n 3: 4.302653 x 2 / sqrt(3) = 4.968275
    assert found["a"] == {
        "mean": 3.0,
        "low": pytest.approx(3 - 4.968275),
        "high": pytest.approx(3 + 4.968275),
        "n": 3,
    }
    assert found["b"]["c"][0]["mean"] == 2.0
    assert found["b"]["c"][1] == 5  # an integer that is equal for all seeds
    assert over_seeds([0.5, 0.5]) == {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 2}


def test_missing_values_and_non_numbers_are_not_averaged() -> None:
    rows = [{"a": None, "t": "toy", "w": ["x"], "d": "1"}, {"a": 2.0, "t": "toy", "w": ["x"], "d": "2"}]
    assert over_seeds(rows) == {
        "a": {"mean": 2.0, "low": None, "high": None, "n": 1},
        "t": "toy",
        "w": ["x"],
        "d": ["1", "2"],
    }
    assert over_seeds([None, None]) is None
    assert over_seeds([[], []]) == []
