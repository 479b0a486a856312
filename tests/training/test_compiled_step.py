"""Compiled steps: same results as the function, and a fallback to the function when compiling fails."""

from __future__ import annotations

import dataclasses
import os
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from headtohead.training.compile_cache import use_compile_cache
from headtohead.training.compiled_step import CompiledStep, divide, inductor, parts_of
from headtohead.training.population import PopulationTrainer
from headtohead.training.trainer import Hooks
from tests.training.test_population import SEEDS, SETTINGS, TINY, curves, trainer


def compiled(*members: Any, backend: Any = aot_eager) -> PopulationTrainer:
    population = PopulationTrainer(members, compile=True)
    assert population._compiled is not None
    population._compiled.backend = backend
    return population


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "given"),
    [
        ("standard:kv_heads=2,qk_norm=true", {}),
        pytest.param("coupled", {"micro": 3}, marks=pytest.mark.slow),
        pytest.param("(gated_linear kuramoto_gated)*1", {}, marks=pytest.mark.slow),
        pytest.param("(gated_delta selective_state)*1", {}, marks=pytest.mark.slow),
        pytest.param("fixed_seq_qk", {}, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_population_takes_the_same_steps(arm: str, given: dict[str, Any]) -> None:
    if "kuramoto_gated" in arm:
        given = given | {"size": TINY.with_settings(tied=False)}
    messages: list[str] = []
    given = given | {"dtype": torch.float64}
    whole = PopulationTrainer([trainer(seed, arm, **given) for seed in SEEDS])
    population = compiled(*(trainer(seed, arm, **given) for seed in SEEDS))
    assert population._compiled is not None
    population._compiled.warn = messages.append
    torch.testing.assert_close(curves(population), curves(whole), rtol=1e-9, atol=1e-10)
    assert messages == []
    assert population._compiled.able


@pytest.mark.slow
def test_they_are_the_same_under_bf16() -> None:
    settings = dataclasses.replace(SETTINGS, precision="bf16", smoothing=0.1)
    whole = PopulationTrainer([trainer(seed, settings=settings) for seed in SEEDS])
    population = compiled(*(trainer(seed, settings=settings) for seed in SEEDS))
    torch.testing.assert_close(curves(population), curves(whole), rtol=0.02, atol=0.01)


@pytest.mark.slow
def test_compiling_is_announced_once() -> None:
    messages: list[str] = []
    hooks = Hooks(compiling=lambda: nullcontext(messages.append("compiling")))
    compiled(*(trainer(seed, hooks=hooks) for seed in SEEDS)).run()
    assert messages == ["compiling"]


@pytest.mark.slow
def test_the_seconds_of_compiling_are_not_those_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("headtohead.training.trainer.time.monotonic", lambda: clock[0])
    population = compiled(*(trainer(seed, sharing=len(SEEDS)) for seed in SEEDS))
    usual, steps = population.one_step, [0]

    def one_step() -> tuple[Tensor, Tensor]:
        clock[0] += 2.0 if steps[0] else 90.0
        steps[0] += 1
        return usual()

    population.one_step = one_step  # type: ignore[method-assign]
    population.run()
    for member in population.members:
        assert member.compile_seconds == pytest.approx(30)
        assert member.own_seconds == pytest.approx(2 * (steps[0] - 1) / len(SEEDS))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("H2H_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return tmp_path / "cache"


def test_graphs_are_kept_in_a_private_directory(cache: Path) -> None:
    folder = use_compile_cache()
    assert folder.parent == cache / "compiled"
    assert torch.__version__ in folder.name
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)


@pytest.mark.parametrize("kind", ["others can write", "a link", "a file"])
def test_a_directory_of_others_is_not_used(cache: Path, tmp_path: Path, kind: str) -> None:
    cache.mkdir()
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (cache / "compiled").symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        (cache / "compiled").write_text("")
    else:
        (cache / "compiled").mkdir()
        (cache / "compiled").chmod(0o777)
    warnings: list[str] = []
    folder = use_compile_cache(warnings.append)
    assert not folder.is_relative_to(cache)
    assert "compiled graphs are not kept" in warnings[0]
    assert not any((tmp_path / "elsewhere").glob("*"))


def test_damaged_graphs_are_named_and_compiled_again(cache: Path) -> None:
    folder = use_compile_cache()
    (folder / "entry").write_text("damaged")
    warnings: list[str] = []

    def backend(graph: Any, given: Any) -> Any:
        if list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).iterdir()):
            raise SyntaxError("invalid syntax in entry")
        return graph

    step = CompiledStep(lambda x: (x * 2,), warnings.append, backend=backend)
    assert step(torch.ones(2))[0].tolist() == [2.0, 2.0]
    assert step.able
    assert len(warnings) == 1
    assert "are damaged and not used" in warnings[0]
    assert [path.read_text() for path in (cache / "compiled").glob("*.damaged-*/entry")] == ["damaged"]
    assert not any(folder.iterdir())


