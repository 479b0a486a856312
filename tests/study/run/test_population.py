"""Populations in studies: rows are separate runs, one choice for the whole study, nothing lost and nothing repeated."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headtohead import Study, forecast
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.common.stop import NEVER, Stop
from headtohead.study.plan.execution import ExecutionSettings, layers_of
from headtohead.study.plan.planner import plan_study
from headtohead.study.plan.population import PopulationPolicy, group_populations
from headtohead.study.plan.row_throughput import MOST
from headtohead.study.run.claim_loop import ClaimLoop
from headtohead.study.run.events import Emit, Event
from headtohead.study.run.training import may_record
from headtohead.study.store.frozen import Lock, changing_lock, read_lock
from headtohead.study.store.lease import LeaseManager
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store
from headtohead.training.population import PopulationTrainer
from tests import processes

SMALL = {"tokens": 2560, "batch": 256, "seeds": 3, "lr": 5e-3}
MINE = """
import torch
from headtohead import Mechanism

class Mine(Mechanism):
    def __init__(self, shape, options=None):
        super().__init__(shape, options)
        self.o = torch.nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x, frame):
        return x if x.device.type != "meta" and x.sum().item() > 1e9 else self.o(x)
"""


def study(story: Path, **values: Any) -> Study:
    given = {"arms": ["standard", "coupled"], "corpus": f"file:{story}"} | SMALL | values
    return Study(**{key: value for key, value in given.items() if value is not None})


def runs_of(story: Path, **values: Any) -> list[RunSpec]:
    return plan_study(study(story, **values).spec, in_population=lambda *given: True).compared()


def work(store: Store, runs: list[RunSpec], stop: Stop, emit: Emit = lambda event: None) -> None:
    ClaimLoop(store, runs, ExecutionSettings(), stop, emit).work()


def scores(folder: Path) -> dict[tuple[str, int], float]:
    """Return the bits per byte of every run by arm and seed."""
    found = {}
    for run in Store(folder).runs():
        result, spec = run.result(), run.spec()
        assert result is not None
        found[spec.arm, spec.seed] = result.test.values["bits_per_byte"]
    return found


def results(folder: Path) -> dict[str, str]:
    return {run.id: (run.path / "result.json").read_text() for run in Store(folder).runs()}


def countdown(count: int) -> Callable[[], bool]:
    """Return a `stop` that returns True after `count` calls."""
    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] > count

    return stop


@pytest.fixture(scope="module")
def finished(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stacked")
    result = study(story, evaluations=2, probes=["positions"]).run(
        folder, workers=1, population=True, quiet=True
    )
    assert result.summary.done == 6
    return folder


def test_rows_have_their_own_directories_metrics_probes_and_results(finished: Path) -> None:
    runs = Store(finished).runs()
    assert len(runs) == 6
    for run in runs:
        assert run.spec().stacked is True
        assert run.state() == "done"
        assert run.weights.is_file()
        assert run.probe("positions") is not None
        assert run.costs().stacked == 3
        assert not (run.path / "lock").exists()
        assert not list(run.checkpoints.glob("step-*"))
        rows = run.logged_rows()
        assert rows[-1].step == 10
        assert sum(row.valid is not None for row in rows) == 1
    assert len(set(scores(finished).values())) == 6


def test_rows_match_separate_runs(story: Path, finished: Path, tmp_path: Path) -> None:
    study(story, evaluations=2).run(tmp_path, workers=1, quiet=True)
    separate = scores(tmp_path)
    assert {run.id for run in Store(tmp_path).runs()}.isdisjoint(run.id for run in Store(finished).runs())
    for key, score in scores(finished).items():
        assert score == pytest.approx(separate[key], rel=1e-4)


@pytest.mark.slow
def test_compiled_rows_are_the_same_runs(
    story: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def compile(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr("torch._inductor.compile", compile)
    chosen = study(story, evaluations=2, probes=["positions"], arms=["standard"])
    chosen.run(tmp_path, workers=1, population=True, compile=True, quiet=True)
    assert len(graphs) == 1
    assert {run.id for run in Store(tmp_path).runs()} <= {run.id for run in Store(finished).runs()}
    before = scores(finished)
    for key, score in scores(tmp_path).items():
        assert score == pytest.approx(before[key], rel=1e-4)


def test_a_stop_ends_a_compilation_and_the_next_start_trains(
    story: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    def endless(graph: Any, given: Any) -> Any:
        started.set()
        while True:
            time.sleep(0.01)

    monkeypatch.setattr("headtohead.training.compiled_step.inductor", endless)
    store = Store(tmp_path)
    store.make()
    jobs = runs_of(story, arms=["standard"], evaluations=2)
    execution = ExecutionSettings(compile=True)
    ClaimLoop(store, jobs, execution, Stop(started.is_set), lambda event: None).work()
    assert [store.run(job.id).state() for job in jobs] == ["waiting"] * 3, "nothing half done is saved"
    work(store, jobs, NEVER)
    for job in jobs:
        assert results(tmp_path)[job.id] == results(finished)[job.id]


def test_a_time_limit_waits_for_the_first_compiled_graph(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headtohead.training.compiled_step.inductor", lambda graph, given: graph)
    store = Store(tmp_path)
    store.make()
    jobs = runs_of(story, arms=["standard"])
    ClaimLoop(store, jobs, ExecutionSettings(compile=True), Stop.after(0.0), lambda event: None).work()
    assert {store.run(job.id).state() for job in jobs} == {"stopped"}
    assert all(any(store.run(job.id).checkpoints.glob("step-*")) for job in jobs)


def test_rows_that_do_not_fit_into_memory_are_trained_in_smaller_passes(
    story: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = PopulationTrainer.__init__

    def small(self: PopulationTrainer, members: Any, **given: Any) -> None:
        if len(members) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        usual(self, members, **given)

    monkeypatch.setattr(PopulationTrainer, "__init__", small)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    store = Store(tmp_path)
    store.make()
    jobs = runs_of(story, arms=["standard"], evaluations=2)
    events: list[Event] = []
    work(store, jobs, NEVER, events.append)
    messages = [event.message for event in events if event.kind == "warning"]
    assert messages[0] == "out of memory: the 3 rows of this pass are trained in passes of 2"
    for job in jobs:
        result = store.run(job.id).result()
        assert result.status == "done"
        wanted = Store(finished).run(job.id).result().test.values["bits_per_byte"]
        assert result.test.values["bits_per_byte"] == pytest.approx(wanted, rel=1e-4)


def test_rows_of_tasks_match_separate_runs(tmp_path: Path) -> None:
    tasks = {"arms": ["standard"], "tasks": ["grammar:train=70"], "tokens": 3000, "batch": 300, "seeds": 3}
    for folder, stack in (("stacked", True), ("separate", False)):
        Study(**tasks).run(tmp_path / folder, workers=1, population=stack, quiet=True)
    found = [
        {run.spec().seed: run.result() for run in Store(tmp_path / folder).runs()}
        for folder in ("stacked", "separate")
    ]
    assert len(found[0]) == 3
    for seed, result in found[0].items():
        other = found[1][seed]
        assert result is not None
        assert other is not None
        assert result.test.values["nats"] == pytest.approx(other.test.values["nats"], rel=1e-4)


def test_a_finished_study_starts_nothing_and_keeps_its_populations(story: Path, finished: Path) -> None:
    before = results(finished)
    again = study(story, evaluations=2, probes=["positions"]).run(finished, quiet=True)
    assert again.summary.done == 0
    assert results(finished) == before
    assert set(read_lock(finished).populations.values()) == {True}


def test_a_lock_of_an_older_version_decides_for_the_whole_study(
    story: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "old")
    with changing_lock(tmp_path / "old") as lock:
        lock.populations, lock.stacked = {}, True
    again = study(story, evaluations=2, probes=["positions"]).run(tmp_path / "old", quiet=True)
    assert again.summary.done == 0
    assert results(tmp_path / "old") == results(finished)


def test_a_forecast_counts_the_finished_rows(story: Path, finished: Path) -> None:
    chosen = study(story, evaluations=2, probes=["positions"])
    assert forecast(chosen, out=finished, device="cpu", quiet=True).done == 6
    assert forecast(chosen, device="cpu", quiet=True).done == 0


def test_a_study_started_without_populations_stays_without(story: Path, tmp_path: Path) -> None:
    study(story, tokens=512, seeds=2).run(tmp_path, workers=1, quiet=True)
    runs = {run.id for run in Store(tmp_path).runs()}
    study(story, tokens=512, seeds=2).run(tmp_path, workers=1, population=True, quiet=True)
    stacked = {run.id for run in Store(tmp_path).runs()} - runs
    assert len(stacked) == 4
    study(story, tokens=512, seeds=2).run(tmp_path, workers=1, population=False, quiet=True)
    assert {run.id for run in Store(tmp_path).runs()} == runs | stacked
    assert set(read_lock(tmp_path).populations.values()) == {False}


@pytest.mark.slow
def test_each_worker_takes_a_population(story: Path, finished: Path, tmp_path: Path) -> None:
    study(story, evaluations=2, probes=["positions"]).run(tmp_path, workers=2, population=True, quiet=True)
    assert results(tmp_path) == results(finished)


def test_a_stopped_study_continues_to_the_same_results(story: Path, finished: Path, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.make()
    jobs = runs_of(story, evaluations=2)
    stretches = 0
    while not (len(store.runs()) == 6 and all(run.finished() for run in store.runs())) and stretches < 30:
        stretches += 1
        work(store, jobs, Stop(countdown(3 + stretches)))
    assert 2 < stretches < 30
    assert results(tmp_path) == results(finished)
    for run in store.runs():
        assert [row.step for row in run.logged_rows() if row.valid is not None] == [5]


def test_a_population_stopped_while_scoring_resumes_with_scoring(
    story: Path, finished: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    store.make()
    jobs = runs_of(story, arms=["standard"], evaluations=2)
    first, second, third = (store.run(job.id) for job in jobs)

    def stop() -> bool:
        return first.finished() and Event("scoring", second.id) in events

    events: list[Event] = []
    work(store, jobs, Stop(stop), events.append)
    assert [run.state() for run in (first, second, third)] == ["done", "stopped", "stopped"]
    scored = (first.path / "result.json").stat()
    for run in (second, third):
        assert max(run.checkpoints.glob("step-*")).name == "step-0000000010"
    events.clear()
    work(store, jobs, NEVER, events.append)
    assert not any(event.kind == "step" for event in events)
    assert (first.path / "result.json").stat() == scored
    assert results(tmp_path).items() <= results(finished).items()
    for run in (first, second, third):  # all three shared the steps, whenever they were scored
        assert run.costs().train_seconds == pytest.approx(run.logged_rows()[-1].seconds / 3, abs=2e-3)


def test_a_row_that_has_started_is_not_delayed_by_one_that_has_not(story: Path, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.make()
    jobs = runs_of(story, arms=["standard"], tokens=5120, seeds=3)
    events: list[Event] = []
    work(store, jobs[:2], Stop(countdown(9)), events.append)
    assert [run.state() for run in store.runs()] == ["stopped"] * 2
    work(store, jobs, NEVER, events.append)
    assert [run.state() for run in store.runs()] == ["done"] * 3
    stacked = {run.spec().seed: run.costs().stacked for run in store.runs()}
    assert stacked == {1: 2, 2: 2, 3: 1}


def test_a_diverged_row_is_a_result_and_the_others_continue(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headtohead.model.decoder import Decoder

    usual = Decoder.initialise

    def broken(self: Decoder, seed: int) -> None:
        usual(self, seed)
        if seed == 2:
            self.readout.data.fill_(float("nan"))

    monkeypatch.setattr(Decoder, "initialise", broken)
    study(story, arms=["standard"]).run(tmp_path, workers=1, population=True, quiet=True)
    states = {run.spec().seed: run.state() for run in Store(tmp_path).runs()}
    assert states == {1: "done", 2: "diverged", 3: "done"}


def test_an_error_of_the_population_is_recorded_for_each_row(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("headtohead.training.population.PopulationTrainer._clip", failing)
    study(story, arms=["standard"]).run(tmp_path, workers=1, population=True, quiet=True)
    for run in Store(tmp_path).runs():
        result = run.result()
        assert result is not None
        assert result.status == "failed"
        assert "no such luck" in result.error


def test_a_population_waits_while_another_executor_leases_one_of_its_rows(
    story: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    store.make()
    jobs = runs_of(story, arms=["standard"], tokens=512)
    other = store.run(jobs[1].id)
    other.open(jobs[1])
    events: list[Event] = []
    with LeaseManager().acquire(other.path) as lease:
        assert lease is not None
        work(store, jobs, Stop.after(0.0), events.append)
        assert not any(event.kind == "started" for event in events)
        assert not any((store.run(job.id).path / "lock").exists() for job in (jobs[0], jobs[2]))
    work(store, jobs, NEVER, events.append)
    assert [run.state() for run in store.runs()] == ["done"] * 3


def test_two_executors_never_repeat_a_run(story: Path, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.make()
    jobs = runs_of(story, tokens=1024)
    events: list[Event] = []
    threads = [threading.Thread(target=work, args=(store, jobs, NEVER, events.append)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    started = [event.run for event in events if event.kind == "started"]
    assert sorted(started) == sorted({job.id for job in jobs})


@pytest.mark.slow
def test_a_study_of_populations_killed_repeatedly_ends_with_the_same_results(
    story: Path, tmp_path: Path
) -> None:
    chosen = study(story, tokens=2560)
    chosen.run(tmp_path / "whole", workers=1, population=True, quiet=True)
    folder = tmp_path / "parts"
    for steps in (3, 12):  # summed over all rows
        process = processes.start(processes.race, chosen.values, folder, population=True, save_every=0.0)
        processes.until(lambda steps=steps: saved_steps(folder) >= steps)
        process.kill()
        assert processes.ended(process) == -signal.SIGKILL
    chosen.run(folder, workers=1, population=True, quiet=True)
    assert results(folder) == results(tmp_path / "whole")


def saved_steps(folder: Path) -> int:
    paths = [list(run.checkpoints.glob("step-*")) for run in Store(folder).runs()]
    return sum(max((int(path.name.removeprefix("step-")) for path in found), default=0) for found in paths)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"dropout": 0.1}}, "dropout is not supported in a population"),
    ],
    ids=("dropout",),
)
def test_settings_that_exclude_populations_are_rejected(
    story: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    given = {key: value for key, value in (SMALL | values).items() if value is not None}
    chosen = Study(arms=["standard"], corpus=f"file:{story}", **given)
    with pytest.raises(UserError, match=message):
        chosen.run(tmp_path, workers=1, population=True, quiet=True)


def test_trunks_and_branches_are_rows(story: Path, tmp_path: Path) -> None:
    values = {"branches": [1280, 2560], "tokens": None, "seeds": 2, "arms": ["standard"]}
    for name, population in (("rows", True), ("apart", False)):
        assert (
            not study(story, **values)
            .run(tmp_path / name, workers=1, population=population, quiet=True)
            .summary.left
        )
    rows, apart = (
        {
            (spec.seed, spec.training.tokens): (run, spec)
            for run in Store(tmp_path / name).runs()
            if (spec := run.spec()).parent
        }
        for name in ("rows", "apart")
    )
    assert len(rows) == 4
    assert rows.keys() == apart.keys()
    for key, (run, spec) in rows.items():
        assert spec.stacked
        assert run.costs().stacked == 2
        assert run.logged_rows()[0].step < spec.parent.step, "the rows of its trunk are included"
        assert [row.step for row in run.logged_rows()] == [row.step for row in apart[key][0].logged_rows()]
        found, wanted = (one.result().test.values["bits_per_byte"] for one in (run, apart[key][0]))
        assert found == pytest.approx(wanted, rel=1e-4)


def test_a_row_without_its_trunks_checkpoint_repeats_the_steps_with_all_others(
    story: Path, tmp_path: Path
) -> None:
    plan = plan_study(
        study(story, branches=[1280, 2560], tokens=None, seeds=2, arms=["standard"]).spec,
        in_population=lambda *given: True,
    )
    trunks = [plan.runs[entry.run] for entry in plan.trunks]
    for name in ("whole", "damaged"):
        store = Store(tmp_path / name)
        store.make()
        work(store, trunks, NEVER)
        if name == "damaged":
            shutil.rmtree(store.run(trunks[0].id).branches)
        notes: list[Event] = []
        work(store, list(plan.runs.values()), NEVER, notes.append)
        assert all(store.run(run).finished() for run in plan.runs)
    whole, damaged = (
        {run: Store(tmp_path / name).run(run).result().test for run in plan.runs if plan.runs[run].parent}
        for name in ("whole", "damaged")
    )
    for run, score in whole.items():
        assert damaged[run].values["bits_per_byte"] == pytest.approx(score.values["bits_per_byte"], rel=1e-5)


@pytest.mark.slow
def test_a_tuning_is_one_population_per_arm_over_rates_and_seeds(story: Path, tmp_path: Path) -> None:
    tune = {"lr": [2e-3, 8e-3, 3e-2], "tokens": 2560, "seeds": 2}
    chosen = study(story, lr=None, tune=tune, seeds=2)
    tuned = [
        chosen.run(tmp_path / name, workers=1, population=way, quiet=True)
        for name, way in (("a", True), ("b", False))
    ]
    rows = [run.costs().stacked for run in Store(tmp_path / "a").runs() if run.spec().label.count("lr")]
    assert rows
    assert set(rows) <= {2, 4, 6, 8}, "rates and seeds of an arm in one pass"
    for one, other in zip(*(result.manifest.tuning for result in tuned), strict=True):
        assert (one.label, one.lr, one.chosen) == (other.label, other.lr, other.chosen)
        assert one.score == pytest.approx(other.score, rel=1e-2)  # high rates amplify rounding errors
    again = chosen.run(tmp_path / "a", workers=1, quiet=True)
    assert again.summary.done == 0, "started as populations, continued as populations"


@pytest.mark.slow
def test_a_timed_contest_runs_alone_beside_populations(story: Path, tmp_path: Path) -> None:
    chosen = study(story, length=["tokens", "time"], tokens=2560, seeds=2)
    assert not chosen.run(tmp_path, workers=1, population=True, quiet=True).summary.left
    found = {(spec.length, spec.stacked) for run in Store(tmp_path).runs() for spec in [run.spec()]}
    assert found == {("tokens", True), ("time", False)}


def test_arms_that_differ_in_a_setting_of_a_row_share_a_pass(story: Path) -> None:
    faster = {"arm": "standard", "name": "faster", "circuit_lr": {"qk": "10x"}}
    runs = runs_of(story, arms=["standard", faster], seeds=2)
    (population,) = group_populations(runs, ExecutionSettings())
    assert [run.label for run in population] == ["standard", "standard", "faster", "faster"]


def test_length_time_excludes_populations(story: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="length=time"):
        study(story, length="time").run(tmp_path, workers=1, population=True, quiet=True)


def test_an_arm_that_vmap_does_not_support_is_named(story: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    chosen = study(story, arms=["standard", f"{tmp_path / 'mine.py'}:Mine"])
    with pytest.raises(UserError, match=r"mine.py.*torch.vmap fails on this model"):
        chosen.run(tmp_path / "out", workers=1, population=True, quiet=True)


def choice(story: Path, device: str = "cuda", room: int = 100, **values: Any) -> Callable[..., bool]:
    def chosen(wanted: bool | None = None, started: bool | None = None, **execution: Any) -> bool:
        plan = plan_study(study(story, **values).spec)
        contest = plan.entries[0].contest
        lock = Lock({}, populations={} if started is None else {contest.title: started})
        policy = PopulationPolicy(wanted, ExecutionSettings(device=device, **execution), lock)
        return policy(contest, plan.compared(), plan.layers, next(iter(plan.datasets.values())))

    return chosen


def test_by_default_small_models_on_a_gpu_train_in_populations_if_memory_allows(
    story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, pays = [100], [True]
    monkeypatch.setattr("headtohead.study.plan.population.max_rows", lambda *given: room[0])
    monkeypatch.setattr("headtohead.study.plan.population.rows_pay", lambda *given: pays[0])
    assert choice(story)()
    assert choice(story, size="1m")()
    assert not choice(story, device="cpu")()
    assert not choice(story, seeds=1)()
    assert choice(story)(compile=True)
    assert not choice(story)(wanted=False)
    assert not choice(story)(started=False)
    assert not choice(story, corpus=None, tasks=["grammar:train=60"])()
    assert choice(story, corpus=None, tasks=["grammar:train=60"])(wanted=True)
    assert choice(story, device="cpu")(started=True)
    assert choice(story, device="cpu")(wanted=True)
    assert not choice(story, model={"dropout": 0.1})()
    room[0] = 1
    assert not choice(story)()
    room[0], pays[0] = 100, False
    assert not choice(story)()
    assert choice(story)(wanted=True)


def test_a_population_has_rows_of_one_arm(story: Path) -> None:
    runs = runs_of(story, seeds=20)
    populations = group_populations(runs, ExecutionSettings())
    assert [len(population) for population in populations] == [10, 10, 10, 10]
    assert max(map(len, populations)) <= MOST
    assert all(len({run.arm for run in population}) == 1 for population in populations)
    assert {run.id for population in populations for run in population} == {run.id for run in runs}


def test_a_run_that_is_no_row_is_a_group_of_its_own(story: Path) -> None:
    runs = plan_study(study(story).spec).compared()
    assert group_populations(runs, ExecutionSettings()) == [[run] for run in runs]


def test_only_built_in_mechanisms_use_cuda_graphs_and_never_under_length_time(
    story: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    plain, mine = runs_of(story, arms=["standard", f"{tmp_path / 'mine.py'}:Mine"], seeds=1)
    assert may_record(plain, layers_of(plain))
    assert not may_record(mine, layers_of(mine))
    assert not may_record(dataclasses.replace(plain, length="time"), layers_of(plain))


def test_a_run_id_depends_on_whether_the_run_is_a_row(story: Path) -> None:
    plain, stacked = plan_study(study(story).spec).compared()[0], runs_of(story)[0]
    assert plain.identity == {**stacked.identity, "stacked": False}
    assert plain.id != stacked.id


def test_the_population_flags(story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"race --arms standard --corpus file:{story} --tokens 512 --batch 256 --seeds 2 --workers 1 --quiet --out {tmp_path}"
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--population"])
    assert ended.value.code == 0
    assert all(run.spec().stacked for run in Store(tmp_path).runs())
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--population", "--no-population"])
    assert ended.value.code == 2
    assert "--population is given twice" in capsys.readouterr().err


def test_one_seed_alone_is_no_population(story: Path, tmp_path: Path) -> None:
    for stack in (None, True):  # the second time there is nothing left to do
        result = study(story, arms=["standard"], seeds=1).run(
            tmp_path, workers=1, population=stack, quiet=True
        )
    assert result.summary.done == 0
    assert len(result.results) == 1
