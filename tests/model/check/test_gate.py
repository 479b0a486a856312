"""The causality gate finds every cheat, names it, and raises no false alarm."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from msgspec import convert
from torch import nn

import headtohead as h2h
from headtohead.mechanisms.contract.terms import Composed, class_term
from headtohead.model.check.gate import GateResult, Trial, check_causality
from headtohead.model.classifier import Reader
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

ARMS = Path(__file__).parents[2] / "mechanisms" / "user_arms.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "prefix_mean.py"
SIZE = dataclasses.replace(SIZES["nano"], width=16, layers=2, heads=2, ffn=24, vocabulary=32, context=72)
FUTURE, NEIGHBORS, STATE = "it sees the future", "batch neighbors", "keeps state between calls"
BOTH, TRAINING, EVALUATION = "training and evaluation mode", "in training mode", "in evaluation mode"

CHEATS = {
    "Peek": (FUTURE, BOTH),
    "PeekBeyond64": (FUTURE, BOTH),
    "PeekFar": (FUTURE, BOTH),
    "PeekInTraining": (FUTURE, TRAINING),
    "PeekInEvaluation": (FUTURE, EVALUATION),
    "PeekInLargeBatches": (FUTURE, BOTH),
    "PeekInPairs": (FUTURE, BOTH),
    "PeekAtTheEndsOfChunks": (FUTURE, EVALUATION),
    "PeekBehindAGate": (FUTURE, BOTH),
    "PeekBehindARectifier": (FUTURE, BOTH),
    "PeekBehindARectifierDown": (FUTURE, BOTH),
    "PeekDetached": (FUTURE, BOTH),
    "PeekInTheNoise": (FUTURE, TRAINING),
    "NormedOverTime": (FUTURE, BOTH),
    "BatchNormed": (NEIGHBORS, TRAINING),
    "AcrossTheBatch": (NEIGHBORS, BOTH),
    "Keeps": (STATE, BOTH),
    "KeepsASum": (STATE, BOTH),
    "NotFinite": ("outputs are not finite in float32 at the initial values", BOTH),
}
HONEST = ["Copy", "Fused", "Masked", "Windowed", "Dropped", "AddsLoss", "Narrow", "GlobalShift"]


def model(arm: str, seed: int = 1) -> Decoder:
    return Decoder(SIZE, parse_layout(arm).layers(2), seed)


def trial(sequences: int = 18, precision: str = "float32", time: int = 72) -> Trial:
    generator = torch.Generator().manual_seed(3)
    train, score = torch.randint(0, 32, (2, sequences, time), generator=generator)
    return Trial(train, score, precision)


def inspected(arm: str, **settings: object) -> GateResult:
    return check_causality(model(arm), trial(**settings), shake=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_found_and_named(name: str) -> None:
    words, mode = CHEATS[name]
    found = [line for line in inspected(f"{ARMS}:{name}").failed if words in line]
    assert len(found) == 1
    assert found[0].endswith(mode if mode == BOTH else f", {mode}")


def test_state_outside_the_model_is_found() -> None:
    # It counts as state or as randomness, depending on whether it settles; neither passes.
    words = " ".join(inspected(f"{ARMS}:KeepsOutside").failed)
    assert STATE in words or "too much to detect a leak" in words


@pytest.mark.parametrize("arm", [*(f"{ARMS}:{name}" for name in HONEST), f"{EXAMPLE}:PrefixMean"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_an_honest_arm_passes_without_findings(arm: str, precision: str) -> None:
    assert inspected(arm, precision=precision) == GateResult()


def test_a_convolution_by_fourier_transform_is_no_leak() -> None:
    found = inspected(f"{ARMS}:Fourier")
    assert found.failed == found.marks == ()
    assert found.warnings[0] == (
        "the gradient of blocks.0.mechanism.k.weight is zero everywhere; is its path detached?"
    )


class Recurrent(nn.Module):
    """An existing causal module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Backwards(Recurrent):
    """The same, from the end of the text."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x.flip(1))[0].flip(1)


@pytest.mark.parametrize(("kind", "count"), [(Recurrent, 0), (Backwards, 1)])
def test_wrapped_modules_are_checked_too(kind: type[Recurrent], count: int) -> None:
    composed = Composed((class_term(h2h.wrap(lambda shape: kind(shape.width), name="gru")),))
    found = check_causality(Decoder(SIZE, [composed] * 2, 1), trial(), shake=True)
    assert len(found.failed) == count
    assert all(FUTURE in words for words in found.failed)


def test_a_leak_in_one_layer_of_several_is_found() -> None:
    assert FUTURE in inspected(f"standard {ARMS}:Peek").failed[0]


@pytest.mark.parametrize("sequences", [2, 3])
def test_few_sequences_are_cut_at_many_positions(sequences: int) -> None:
    assert FUTURE in inspected(f"{ARMS}:PeekInPairs", sequences=sequences).failed[0]


def test_small_randomness_is_a_mark_and_an_unused_parameter_a_warning() -> None:
    rolls, idle = inspected(f"{ARMS}:Rolls"), inspected(f"{ARMS}:Idle")
    assert rolls.failed == idle.failed == ()
    assert "another output the second time" in rolls.marks[0]
    assert [words.split()[3] for words in idle.warnings] == [
        "blocks.0.mechanism.unused",
        "blocks.1.mechanism.unused",
    ]


def test_a_leak_in_the_trained_weights_alone_is_found_in_them() -> None:
    trained = model(f"{ARMS}:PeekBehindAGate")
    assert check_causality(trained, trial(), shake=False) == GateResult()
    with torch.no_grad():
        trained.layers[0].mechanism.gate.fill_(0.5)  # type: ignore[union-attr]
    assert FUTURE in check_causality(trained, trial(), shake=False).failed[0]


def test_padding_matters_only_where_the_data_are_padded() -> None:
    def reader(arm: str) -> Reader:
        return Reader(SIZE, parse_layout(arm).layers(2), 1, causal=False)

    plain = dataclasses.replace(trial(), causal=False)
    padded = dataclasses.replace(plain, padded=True)
    ignorant = f"{ARMS}:IgnoresPadding"
    assert check_causality(reader(ignorant), plain, shake=True).failed == ()
    assert (
        "right padding changes the outputs" in check_causality(reader(ignorant), padded, shake=True).failed[0]
    )
    assert check_causality(reader("standard"), padded, shake=True).failed == ()


def test_a_bidirectional_model_may_see_the_future() -> None:
    both = Reader(SIZE, parse_layout("standard").layers(2), 1, causal=False)
    assert check_causality(both, dataclasses.replace(trial(), causal=False), shake=True) == GateResult()


def test_the_check_does_not_change_generators_or_initial_values() -> None:
    checked = model(f"{ARMS}:Dropped")
    before = torch.get_rng_state()
    weights = {name: tensor.clone() for name, tensor in checked.state_dict().items()}
    check_causality(checked, trial(), shake=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weights[name], tensor) for name, tensor in checked.state_dict().items())


def test_a_result_survives_a_round_trip() -> None:
    found = GateResult(("leak",), ("mark",), ("warning",))
    assert convert(found.as_dict(), GateResult) == found
