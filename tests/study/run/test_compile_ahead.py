"""The next pass is compiled in a helper process, which leaves only a compiled graph behind and ends with the study."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from headtohead import Study
from headtohead.common.stop import NEVER
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.planner import plan_study
from headtohead.study.plan.population import group_populations
from headtohead.study.run.claim_loop import ClaimLoop
from headtohead.study.run.compile_ahead import CompileAhead, compile_pass
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

COMPILED = ExecutionSettings(compile=True)


def passes(story: Path, **values: Any) -> list[list[RunSpec]]:
    settings = {"arms": ["standard", "diagonal"], "tokens": 512, "batch": 256, "seeds": 2} | values
    spec = Study(corpus=f"file:{story}", **settings).spec
    plan = plan_study(spec, in_population=lambda *given: True)
    return group_populations(plan.runs.values(), COMPILED)


def test_a_pass_is_compiled_without_touching_the_study(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr("headtohead.training.compiled_step.inductor", backend)
    store = Store(tmp_path / "study")
    compile_pass(store, passes(story)[0], COMPILED)
    assert len(graphs) == 1
    assert not store.path.exists()


def test_other_passes_need_no_helper(story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(
        "headtohead.study.run.compile_ahead.WorkerProcess", lambda *given, **named: started.append(1)
    )
    rows = passes(story)[0]
    (task, *_) = plan_study(Study(["standard"], tasks=["grammar:train=60"], tokens=2000).spec).runs.values()
    CompileAhead(Store(tmp_path), ExecutionSettings()).start(rows)
    ahead = CompileAhead(Store(tmp_path), COMPILED)
    ahead.start([dataclasses.replace(rows[0], stacked=False)])  # seeds of a compiled run share its graph
    ahead.start([dataclasses.replace(task, stacked=True)])
    assert not started
    ahead.start(rows)
    assert started


@pytest.mark.slow
def test_the_next_unfinished_pass_is_compiled_while_one_trains(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headtohead.training.compiled_step.inductor", lambda graph, given: graph)
    order = []

    class Noted(CompileAhead):
        def start(self, runs: Any, layers: Any = None) -> None:
            order.append(("ahead", runs[0].label, len(runs)))

    store = Store(tmp_path)
    store.make()
    groups = passes(story, arms=["standard", "diagonal", "prefix_mean"])
    runs = [run for group in groups for run in group]

    compiled = []

    def emit(event: Any) -> None:
        if event.kind == "compiling":
            compiled.append(event.run)
            now = ("trains", store.run(event.run).spec().label, 0)
            order.extend([now] if order[-1] != now else [])

    ClaimLoop(store, runs, COMPILED, NEVER, emit, ahead=Noted(store, COMPILED)).work()
    labels = [group[0].label for group in groups]
    assert order == [
        ("ahead", labels[1], 2),
        ("trains", labels[0], 0),
        ("ahead", labels[2], 2),
        ("trains", labels[1], 0),
        ("trains", labels[2], 0),
    ]
    assert compiled == [run.id for run in runs], "every row of a pass is reported"


def test_a_helper_ends_when_it_is_closed(story: Path, tmp_path: Path) -> None:
    ahead = CompileAhead(Store(tmp_path), COMPILED)
    ahead.start(passes(story)[0])
    assert ahead._helper is not None
    pid = ahead._helper.process.pid
    ahead.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_helper_fills_the_compile_cache(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("H2H_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    ahead = CompileAhead(Store(tmp_path / "study"), COMPILED)
    ahead.start(passes(story)[0])
    assert ahead._helper is not None
    assert ahead._helper.process.wait() == 0
    assert any((tmp_path / "cache" / "compiled").glob("*/fxgraph/*"))
