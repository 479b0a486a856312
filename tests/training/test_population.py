from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headtohead.common.errors import UserError
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from headtohead.training.optimizer import adamw, make_optimizer, set_rates
from headtohead.training.population import PopulationTrainer, population_blocker
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Hooks, Trainer

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=16, vocabulary=64)
SETTINGS = TrainSettings(tokens=64 * 20, batch=64, lr=1e-2)
SEEDS = (1, 2, 5)
TEXT = (np.random.default_rng(0).integers(0, 61, 3000) // 7 * 3).astype(np.uint8)
SPLIT = Split(TEXT, np.array([0], dtype=np.uint64), len(TEXT))


def trainer(
    seed: int,
    arm: str = "standard",
    settings: TrainSettings = SETTINGS,
    size: Size = TINY,
    dtype: torch.dtype = torch.float32,
    **given: Any,
) -> Trainer:
    model = Decoder(size.with_settings(init_std=0.2), parse_layout(arm).layers(2), seed, companion=TEXT)
    return Trainer(model.to(dtype), Windows(SPLIT, 16, seed), settings, **given)


def curves(population: PopulationTrainer) -> Tensor:
    """Return nats and norms (seeds, steps, 2)."""
    rows = []
    for _ in range(population.first.steps):
        rows.append(torch.stack(population.one_step(), -1))
        for member in population.members:
            member.step += 1
    return torch.stack(rows, 1)


def curve(one: Trainer) -> Tensor:
    one.model.train()
    rows = []
    for _ in range(one.steps):
        rows.append(torch.stack(one._one_step()))
        one.step += 1
    return torch.stack(rows)


def assert_same(population: PopulationTrainer, separate: list[Trainer], tolerance: float = 2e-4) -> None:
    together, alone = curves(population), torch.stack([curve(one) for one in separate])
    torch.testing.assert_close(together, alone, rtol=tolerance, atol=tolerance / 10)
    for member, one in zip(population.members, separate, strict=True):
        for name, parameter in one.model.named_parameters():
            found = member.model.get_parameter(name)
            assert (found - parameter).norm() <= 10 * tolerance * (parameter.norm() + 0.01), name


# Keys of norm 1 with two coordinates multiply rounding errors by ten at every step.
WIDER = {"gated_delta": "gated_delta:key_dim=8"}
ARMS = (
    *(WIDER.get(name, name) for name in builtin_mechanisms()),
    "standard:kv_heads=2,qk_norm=true",
    "standard:window=4",
    "coupled:dynamics=leapfrog,force=potential,steps=2",
    "sharing:tie=kv",
    "(kuramoto_gated standard)*1",
    "(standard coupled)*1",
    "first(latent)",
    "sink:bias=zero,kv_heads=2,window=4",
    "forgetting:rope=true,kv_heads=2,window=4",
    *("flex:relative", "flex:sigmoid", "(flex:alibi flex:sliding=4)*1"),
)


FEW = (
    "flex:relative",
    "standard:kv_heads=2,qk_norm=true",
    "coupled",
    "(kuramoto_gated standard)*1",
    "fixed_seq_qk",
)


@pytest.mark.parametrize(
    "arm", [arm if arm in FEW else pytest.param(arm, marks=pytest.mark.slow) for arm in ARMS]
)
def test_a_population_equals_separate_runs_step_by_step(arm: str) -> None:
    # In float64, because twenty steps of some arms amplify float32 rounding errors.
    given: dict[str, Any] = {
        "size": TINY.with_settings(
            tied="kuramoto_gated" not in arm, positions="learned" if arm == "factorised" else "rope"
        ),
        "dtype": torch.float64,
    }
    separate = [trainer(seed, arm, **given) for seed in SEEDS]
    assert_same(PopulationTrainer([trainer(seed, arm, **given) for seed in SEEDS]), separate, 1e-7)


DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "rates": [{"lr": 3e-3}, {"lr": 1e-2}, {"lr": 3e-2}],
    "decay and betas": [{"weight_decay": 0.0}, {"weight_decay": 0.5, "beta1": 0.8}, {"beta2": 0.9}],
    "clip": [{"clip": 0.05}, {"clip": 0.0}, {"clip": 1.0}],
    "schedules": [{"warmup": 0.5}, {"schedule": "wsd", "decay_share": 0.3}, {"schedule": "constant"}],
    "circuits": [
        {"circuit_lr": [{"tag": "qk", "factor": 10}]},
        {},
        {"circuit_lr": [{"tag": "ov", "kind": "ramp", "start": 1, "end": 5}], "circuit_decay": "coupled"},
    ],
    "two spans": [{"lr": 3e-3}, {"lr": 3e-3}, {"lr": 1e-2}],
}