def test_a_function_that_reads_its_values_runs_uncompiled() -> None:
    messages: list[str] = []

    def reads(x: Tensor) -> tuple[Tensor, ...]:
        return (x + x.sum().item(),)

    step = CompiledStep(reads, messages.append, backend=aot_eager)
    for number in (1.0, 2.0, 3.0):
        assert step(torch.full((2,), number))[0].tolist() == [3 * number] * 2
    assert len(messages) == 1
    assert messages[0].startswith("the step is not compiled: ")


def test_a_graph_with_other_results_is_not_used() -> None:
    messages: list[str] = []
    step = CompiledStep(
        lambda x: (x * 2,), messages.append, backend=lambda graph, given: lambda x: (x * 2.2,)
    )
    for _ in range(2):
        assert step(torch.ones(2))[0].tolist() == [2.0, 2.0]
    assert messages == ["the step is not compiled: compiled, its results differ by 10.0%"]


def test_a_function_runs_uncompiled_when_the_compiler_fails() -> None:
    messages: list[str] = []

    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    step = CompiledStep(lambda x: (x * 2,), messages.append, backend=fails)
    assert step(torch.ones(2))[0].tolist() == [2.0, 2.0]
    assert step(torch.ones(2))[0].tolist() == [2.0, 2.0]
    assert len(messages) == 1
    assert "no compiler here" in messages[0]


@pytest.mark.slow
def test_running_out_of_memory_halves_the_micro_batch_and_recompiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    population, whole = compiled(*map(trainer, SEEDS)), PopulationTrainer(list(map(trainer, SEEDS)))
    assert population._compiled is not None
    usual, failed = CompiledStep._built, [0]

    def built(self: CompiledStep, given: tuple[Tensor, ...]) -> Any:
        if not failed[0]:
            failed[0] += 1
            raise torch.OutOfMemoryError("too much")
        return usual(self, given)

    monkeypatch.setattr(CompiledStep, "_built", built)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = torch.stack(population.one_step())
    assert (population.first.micro, whole.first.micro) == (2, 4)
    torch.testing.assert_close(found, torch.stack(whole.one_step()), rtol=1e-4, atol=1e-5)


def test_products_with_long_sums_and_few_outputs_are_split() -> None:
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(3, 2048, wide, generator=draw, dtype=torch.float64) for wide in (40, 24))

    def products(left: Tensor, right: Tensor) -> Tensor:
        weights = left.transpose(1, 2) @ right
        return (left @ weights).sum(1)

    graph = make_fx(products)(left, right)
    assert divide(graph, processors=132) == 1
    shapes = [
        tuple(node.args[0].meta["tensor_meta"].shape) if "tensor_meta" in node.args[0].meta else "parts"
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.bmm.default
    ]
    assert shapes == ["parts", (3, 2048, 40)]
    torch.testing.assert_close(graph(left, right), products(left, right), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("tiles", "terms", "parts"), [(5, 8192, 16), (15, 8192, 16), (48, 8192, 4), (200, 8192, 1), (5, 600, 1)]
)
def test_a_sum_is_split_until_all_processors_are_busy(tiles: int, terms: int, parts: int) -> None:
    assert parts_of(tiles, terms, 132) == parts


@pytest.mark.slow
def test_inductor_gives_the_same_steps_and_hits_its_cache() -> None:
    population = compiled(*(trainer(seed) for seed in SEEDS), backend=inductor)
    whole = PopulationTrainer([trainer(seed) for seed in SEEDS])
    torch.testing.assert_close(curves(population), curves(whole), rtol=2e-4, atol=2e-5)
    hits = counters["inductor"]["fxgraph_cache_hit"]
    compiled(*(trainer(seed + 7) for seed in SEEDS), backend=inductor).one_step()
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1
