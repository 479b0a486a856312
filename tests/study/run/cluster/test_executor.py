"""The executor of a cluster, with an engine that needs none: results, faults, stops and bad clusters."""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from filelock import SoftFileLease

from headtohead import Study
from headtohead.api.result import StudyResult
from headtohead.api.runner import RunSettings, StudyRunner
from headtohead.api.study import plain
from headtohead.common.errors import UserError
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.run.claim_loop import ClaimLoop
from headtohead.study.run.cluster import executor, run_files
from headtohead.study.run.cluster.engine import Node, Resources, check_nodes
from headtohead.study.run.cluster.messages import (
    Instructions,
    NodeFacts,
    Order,
    Post,
    Reply,
    ShippedFile,
    TaskEnd,
    Versions,
)
from headtohead.study.run.cluster.node import DriverGone, Link, Reporter, device_type, run_task
from headtohead.study.run.events import Event
from headtohead.study.store.lease import Lease
from headtohead.study.store.run_store import Store
from tests.results import stored
from tests.study.run.cluster.fake_engine import FakeEngine, _Link, other_versions

SMALL = {"arms": ["standard", "sharing:tie=kv"], "batch": 256, "tokens": 1280, "seeds": 1, "lr": 5e-3}
MECHANISM = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, shape, options):
        super().__init__()
        self.v = nn.Linear(shape.width, shape.width)

    def forward(self, x, frame):
        return self.v(x)
"""


def study(story: Path, **values: Any) -> Study:
    return Study(**(SMALL | {"corpus": f"file:{story}"} | values))


def race(
    chosen: Study, out: Path, engine: FakeEngine, seconds: float = math.inf, keep_weights: bool = True
) -> StudyResult:
    how = RunSettings(deadline=time.monotonic() + seconds, quiet=True, engine=engine)
    execution = ExecutionSettings(save_every=0.0, keep_weights=keep_weights)
    try:
        return StudyRunner(chosen.spec, plain(chosen.values), Store(out), execution, how).run()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def local(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that ran on this machine."""
    folder = tmp_path_factory.mktemp("local")
    assert not study(story).run(folder, workers=1, quiet=True).summary.left
    return folder


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that sees nothing of the driver's file system."""
    monkeypatch.setenv("H2H_SHARED", "off")


def test_tasks_in_a_shared_store_give_the_results_of_one_machine(
    story: Path, tmp_path: Path, local: Path
) -> None:
    engine = FakeEngine()
    done = race(study(story), tmp_path, engine)
    assert (done.summary.done, done.summary.left) == (2, 0)
    assert stored(tmp_path) == stored(local)
    assert all(order.shared for order in engine.orders)
    assert not engine.offered
    assert not [*tmp_path.glob(".shared-*"), *tmp_path.glob("runs/*/lock")]