@pytest.mark.parametrize(
    ("name", "graph_safe"),
    [
        pytest.param(
            name, kind, marks=[pytest.mark.slow] if kind and name not in ("rates", "circuits") else []
        )
        for name in DIFFERENT
        for kind in (False, True)
    ],
)
def test_rows_of_different_settings_equal_separate_runs(name: str, graph_safe: bool) -> None:
    settings = [dataclasses.replace(SETTINGS, **changes) for changes in DIFFERENT[name]]

    def members() -> list[Trainer]:
        pairs = zip((1, 1, 2), settings, strict=True)
        return [trainer(seed, settings=each, dtype=torch.float64) for seed, each in pairs]

    population = PopulationTrainer(members())
    if graph_safe:
        population.optimizer = adamw(population.optimizer.param_groups, True)
    assert_same(population, members(), 1e-5 if graph_safe else 1e-7)


def test_rows_follow_a_hand_written_adamw() -> None:
    rows = [
        {"lr": 3e-3, "weight_decay": 0.0},
        {"lr": 2e-2, "weight_decay": 0.7, "beta1": 0.5, "beta2": 0.8},
        {"lr": 1e-2, "weight_decay": 0.2, "warmup": 0.4},
    ]
    settings = [dataclasses.replace(SETTINGS, clip=0.0, **changes) for changes in rows]
    population = PopulationTrainer([trainer(1, settings=each, dtype=torch.float64) for each in settings])
    name = "blocks.0.mechanism.q.weight"
    weights = [member.model.get_parameter(name).detach().clone() for member in population.members]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    gradients: list[Tensor] = []
    usual = population._clip

    def watched(grads: list[Tensor]) -> Tensor:
        (index, slot), *_ = (
            (index, slot)
            for index, slots in enumerate(population.slots)
            for slot in slots
            if slot.name == name
        )
        gradients[:] = [slot.of(grads[index][row]).clone() for row in range(3)]
        return usual(grads)

    population._clip = watched  # type: ignore[method-assign]
    for step in range(6):
        population.one_step()
        for row, (each, member) in enumerate(zip(settings, population.members, strict=True)):
            member.step += 1
            lr, grad = each.learning_rate(step, member.steps), gradients[row]
            first[row] = each.beta1 * first[row] + (1 - each.beta1) * grad
            second[row] = each.beta2 * second[row] + (1 - each.beta2) * grad**2
            mean = first[row] / (1 - each.beta1 ** (step + 1))
            square = second[row] / (1 - each.beta2 ** (step + 1))
            weights[row] = weights[row] * (1 - lr * each.weight_decay) - lr * mean / (square.sqrt() + 1e-8)
            torch.testing.assert_close(member.model.get_parameter(name), weights[row], rtol=1e-10, atol=1e-12)


def test_rows_cannot_differ_in_what_a_pass_shares() -> None:
    other = dataclasses.replace(SETTINGS, smoothing=0.1)
    with pytest.raises(UserError, match="cannot differ in smoothing"):
        PopulationTrainer([trainer(1), trainer(1, settings=other)])


