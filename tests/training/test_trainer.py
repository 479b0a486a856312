from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headtohead.common.errors import UserError
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.training.optimizer import make_optimizer
from headtohead.training.settings import TrainSettings, train_settings
from headtohead.training.trainer import Hooks, Trainer

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=16, vocabulary=64)
SETTINGS = TrainSettings(tokens=64 * 30, batch=64, lr=1e-2)
QUIET = Hooks()


def windows(seed: int = 1) -> Windows:
    tokens = (np.arange(3000) * 7 % 61).astype(np.uint8)
    return Windows(Split(tokens, np.array([0], dtype=np.uint64), len(tokens)), 16, seed)


def trainer(
    folder: Path | None = None, hooks: Hooks = QUIET, given: TrainSettings = SETTINGS, **model: Any
) -> Trainer:
    decoder = Decoder(
        TINY.with_settings(init_std=0.2, **model), parse_layout("sharing:tie=kv").layers(2), seed=1
    )
    torch.manual_seed(1)
    return Trainer(decoder, windows(), given, folder=folder, hooks=hooks, save_every=1e9)


def weights(one: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.model.state_dict().items()}


def stop_at(step: int) -> Callable[[], bool]:
    count = [0]

    def stop() -> bool:
        count[0] += 1
        return count[0] >= step

    return stop


def test_it_learns() -> None:
    rows: list[dict[str, Any]] = []
    given = dataclasses.replace(SETTINGS, tokens=64 * 120)
    outcome = trainer(hooks=Hooks(log=rows.append), given=given).run()
    assert outcome.status == "done"
    assert outcome.step == 120
    assert rows[0]["nats"] > 3.5
    assert rows[-1]["nats"] < 1.0
    assert [row["step"] for row in rows] == list(range(1, 121))
    assert rows[-1]["tokens"] == 64 * 120


@given(cuts=st.lists(st.integers(1, 29), min_size=1, max_size=4, unique=True))
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    rows: list[dict[str, Any]] = []
    whole = trainer(hooks=Hooks(log=rows.append), dropout=0.1)
    expected = whole.run()
    pieces: list[dict[str, Any]] = []
    before = 0
    for cut in sorted(cuts):
        part = trainer(folder, Hooks(log=pieces.append, stop=stop_at(cut - before)), dropout=0.1)
        assert part.run().status == "stopped"
        before = cut
    torch.manual_seed(999)
    last = trainer(folder, Hooks(log=pieces.append), dropout=0.1)
    outcome = last.run()
    assert outcome == expected
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, last.model.state_dict()[name]), name
    strip = lambda found: [{key: value for key, value in row.items() if key != "seconds"} for row in found]  # noqa: E731
    assert strip(pieces) == strip(rows)


