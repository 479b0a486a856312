from __future__ import annotations

import time
from contextlib import closing

import pytest

from headtohead.bench.harness import Row
from headtohead.bench.train import compile_in_parallel
from headtohead.bench.worker_pool import TimeLimitReached, WorkerPool, compile_threads


def double(number: int) -> Row:
    """Return twice a number; the worker processes import it from here."""
    return {"double": number + number}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ".")


def test_every_order_is_answered_and_a_failure_is_an_answer() -> None:
    shown: list[str] = []
    orders: list[Row] = [{"number": 2}, {"number": None}, {"number": 5}]
    with closing(WorkerPool(2)) as pool:
        found = pool.map(double, orders, lambda message, share: shown.append(message))
    assert [answer for _, answer in found][::2] == [{"double": 4}, {"double": 10}]
    assert found[1][1]["error"].startswith("TypeError: unsupported operand")
    assert {index for index, _ in found} <= {0, 1}
    assert shown[-1] == "compiling in parallel, 3 of 3 done"


@pytest.mark.slow
def test_a_process_that_ends_is_an_answer_and_the_others_go_on() -> None:
    with closing(WorkerPool(2)) as pool:
        assert pool.ask(double, {0: {"number": 1}, 1: {"number": 2}}) == [{"double": 2}, {"double": 4}]
        pool.workers[0].process.kill()
        ended = {"error": "worker process was killed (signal 9), often because memory ran out"}
        assert pool.ask(double, {0: {"number": 1}, 1: {"number": 2}}) == [ended, {"double": 4}]
        assert pool.ask(double, {0: {"number": 1}}) == [ended]
        assert pool.map(double, [{"number": 3}] * 2) == [(1, {"double": 6})] * 2
        pool.workers[1].process.kill()
        assert pool.map(double, [{"number": 3}])[0][1]["error"] in (
            ended["error"],
            "no worker process was left",
        )
        pool.deadline = time.monotonic()
        with pytest.raises(TimeLimitReached):
            pool.ask(double, {0: {"number": 1}})


def test_without_orders_no_process_starts() -> None:
    with closing(WorkerPool(0)) as pool:
        assert (pool.workers, pool.map(double, [])) == ([], [])


@pytest.mark.slow
def test_the_compile_cache_is_filled_in_processes_and_failures_are_left_to_the_measurement() -> None:
    shown: list[str] = []
    compile_in_parallel(
        [{"contest": {"device": "cpu"}, "name": "standard"}],
        lambda message, share: shown.append(message),
    )
    assert shown[-1] == "compiling in parallel, 1 of 1 done"


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [compile_threads(count)["TORCHINDUCTOR_COMPILE_THREADS"] for count in (1, 5, 40)] == [
        "16",
        "3",
        "1",
    ]