@pytest.mark.parametrize(
    "rule",
    [
        {"tag": "qk", "factor": 1},
        {"tag": "qk", "kind": "ramp", "start": 1, "end": 1},
        {"tag": "qk", "kind": "hold_return", "factor": 1, "hold": 0.5, "back": 0.1},
    ],
)
def test_a_ratio_of_one_changes_no_bit_of_a_population(rule: dict[str, Any]) -> None:
    ruled = dataclasses.replace(SETTINGS, circuit_lr=[rule])
    plain, same = (
        PopulationTrainer([trainer(seed, settings=settings) for seed in SEEDS])
        for settings in (SETTINGS, ruled)
    )
    assert torch.equal(curves(plain), curves(same))
    for one, other in zip(plain.members, same.members, strict=True):
        for name, parameter in one.model.named_parameters():
            assert torch.equal(parameter, other.model.get_parameter(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_a_population_logs_the_circuits_of_separate_runs(clip: float) -> None:
    settings = dataclasses.replace(SETTINGS, clip=clip, circuit_lr=[{"tag": "qk", "factor": 3}])

    def members() -> tuple[list[Trainer], list[list[dict[str, Any]]]]:
        rows: list[list[dict[str, Any]]] = [[] for _ in SEEDS]
        pairs = zip(SEEDS, rows, strict=True)
        given = {"settings": settings, "dtype": torch.float64}
        return [trainer(seed, **given, hooks=Hooks(log=row.append)) for seed, row in pairs], rows

    (separate, alone), (rows_together, together) = members(), members()
    for one in separate:
        one.run()
    PopulationTrainer(rows_together).run()
    for rows, others in zip(together, alone, strict=True):
        for row, other in zip(rows, others, strict=True):
            for circuit, numbers in other["circuits"].items():
                for name, values in numbers.items():
                    assert row["circuits"][circuit][name] == pytest.approx(values, rel=1e-4), (circuit, name)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["standard", "coupled", "sharing:tie=kv", "kuramoto", "(standard coupled)*1"])
def test_in_float32_a_population_equals_separate_runs_within_rounding(arm: str) -> None:
    assert_same(
        PopulationTrainer([trainer(seed, arm) for seed in SEEDS]), [trainer(seed, arm) for seed in SEEDS]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"clip": 0.05},
        {"clip": 0.0},
        {"smoothing": 0.1},
        {"circuit_lr": {"qk": "1x..4x", "ffn": "0.5x"}},
        {"precision": "bf16"},
        {"schedule": "wsd", "weight_decay": 1.0},
    ],
    ids=str,
)
def test_settings_have_the_same_effect_in_a_population(changes: dict[str, Any]) -> None:
    settings = dataclasses.replace(SETTINGS, **changes)
    separate = [trainer(seed, settings=settings) for seed in SEEDS]
    population = PopulationTrainer([trainer(seed, settings=settings) for seed in SEEDS])
    if settings.precision == "bf16":
        torch.testing.assert_close(
            curves(population), torch.stack([curve(one) for one in separate]), rtol=0.05, atol=0.01
        )
    else:
        assert_same(population, separate)


def test_micro_batches_change_only_rounding() -> None:
    whole = curves(PopulationTrainer([trainer(seed) for seed in SEEDS]))
    parts = curves(PopulationTrainer([trainer(seed, micro=3) for seed in SEEDS]))
    torch.testing.assert_close(whole, parts, rtol=2e-4, atol=2e-5)


def test_training_updates_the_members_models() -> None:
    members = [trainer(seed) for seed in SEEDS]
    population = PopulationTrainer(members)
    before = [member.model.readout.clone() for member in members]
    population.run()
    for member, old in zip(members, before, strict=True):
        assert not torch.equal(member.model.readout, old)
        (part,) = member.batches.parts(0, 4)
        nats = member.model(part.tokens, part.targets)[1]
        assert nats.item() < math.log(64)