@pytest.mark.usefixtures("unshared")
def test_tasks_that_share_nothing_send_everything_to_the_driver(
    story: Path, tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H2H_CACHE", str(tmp_path / "cache"))
    engine = FakeEngine()
    done = race(study(story, probes=["positions"]), tmp_path / "out", engine)
    assert (done.summary.done, done.summary.left) == (2, 0)
    assert not any(order.shared for order in engine.orders)
    for run in Store(local).runs():
        copy = Store(tmp_path / "out").run(run.id)
        for name in ("result.json", "checkpoint/final.safetensors"):
            assert (copy.path / name).read_bytes() == (run.path / name).read_bytes()
        assert copy.result() is not None
        assert copy.probe("positions") is not None
        assert copy.costs().tokens_per_second
        assert len(copy.logged_rows()) == len(run.logged_rows())
        assert [path.name for path in copy.checkpoints.iterdir()] == [
            path.name for path in run.checkpoints.iterdir()
        ]
    # The shards of the corpus travelled once, for both tasks.
    assert sorted(engine.offered) == sorted(set(engine.offered))
    assert "train.bin" in engine.offered
    assert not [*tmp_path.glob("out/.shared-*"), *tmp_path.glob("out/runs/*/lock")]


@pytest.mark.usefixtures("unshared")
def test_weights_that_were_kept_for_probes_do_not_stay_on_the_driver(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def eager(self: Reporter, event: Event) -> None:
        emit(self, event)
        self.send()  # also while the probes are taken, with the weights

    emit = Reporter.emit
    monkeypatch.setattr(Reporter, "emit", eager)
    done = race(study(story, probes=["positions"]), tmp_path, FakeEngine(), keep_weights=False)
    assert (done.summary.done, done.summary.left) == (2, 0)
    assert all(run.probe("positions") is not None for run in Store(tmp_path).runs())
    assert not list(tmp_path.rglob("final.*"))


@pytest.mark.usefixtures("unshared")
def test_a_run_of_a_lost_node_continues_from_its_newest_checkpoint(
    story: Path, tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def eager(self: Reporter, event: Event) -> None:
        emit(self, event)
        self.send()  # every step is saved and posted

    def fault(post: Post, number: int) -> str:
        saved.extend(unit.name for one in post.changes for unit in one.units if "/step-" in unit.name)
        return "node lost" if number == 1 and len(saved) > 2 else ""

    saved: list[str] = []
    emit = Reporter.emit
    monkeypatch.setattr(Reporter, "emit", eager)
    engine = FakeEngine(fault)
    summary = race(study(story), tmp_path, engine).summary
    assert not summary.left
    assert "was lost; standard, seed 1 will continue elsewhere" in summary.trouble[0]
    assert stored(tmp_path) == stored(local)
    again = engine.orders[-1]
    assert any("/checkpoint/step-0000000002/" in file.place for file in again.state)


@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.usefixtures("unshared")
def test_a_run_whose_process_dies_twice_has_failed(
    story: Path, tmp_path: Path, local: Path, deaths: int
) -> None:
    def fault(post: Post, number: int) -> str:
        first = engine.orders[number - 1].runs[0]["label"]
        if first == "standard" and any(event.kind == "ended" for event in post.events):
            died.append(number)
        return "process died" if number in died[:deaths] else ""

    died: list[int] = []
    engine = FakeEngine(fault)
    done = race(study(story), tmp_path, engine)
    assert not done.summary.left
    states = {run.spec().label: run.state() for run in Store(tmp_path).runs()}
    assert states == {"standard": "failed" if deaths == 2 else "done", "(Q, K=V)": "done"}
    if deaths == 1:
        assert stored(tmp_path) == stored(local)


@pytest.mark.usefixtures("unshared")
def test_mechanism_files_travel_and_keep_their_identity(story: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MECHANISM)
    chosen = study(story, arms=["standard", f"{file}:Mine"])
    chosen.run(tmp_path / "local", workers=1, quiet=True)

    def hiding(order: Order, link: Link) -> TaskEnd:
        hidden = file.rename(tmp_path / "hidden.py")
        try:
            return run_task(order, link)
        finally:
            hidden.rename(file)

    engine = FakeEngine(task=hiding)
    hiding_offers = engine.offer
    engine.offer = lambda path: hiding_offers(path if path.exists() else tmp_path / "hidden.py")  # type: ignore[method-assign]
    assert not race(chosen, tmp_path / "out", engine).summary.left
    assert stored(tmp_path / "out") == stored(tmp_path / "local")
    specs = {(run.path / "spec.json").read_text() for run in Store(tmp_path / "out").runs()}
    assert specs == {(run.path / "spec.json").read_text() for run in Store(tmp_path / "local").runs()}


@pytest.mark.slow
@pytest.mark.usefixtures("unshared")
def test_branches_start_from_the_checkpoints_that_their_trunk_sent(story: Path, tmp_path: Path) -> None:
    chosen = study(story, arms=["standard"], tokens=2560, branches=[1280, 2560], schedule="wsd")
    chosen.run(tmp_path / "local", workers=1, quiet=True)
    engine = FakeEngine()
    assert not race(chosen, tmp_path / "out", engine).summary.left
    assert stored(tmp_path / "out") == stored(tmp_path / "local")
    branches = [order for order in engine.orders if order.runs[0].get("parent")]
    assert len(branches) == 2
    assert all(any("/branches/step-" in file.place for file in order.state) for order in branches)
    assert not [*(tmp_path / "out").glob("runs/*/branches")]


def test_rows_of_a_population_are_one_task(story: Path, tmp_path: Path) -> None:
    chosen = study(story, arms=["standard"], seeds=2)
    engine = FakeEngine()
    how = RunSettings(quiet=True, engine=engine, population=True)
    runner = StudyRunner(chosen.spec, plain(chosen.values), Store(tmp_path), ExecutionSettings(), how)
    assert not runner.run().summary.left
    assert [len(order.runs) for order in engine.orders] == [2]


def test_a_time_limit_ends_the_study_and_the_next_start_finishes_it(
    story: Path, tmp_path: Path, local: Path
) -> None:
    engine = FakeEngine()
    stopped = race(study(story), tmp_path, engine, seconds=0.0).summary
    assert stopped.stopped
    assert stopped.left
    first = Store(tmp_path).run(engine.orders[0].runs[0]["id"])
    assert first.finished() or [*first.path.glob("checkpoint/step-*")]
    assert not race(study(story), tmp_path, FakeEngine()).summary.left
    assert stored(tmp_path) == stored(local)


def test_a_node_that_joins_without_the_file_system_gets_copies(
    story: Path, tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joining(order: Order, link: Link) -> TaskEnd:
        monkeypatch.setenv("H2H_SHARED", "off")
        return run_task(order, link)

    engine = FakeEngine(task=joining)
    assert not race(study(story), tmp_path, engine).summary.left
    assert [order.shared for order in engine.orders] == [True, True, False, False]
    assert stored(tmp_path) == stored(local)


def test_an_unfit_node_gets_no_further_run(story: Path, tmp_path: Path, local: Path) -> None:
    here = Versions.here()

    def joining(order: Order, link: Link) -> TaskEnd:
        if len(engine.orders) > 2:
            return run_task(order, link)
        other = Versions(here.headtohead, here.commit, here.torch, here.numerics + 1)
        return run_task(msgspec.structs.replace(order, versions=other), link)

    engine = FakeEngine(task=joining)
    engine.more = [Node("other", "other", 1.0, 0.0)]
    summary = race(study(story), tmp_path, engine).summary
    assert not summary.left
    assert "numerics" in summary.trouble[0]
    assert "the node gets no further run" in summary.trouble[0]
    assert engine.avoided == {"node"}
    assert stored(tmp_path) == stored(local)


def test_a_study_ends_if_all_nodes_are_unfit(story: Path, tmp_path: Path) -> None:
    engine = FakeEngine(task=lambda order, link: TaskEnd(order.task, "unfit", "full disk", link.node))
    summary = race(study(story), tmp_path, engine).summary
    assert summary.left == 2
    assert "no node is left that can run this study" in summary.trouble[-1]


@pytest.mark.usefixtures("unshared")
def test_a_branch_may_start_while_its_trunk_trains(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def growing(order: Order, link: Link) -> TaskEnd:
        for file in order.trunks:  # the trunk goes on
            if file.endswith("metrics.jsonl"):
                with open(tmp_path / "out" / file, "ab") as stream:
                    stream.write(b'{"step": 1}\n')
        return run_task(order, link)

    chosen = study(story, arms=["standard"], tokens=2560, branches=[1280, 2560], schedule="wsd")
    engine = FakeEngine(task=growing)
    assert not race(chosen, tmp_path / "out", engine).summary.left
    assert sum(bool(order.trunks) for order in engine.orders) == 2


def test_every_task_knows_the_time_limit(story: Path, tmp_path: Path) -> None:
    def asking(order: Order, link: Link) -> TaskEnd:
        with Reporter(order.task, link) as reporter:
            deadlines.append(reporter.deadline)
        return run_task(order, link)

    deadlines: list[float] = []
    assert not race(study(story), tmp_path, FakeEngine(task=asking), seconds=300).summary.left
    assert len(deadlines) == 2
    assert math.isfinite(max(deadlines))


def test_a_run_of_another_host_that_dies_twice_has_failed(story: Path, tmp_path: Path) -> None:
    def dying(order: Order, link: Link) -> TaskEnd:
        with Reporter(order.task, link) as reporter:
            run = order.runs[0]["id"]
            lock = Path(order.store) / "runs" / run / "lock"
            lease = SoftFileLease(lock, lease_duration=60.0)
            lease.acquire()
            text = lock.read_text()
            lease.release()
            lock.write_text(text.replace(socket.gethostname(), "far"))
            reporter.emit(Event("started", run))
        return TaskEnd(order.task, "process died", "was killed")

    class Far(FakeEngine):
        def exchange(self, instructions: Instructions) -> list[Post]:
            posts = super().exchange(instructions)
            return [msgspec.structs.replace(post, host="far") if post.host else post for post in posts]

    engine = Far(task=dying)
    assert not race(study(story, arms=["standard"]), tmp_path, engine).summary.left
    assert len(engine.orders) == 2
    assert [run.state() for run in Store(tmp_path).runs()] == ["failed"]


def test_a_run_that_another_executor_has_is_waited_for_until_the_time_limit(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(ClaimLoop, "attempt", lambda self, group: "held")
    summary = race(study(story, arms=["standard"]), tmp_path, FakeEngine(), seconds=0.5).summary
    assert summary.left == 1
    assert summary.stopped


@pytest.mark.usefixtures("unshared")
def test_a_driver_that_lost_its_lease_writes_nothing(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease, "lost", lambda self: True)
    summary = race(study(story), tmp_path, FakeEngine()).summary
    assert summary.left == 2
    assert "another process took over" in summary.trouble[0]
    assert not [*tmp_path.glob("runs/*/metrics.jsonl")]


def test_runs_under_length_time_need_the_device_that_was_timed() -> None:
    order = Order("task", Versions.here(), ExecutionSettings(), [], (), "", "", False, device="another")
    end = run_task(order, _Link(FakeEngine(), 1))
    assert end.how == "unfit"
    assert "instead of another" in end.message


@pytest.mark.usefixtures("unshared")
def test_a_stop_while_files_are_sent_is_no_fault_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H2H_CACHE", str(tmp_path / "cache"))
    file = ShippedFile("data/text", str(tmp_path / "text"), "0" * 64, 1)
    order = Order("task", Versions.here(), ExecutionSettings(), [], (), "", "", False, inputs=(file,))
    engine = FakeEngine()
    engine.exchange(Instructions(stop=frozenset({"task"})))
    assert run_task(order, _Link(engine, 1)).how == "returned"


def test_a_task_that_cannot_reach_its_driver_repeats_and_then_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(_Link):
        def post(self, post: Post) -> Reply:
            posts.append(post)
            if len(posts) in (2, 3):
                raise OSError("unavailable")
            if len(posts) > 6:
                raise DriverGone
            return Reply(every=60.0)

    posts: list[Post] = []
    with Reporter("task", Failing(FakeEngine(), 1)) as reporter:
        reporter.emit(Event("ended", "run", state="done"))
        assert not reporter.stopped()
        reporter.flush()
        assert [post.events for post in posts[1:4]] == [posts[1].events] * 3
        assert not reporter.stopped()
        while not reporter.stopped():
            reporter.emit(Event("started", "run"))


@pytest.mark.usefixtures("unshared")
def test_a_store_that_cannot_be_written_ends_the_study(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, unit: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(run_files, "_write", full)
    summary = race(study(story), tmp_path, FakeEngine()).summary
    assert summary.left == 2
    assert "No space left on device" in summary.trouble[0]


def test_nodes_are_checked_before_anything_is_planned() -> None:
    engine = FakeEngine(facts=other_versions)
    with pytest.raises(UserError, match=r"node far has torch 1\.0 instead of .*: install the same versions"):
        check_nodes(engine, timed=False)
    engine = FakeEngine(facts=lambda store, nonce: "node far does not have headtohead")
    with pytest.raises(UserError, match="does not have headtohead"):
        check_nodes(engine, timed=False)


def test_a_request_that_no_node_can_satisfy_is_rejected() -> None:
    engine = FakeEngine()
    engine.needed = Resources(1.0, 2.0)
    with pytest.raises(UserError, match=r"no node of the cluster has 1 CPU and 2 GPUs .* 1 CPUs and 0 GPUs"):
        check_nodes(engine, timed=False)


def test_timed_studies_need_whole_devices_of_one_type() -> None:
    engine = FakeEngine()
    engine.needed = Resources(0.5)
    with pytest.raises(UserError, match=r"length=time needs whole devices, and a run would have 0\.5 CPU"):
        check_nodes(engine, timed=True)
    devices = iter([device_type(False), "slow"])
    facts = lambda store, nonce: NodeFacts("far", Versions.here(), next(devices), True)  # noqa: E731
    engine = FakeEngine(facts=facts)
    engine.nodes = lambda: [Node("a", "a", 1.0, 0.0), Node("b", "b", 1.0, 0.0)]  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"devices of one type, and this machine and the nodes have .*slow"):
        check_nodes(engine, timed=True)


@pytest.mark.parametrize(
    ("cpus", "gpus", "message"),
    [(1.5, 0.0, "cpus_per_run=1.5"), (1.0, -1.0, "gpus_per_run=-1"), (0.0, 0.0, "needs a share")],
)
def test_impossible_resources_are_named(cpus: float, gpus: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Resources(cpus, gpus)


def test_a_class_without_a_file_is_rejected(story: Path, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(MECHANISM, namespace)
    with pytest.raises(UserError, match="class that no file contains"):
        race(study(story, arms=["standard", namespace["Mine"]]), tmp_path, FakeEngine())
