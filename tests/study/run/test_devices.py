"""The workers of a study are distributed over the devices of a machine; devices are simulated on CPU."""

from __future__ import annotations

import queue
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headtohead import Study, UserError
from headtohead.api.study import processes
from headtohead.common.progress import Display
from headtohead.common.stop import NEVER
from headtohead.study import environment
from headtohead.study.environment import alone_with, choose_devices
from headtohead.study.plan.execution import ExecutionSettings, current_device
from headtohead.study.plan.planner import plan_study
from headtohead.study.plan.population import group_populations
from headtohead.study.run import execute as execution_module
from headtohead.study.run import executor
from headtohead.study.run.execute import execute
from headtohead.study.run.executor import WorkerPool
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

SMALL = {"tokens": 512, "batch": 256, "seeds": 2, "lr": 5e-3}
TWO = (torch.device("cpu:0"), torch.device("cpu:1"))
MINE = """
import os, pathlib, time
import headtohead as h2h
from torch import nn

seen = pathlib.Path({folder!r})

class Mine(h2h.Mechanism):
    supports = h2h.Supports(bidirectional=False, padding=False)
    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.o = nn.Linear(shape.width, shape.width, bias=False)
    def forward(self, x, frame):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible in ("4", "7"):  # in a worker
            (seen / visible).touch()
            end = time.monotonic() + 60
            while len(list(seen.iterdir())) < 2 and time.monotonic() < end:  # for the other worker
                time.sleep(0.01)
        return self.o(x)
"""


def study(story: Path, **values: Any) -> Study:
    return Study(**({"arms": ["standard", "diagonal"], "corpus": f"file:{story}"} | SMALL | values))