def test_each_row_writes_its_own_log() -> None:
    rows: list[list[dict[str, Any]]] = [[] for _ in SEEDS]
    members = [trainer(seed, hooks=Hooks(log=found.append)) for seed, found in zip(SEEDS, rows, strict=True)]
    outcomes = PopulationTrainer(members).run()
    alone: list[dict[str, Any]] = []
    trainer(5, hooks=Hooks(log=alone.append)).run()
    assert [outcome.status for outcome in outcomes] == ["done"] * 3
    assert [row["step"] for row in rows[2]] == [row["step"] for row in alone]
    for row, own in zip(rows[2], alone, strict=True):
        for key in ("tokens", "nats", "lr", "grad_norm", "grad_norm_max"):
            assert row[key] == pytest.approx(own[key], rel=2e-4)
    assert rows[0][-1]["nats"] != rows[1][-1]["nats"]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_that_diverges_does_not_affect_the_others(broken: float) -> None:
    members = [trainer(seed) for seed in SEEDS]
    with torch.no_grad():
        members[1].model.get_parameter("blocks.0.mechanism.v.weight")[0, 0] = broken
    population = PopulationTrainer(members)
    ended: list[int] = []
    outcomes = population.run(lambda index, outcome: ended.append(index))
    assert [outcome.status for outcome in outcomes] == ["done", "diverged", "done"]
    assert outcomes[1].diverged_at == 0
    assert ended == [1]
    alone = PopulationTrainer([trainer(1), trainer(5)])
    alone.run()
    for index, member in ((0, alone.members[0]), (2, alone.members[1])):
        for name, parameter in member.model.named_parameters():
            torch.testing.assert_close(
                members[index].model.get_parameter(name), parameter, rtol=1e-4, atol=1e-6
            )


def stopping(step: int) -> Any:
    count = [0]

    def stop() -> bool:
        count[0] += 1
        return count[0] >= step

    return stop


def group(folder: Path, **given: Any) -> PopulationTrainer:
    members = [trainer(seed, folder=folder / str(seed), name=f"run{seed}") for seed in SEEDS]
    return PopulationTrainer(members, **given)


def states(population: PopulationTrainer) -> list[dict[str, Tensor]]:
    return [member.model.state_dict() for member in population.members]


def test_a_resumed_population_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    whole = group(tmp_path / "whole")
    whole.run()
    first = group(tmp_path / "parts", stop=stopping(7))
    assert [outcome.status for outcome in first.run()] == ["stopped"] * 3
    again = group(tmp_path / "parts")
    assert [outcome.step for outcome in again.run()] == [20] * 3
    for one, other in zip(states(whole), states(again), strict=True):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


def test_a_population_saved_at_its_last_step_does_no_further_step(tmp_path: Path) -> None:
    whole = group(tmp_path)
    expected = whole.run()
    whole.save([1])
    assert not (tmp_path / "2").exists()
    whole.save([])
    again = group(tmp_path)
    assert again.run() == expected
    assert [member.seconds for member in again.members] == [member.seconds for member in whole.members]
    for one, other in zip(states(whole), states(again), strict=True):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name
    for flat, other in zip(whole.flats, again.flats, strict=True):
        for key, tensor in whole.optimizer.state[flat].items():
            assert torch.equal(tensor, again.optimizer.state[other][key]), key


def test_a_population_resumes_from_the_newest_common_step(tmp_path: Path) -> None:
    whole = group(tmp_path / "whole")
    whole.run()
    group(tmp_path / "parts", stop=stopping(5)).run()
    group(tmp_path / "parts", stop=stopping(4)).run()
    (newest,) = (tmp_path / "parts" / "2").glob("step-*9")
    for path in newest.iterdir():
        path.unlink()
    again = group(tmp_path / "parts")
    again.resume()
    assert [member.step for member in again.members] == [5] * 3
    again.run()
    for one, other in zip(states(whole), states(again), strict=True):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


