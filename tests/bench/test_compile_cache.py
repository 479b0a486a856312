from __future__ import annotations

import pytest

from headtohead.bench.compile_cache import compile_threads, warm


def test_every_order_has_a_process_and_failures_end_nothing() -> None:
    words: list[str] = []
    warm("json.tool", [{"size": "nano"}] * 3, lambda said, share: words.append(said))
    assert words[-1] == "compiling side by side, 3 of 3 done"
    warm("no.such.module", [{}], lambda said, share: words.append(said))
    assert words[-1] == "compiling side by side, 1 of 1 done"


def test_nothing_to_compile_is_no_work() -> None:
    warm("no.such.module", [], lambda said, share: pytest.fail("no process was needed"))


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [compile_threads(count)["TORCHINDUCTOR_COMPILE_THREADS"] for count in (1, 5, 40)] == [
        "16",
        "3",
        "1",
    ]
