from __future__ import annotations

import pytest

from headtohead.bench.compile_cache import compile_threads, warm


def test_every_order_runs_in_a_process_and_failures_are_ignored() -> None:
    shown: list[str] = []
    warm("json.tool", [{"size": "nano"}] * 3, lambda message, share: shown.append(message))
    assert shown[-1] == "compiling in parallel, 3 of 3 done"
    warm("no.such.module", [{}], lambda message, share: shown.append(message))
    assert shown[-1] == "compiling in parallel, 1 of 1 done"


def test_without_orders_no_process_starts() -> None:
    warm("no.such.module", [], lambda message, share: pytest.fail("no process was needed"))


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [compile_threads(count)["TORCHINDUCTOR_COMPILE_THREADS"] for count in (1, 5, 40)] == [
        "16",
        "3",
        "1",
    ]