def test_a_run_saved_at_its_last_step_does_no_further_step(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    expected = whole.run()
    whole.save()
    rows: list[dict[str, Any]] = []
    again = trainer(tmp_path, Hooks(log=rows.append))
    assert again.run() == expected
    assert (rows, again.seconds) == ([], whole.seconds)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_a_checkpoint_beyond_the_last_step_is_rejected(tmp_path: Path) -> None:
    trainer(tmp_path, Hooks(stop=stop_at(10))).run()
    warnings: list[str] = []
    shorter = dataclasses.replace(SETTINGS, tokens=64 * 9)
    assert trainer(tmp_path, Hooks(warn=warnings.append), given=shorter).run().step == 9
    assert "it is of step 10, the run has 9" in warnings[0]


def test_an_interrupted_evaluation_is_repeated_on_resume(tmp_path: Path) -> None:
    given = dataclasses.replace(SETTINGS, evaluations=3)

    def evaluate() -> dict[str, Any]:
        if len(broken) < 2:
            broken.append(1)
            raise KeyboardInterrupt
        return {"valid": {"nats": 1.0}}

    broken: list[int] = []
    rows: list[dict[str, Any]] = []
    for _ in range(2):
        one = trainer(tmp_path, Hooks(log=rows.append, evaluate=evaluate), given=given)
        with pytest.raises(KeyboardInterrupt):
            one.run()
        one.save()
    trainer(tmp_path, Hooks(log=rows.append, evaluate=evaluate), given=given).run()
    assert [row["step"] for row in rows if "valid" in row] == [10, 20]
    assert [row["step"] for row in rows if "valid" not in row] == list(range(1, 31))


@pytest.mark.parametrize("arm", ["fixed_seq_qk", "even(rnd_emb_qk)"])
def test_a_companion_is_restored_from_the_checkpoint_and_its_gradients_accumulate(
    arm: str, tmp_path: Path
) -> None:
    def accompanied(seed: int, text: list[int], folder: Path | None, hooks: Hooks = QUIET) -> Trainer:
        layers = parse_layout(arm).layers(2)
        decoder = Decoder(TINY.with_settings(init_std=0.2), layers, seed, companion=text)
        return Trainer(decoder, windows(), SETTINGS, folder=folder, hooks=hooks, save_every=1e9)

    text = [(5 * i) % 61 for i in range(16)]
    whole = accompanied(1, text, None)
    expected = whole.run()
    assert accompanied(1, text, tmp_path, Hooks(stop=stop_at(11))).run().status == "stopped"
    resumed = accompanied(2, text[::-1], tmp_path)
    assert resumed.run() == expected
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    one, two = accompanied(1, text, None), accompanied(1, text, None)
    two.micro = 1
    assert torch.allclose(one._one_step()[1], two._one_step()[1], rtol=1e-4)


def test_micro_batches_accumulate_to_the_same_gradient() -> None:
    one, two = trainer(), trainer()
    two.micro = 1
    nats_one, norm_one = one._one_step()
    nats_two, norm_two = two._one_step()
    assert torch.allclose(nats_one, nats_two, rtol=1e-5)
    assert torch.allclose(norm_one, norm_two, rtol=1e-4)


def test_out_of_memory_halves_the_micro_batch_and_training_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    one = trainer(hooks=Hooks(warn=messages.append))
    usual = one._backward

    def scarce(*batch: torch.Tensor) -> torch.Tensor:
        if one.micro > 1:
            raise torch.OutOfMemoryError("out of memory")
        return usual(*batch)

    monkeypatch.setattr(one, "_backward", scarce)
    assert one.run().status == "done"
    assert one.micro == 1
    assert "tokens per step unchanged" in messages[0]


@pytest.mark.parametrize("kind", ["nan", "lost"])
def test_divergence_is_an_outcome_with_its_step(kind: str) -> None:
    rows: list[dict[str, Any]] = []
    one = trainer(hooks=Hooks(log=rows.append))
    usual = one._one_step

    def diverging() -> tuple[torch.Tensor, torch.Tensor]:
        nats, norm = usual()
        return (torch.tensor(math.nan if kind == "nan" else 50.0), norm) if one.step >= 12 else (nats, norm)

    one._one_step = diverging  # type: ignore[method-assign]
    outcome = one.run()
    assert outcome.status == "diverged"
    assert outcome.diverged_at == 12


def test_a_far_too_high_learning_rate_diverges_or_ends_without_an_error() -> None:
    outcome = trainer(given=dataclasses.replace(SETTINGS, lr=1e4, clip=0.0)).run()
    assert outcome.status in ("diverged", "done")


def test_evaluations_during_training_are_spread_evenly() -> None:
    rows: list[dict[str, Any]] = []
    given = dataclasses.replace(SETTINGS, evaluations=3)
    trainer(hooks=Hooks(log=rows.append, evaluate=lambda: {"valid": {"nats": 1.0}}), given=given).run()
    assert [row["step"] for row in rows if "valid" in row] == [10, 20]


def test_groups_follow_circuits_and_only_matrices_are_decayed() -> None:
    decoder = Decoder(TINY, parse_layout("standard:qk_norm=true").layers(2), seed=1)
    groups = {
        (group["tag"], group["weight_decay"]): len(group["params"])
        for group in make_optimizer(decoder, SETTINGS).param_groups
    }
    assert groups == {
        ("embedding", 0.1): 1,
        ("qk", 0.1): 4,
        ("qk", 0.0): 4,
        ("ov", 0.1): 4,
        ("norm", 0.0): 5,
        ("ffn", 0.1): 6,
    }


def test_bf16_trains_close_to_float32() -> None:
    plain, coarse = trainer(), trainer(given=dataclasses.replace(SETTINGS, precision="bf16"))
    assert coarse.run().train_nats == pytest.approx(plain.run().train_nats, abs=0.25)
    assert all(parameter.dtype == torch.float32 for parameter in coarse.model.parameters())


def test_smoothing_changes_the_objective_not_the_reported_loss() -> None:
    smooth = trainer(given=dataclasses.replace(SETTINGS, smoothing=0.2))
    sharp = trainer()
    batch = list(sharp.batches.parts(0, 4))
    assert torch.allclose(smooth._backward(batch), sharp._backward(batch), rtol=1e-6)
    grads = [next(one.model.parameters()).grad for one in (smooth, sharp)]
    assert not torch.allclose(*grads)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": 0}, "too small"),
        ({"tokens": "-5"}, "whole number|count"),
        ({"lr": -1.0}, "lr=-1 trains nothing"),
        ({"lr": "fast"}, "takes a number"),
        ({"warmup": 1.5}, "between 0 and 1"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "fp8"}, "float32"),
        ({"schedule": "wsd", "warmup": 0.5, "decay_share": 0.6}, "add up to more than 1"),
        ({"leraning_rate": 1}, "unknown training setting"),
        ({"smoothing": 1.0}, "between"),
    ],
)
def test_bad_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_settings(values)


def test_batch_must_be_a_multiple_of_the_context_and_fit_in_the_tokens() -> None:
    with pytest.raises(UserError, match="not a multiple of the context"):
        TrainSettings(batch=100).steps(16)
    with pytest.raises(UserError, match="do not fill one step"):
        TrainSettings(tokens=50, batch=64).steps(16)