def test_a_single_run_can_resume_from_a_populations_checkpoint(tmp_path: Path) -> None:
    group(tmp_path, stop=stopping(5)).run()
    one = trainer(2, folder=tmp_path / "2", name="run2")
    assert one.run().status == "done"
    separate = trainer(2)
    separate.run()
    for name, parameter in separate.model.named_parameters():
        assert (one.model.get_parameter(name) - parameter).norm() <= 2e-3 * parameter.norm() + 1e-5


def test_dropout_is_rejected() -> None:
    size = TINY.with_settings(dropout=0.1)
    assert "dropout" in population_blocker(Decoder(size, parse_layout("standard").layers(2), 1))
    with pytest.raises(UserError, match="dropout"):
        PopulationTrainer([trainer(seed, size=size) for seed in SEEDS])


def test_a_model_that_vmap_cannot_map_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(TINY, parse_layout("standard").layers(2), 1)
    assert population_blocker(model) == ""
    usual = model.layers[0].mechanism.forward

    def reading(x: Tensor, *rest: Any) -> Tensor:
        return usual(x, *rest) if x.sum().item() > -1e9 else x

    monkeypatch.setattr(model.layers[0].mechanism, "forward", reading)
    assert "torch.vmap fails on this model" in population_blocker(model)


class NoHost(TorchDispatchMode):
    """Fails on every read of a device value by the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "the host read a value from the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "arm",
    ["standard", "coupled", "kuramoto", "gated_linear", "(gated_delta selective_state)*1", "fixed_seq_qk"],
)
def test_a_step_does_not_synchronize_with_the_device(arm: str) -> None:
    population = PopulationTrainer([trainer(seed, arm) for seed in SEEDS])
    population.one_step()
    batches = [part for member in population.members for part in member.batches.parts(0, 4)]
    tokens = torch.stack([batch.tokens for batch in batches])
    targets = torch.stack([batch.targets for batch in batches])
    with NoHost():
        population._whole_step(tokens, targets)


def test_a_graph_safe_optimizer_keeps_its_rates_in_tensors() -> None:
    settings = dataclasses.replace(SETTINGS, circuit_lr={"qk": "3x"})
    one = trainer(1, settings=settings)
    plain, graph_safe = (make_optimizer(one.model, settings, kind) for kind in (False, True))
    for step in (0, 7):
        for optimizer in (plain, graph_safe):
            set_rates(optimizer, step, 20)
        for group, other in zip(plain.param_groups, graph_safe.param_groups, strict=True):
            assert isinstance(other["lr"], Tensor)
            assert group["lr"] == pytest.approx(other["lr"].item())
    assert len({group["lr"].data_ptr() for group in graph_safe.param_groups}) == len(graph_safe.param_groups)


@pytest.mark.parametrize(
    "rule",
    [
        "3x",
        "1x..3x",
        "0x..2x",
        [{"tag": "qk", "kind": "hold_return", "factor": 0.25, "hold": 0.2, "back": 0.2}],
    ],
)
def test_a_graph_safe_optimizer_takes_the_same_steps(rule: Any) -> None:
    given = {"qk": rule} if isinstance(rule, str) else rule
    settings = dataclasses.replace(SETTINGS, circuit_lr=given, weight_decay=0.5)
    ends = []
    for graph_safe in (False, True):
        one = trainer(1, settings=settings)
        one.optimizer = make_optimizer(one.model, settings, graph_safe)
        moved = [group for group in one.optimizer.param_groups if "shrink" in group]
        assert bool(moved) == (graph_safe and rule != "3x")
        for _ in range(12):
            one._one_step()
            one.step += 1
        ends.append(torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()]))
    assert torch.linalg.vector_norm(ends[0] - ends[1]) < 1e-5 * torch.linalg.vector_norm(ends[0])
