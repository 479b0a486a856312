import itertools

import pytest

from headtohead.training.settings import TrainSettings


def rates(**values: object) -> list[float]:
    settings = TrainSettings(lr=1.0, warmup=0.1, floor=0.1, **values)  # type: ignore[arg-type]
    return [settings.learning_rate(step, 100) for step in range(100)]


def test_cosine_rises_peaks_and_ends_at_the_floor() -> None:
    found = rates()
    assert found[0] == pytest.approx(0.1)
    assert found[9] == max(found) == pytest.approx(1.0)
    assert found[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(found[9:]))
    assert found[10 + 44] == pytest.approx(0.55, abs=0.02)


def test_wsd_is_flat_then_decays_linearly() -> None:
    found = rates(schedule="wsd", decay_share=0.2)
    assert set(found[10:80]) == {1.0}
    assert found[-1] == pytest.approx(0.1)
    steps = [a - b for a, b in itertools.pairwise(found[80:])]
    assert steps == pytest.approx([0.9 / 20] * 19)


def test_constant_stays_at_the_peak_after_warm_up() -> None:
    assert set(rates(schedule="constant")[9:]) == {1.0}


def test_no_warm_up_starts_at_the_peak() -> None:
    assert TrainSettings(lr=1.0, warmup=0.0).learning_rate(0, 10) == 1.0