def rows(story: Path, **values: Any) -> list[RunSpec]:
    plan = plan_study(study(story, **values).spec, in_population=lambda *given: True)
    return list(plan.runs.values())


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of simulated GPUs."""
    names = ["A", "A"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(environment, "device_name", lambda device: names[device.index])
    return names


def test_cuda_and_auto_are_all_gpus_and_a_number_is_one(gpus: list[str]) -> None:
    both = (torch.device("cuda:0"), torch.device("cuda:1"))
    assert choose_devices("cuda") == choose_devices("auto") == both
    assert choose_devices("cuda:1") == both[1:]
    assert choose_devices("cpu") == (torch.device("cpu"),)
    with pytest.raises(UserError, match="this machine has 2"):
        choose_devices("cuda:2")
    gpus.pop()
    assert choose_devices("cuda") == (torch.device("cuda"),)
    gpus.pop()
    assert choose_devices("auto") == (torch.device("cpu"),)


def test_there_is_a_worker_for_each_gpu_unless_another_number_is_given(gpus: list[str]) -> None:
    both = choose_devices("cuda")
    assert [processes(both, workers, threads=4) for workers in (0, 1, 5)] == [2, 1, 5]
    assert processes(both[:1], 0) == 1
    assert processes((torch.device("cpu"),), 6, threads=2) == 3
    with pytest.raises(UserError, match="one per GPU"):
        processes(both, -1)


@pytest.mark.parametrize(
    ("visible", "seen"), [("", "1"), ("4,7", "7"), ("GPU-3c,GPU-9f", "GPU-9f"), ("2,3,", "3")]
)
def test_a_process_of_its_own_sees_one_of_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert alone_with("cuda:1") == ("cuda", {"CUDA_VISIBLE_DEVICES": seen})
    assert alone_with("cuda") == ("cuda", {})
    assert alone_with("cpu") == ("cpu", {})


def test_a_numbered_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextmanager
    def device(given: torch.device) -> Any:
        entered.append(given)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("cpu", "cuda", "cuda:1"):
        with current_device(torch.device(name)):
            pass
    assert entered == [torch.device("cuda:1")]


class Processes:
    """Replaces worker processes: records how they are started, and lets some die at once."""

    def __init__(self, dying: set[int]) -> None:
        self.dying = dying
        self.started: list[tuple[str, str | None]] = []

    def __call__(self, module: str, order: Any, event: type, events: queue.Queue[Any], **how: Any) -> Any:
        number = len(self.started)
        self.started.append((order.execution.device, how["environment"].get("CUDA_VISIBLE_DEVICES")))
        return SimpleNamespace(
            alive=False,
            wait=lambda: "was killed (signal 9)" if number in self.dying else "",
            ask_to_stop=lambda: None,
            process=SimpleNamespace(pid=number),
        )


def pool(
    story: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, dying: set[int]
) -> Processes:
    fake = Processes(dying)
    monkeypatch.setattr(executor, "WorkerProcess", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    store = Store(folder)
    store.make()
    execution = ExecutionSettings(device="cuda:0", devices=("cuda:0", "cuda:1"))
    workers = WorkerPool(store, execution, count, stop=NEVER)
    workers.submit(rows(story, seeds=4))
    workers.events(lambda event: None, lambda message: None)
    return fake


def test_workers_are_distributed_round_robin(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pool(story, tmp_path, monkeypatch, 5, dying=set()).started
    assert found == [("cuda", "0"), ("cuda", "1"), ("cuda", "0"), ("cuda", "1"), ("cuda", "0")]


def test_a_dead_worker_is_replaced_on_its_device(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pool(story, tmp_path, monkeypatch, 2, dying={1}).started
    assert found == [("cuda", "0"), ("cuda", "1"), ("cuda", "1")]


@pytest.mark.parametrize(
    ("workers", "devices"), [(0, ("cuda:0", "cuda:1")), (1, ()), (3, ("cuda:0", "cuda:1"))]
)
def test_a_race_trains_on_as_many_gpus_as_it_has_workers(
    gpus: list[str],
    story: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    devices: tuple[str, ...],
) -> None:
    given = []

    class Runner:
        def __init__(self, spec: Any, settings: Any, store: Any, execution: Any, how: Any) -> None:
            given.append((execution.device, execution.devices, how.workers))

        def run(self) -> None:
            pass

    monkeypatch.setattr("headtohead.api.study.StudyRunner", Runner)
    monkeypatch.setattr("headtohead.api.study.current_device", lambda device: threading.Lock())
    study(story).run(tmp_path, device="cuda", workers=workers)
    study(story).run(tmp_path, device="cuda:1", workers=workers)
    assert given == [("cuda:0", devices, workers or 2), ("cuda:1", (), workers or 1)]


def test_equal_time_needs_gpus_of_one_type(gpus: list[str], story: Path, tmp_path: Path) -> None:
    gpus[1] = "B"
    with pytest.raises(
        UserError, match=r"GPUs of one type, found cuda:0 \(A\), cuda:1 \(B\): .*--device cuda:0"
    ):
        study(story, length="time").run(tmp_path, device="cuda")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("devices", "sizes"), [(1, [5, 5]), (2, [5, 5]), (3, [2, 3, 5]), (4, [2, 3, 2, 3]), (99, [1] * 10)]
)
def test_no_device_is_left_without_a_pass(story: Path, devices: int, sizes: list[int]) -> None:
    runs = rows(story, seeds=5)
    groups = group_populations(runs, ExecutionSettings(devices=("cuda",) * devices))
    assert [len(group) for group in groups] == sizes
    assert {run.id for group in groups for run in group} == {run.id for run in runs}


def test_branches_that_wait_for_their_trunk_do_not_count_as_its_work(story: Path) -> None:
    runs = rows(story, arms=["standard"], branches=[1280, 2560], tokens=2560, seeds=4)
    groups = group_populations(runs, ExecutionSettings(devices=("cuda",) * 2))
    assert [len(group) for group in groups if not group[0].parent] == [2, 2]
    assert [len(group) for group in groups if group[0].parent] == [4, 4]


@pytest.mark.parametrize(("workers", "at_once"), [(1, 5), (2, 10), (3, 15)])
def test_the_estimate_counts_what_all_workers_train(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, at_once: int
) -> None:
    plan = plan_study(
        study(story, arms=["standard", "diagonal", "sharing"], seeds=5).spec,
        in_population=lambda *given: True,
    )
    for name in ("WorkerPool", "InProcess"):
        monkeypatch.setattr(getattr(execution_module, name), "events", lambda *given: None)
    store = Store(tmp_path)
    store.make()
    display = Display()
    execution = ExecutionSettings(devices=("cpu:0", "cpu:1")[:workers])
    execute(store, plan, execution, display, workers=workers)
    assert display.estimate._slots == at_once


@pytest.mark.slow
def test_each_worker_of_a_race_sees_its_own_device(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "mine.py").write_text(MINE.format(folder=str(seen)))
    chosen = study(story, arms=["standard", f"{tmp_path / 'mine.py'}:Mine"], seeds=3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    chosen.run(tmp_path / "one", workers=1, quiet=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr("headtohead.api.study.choose_devices", lambda given: TWO)
    assert not chosen.run(tmp_path / "two", workers=2).summary.left
    assert "2 workers on cpu:0, cpu:1" in capsys.readouterr().out
    assert {file.name for file in seen.iterdir()} == {"4", "7"}
    one, two = (
        {run.id: (run.path / "result.json").read_bytes() for run in Store(tmp_path / name).runs()}
        for name in ("one", "two")
    )
    assert one == two
