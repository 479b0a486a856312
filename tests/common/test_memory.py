from __future__ import annotations

import gc

import pytest

from headtohead.common.memory import gc_paused


@gc_paused()
def fail() -> None:
    raise ValueError(f"enabled: {gc.isenabled()}")


def test_the_collector_is_paused_and_restored_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="enabled: False"):
        fail()
    assert gc.isenabled()


def test_pauses_can_be_nested() -> None:
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
