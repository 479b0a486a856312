"""GPU tests: kernels, populations and CUDA graphs against their plain references. `make test-gpu` runs them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from headtohead.bench import fused
from headtohead.bench import kernels as bench
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.kernels import path_name
from headtohead.kernels.attention.decode import ROPE_MODES, attend_placed, decode, decode_plain
from headtohead.kernels.pointwise.rotary import rotary_table
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.training.cuda_graph import VERIFIED_MECHANISMS
from headtohead.training.population import PopulationTrainer
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer
from tests.compare import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GPU = torch.device("cuda")
SIZE = dataclasses.replace(SIZES["nano"], context=64)
SETTINGS = TrainSettings(tokens=1024 * 12, batch=1024, lr=2e-3)
TEXT = (np.random.default_rng(0).integers(0, 255, 60_000) // 7 * 3).astype(np.uint8)
SPLIT = Split(TEXT, np.array([0], dtype=np.uint64), len(TEXT))
SEEDS = (1, 2, 5)
FIRST = 5
"""Number of compared steps; a graph is captured at the fourth."""


def trainer(seed: int, arm: str = "standard", **given: Any) -> Trainer:
    layers = parse_layout(arm).layers(SIZE.layers)
    size = SIZE.with_settings(init_std=0.08, tied="kuramoto_gated" not in arm)
    model = Decoder(size, layers, seed, companion=TEXT).to(GPU)
    return Trainer(model, Windows(SPLIT, SIZE.context, seed), SETTINGS, **given)


def curve(one: Trainer) -> torch.Tensor:
    """Return nats and gradient norm of the first steps (steps, 2)."""
    one.model.train()
    rows = []
    for _ in range(FIRST):
        rows.append(torch.stack(one._one_step()).clone())
        one.step += 1
    return torch.stack(rows)


def test_the_kernels_run_on_this_device() -> None:
    assert path_name(GPU) == "triton"


@pytest.mark.parametrize("dtype", ["bf16", "float32"])
@pytest.mark.parametrize(
    "case", range(len(fused.odd_cases(gpu=True))), ids=lambda i: fused.odd_cases(True)[i].name
)
def test_a_kernel_equals_its_plain_reference(case: int, dtype: str) -> None:
    one = fused.odd_cases(gpu=True)[case]
    row = bench._errors(one, dtype, GPU)
    assert row["within"], row
    if not one.name.startswith("loss"):
        row = bench._stacked_errors(one, dtype, GPU)
        assert row["within"], row


@pytest.mark.parametrize("turn", ROPE_MODES)
@pytest.mark.parametrize("shape", [(2, 4, 4, 129, 32), (1, 6, 2, 300, 64), (2, 2, 1, 3, 128)])
def test_decoding_equals_its_plain_reference(shape: tuple[int, ...], turn: str) -> None:
    batch, heads, kv_heads, keys, dim = shape
    draw = torch.Generator(GPU).manual_seed(0)
    q, kv = (
        torch.randn(*part, device=GPU, generator=draw)
        for part in ((batch, heads, 1, dim), (batch, kv_heads, keys, dim))
    )
    table = rotary_table(torch.arange(keys, device=GPU), dim, 10_000.0, torch.float64)
    wanted = decode_plain(q.double(), kv.double(), table, turn, dim**-0.5)
    found = decode(q, kv, table.float(), turn, dim**-0.5)
    assert_close({"output": found}, {"output": wanted}, 2e-3, by="norm")
    last = torch.tensor([keys - 1], device=GPU)
    placed = attend_placed(q, kv, kv, last)
    plain = decode_plain(q.double(), kv.double(), None, "nothing", dim**-0.5)
    assert_close({"output": placed}, {"output": plain}, 2e-3, by="norm")


@pytest.mark.parametrize("arm", ["standard", "coupled", "sharing:tie=kv", "kuramoto", "gated_linear"])
def test_a_population_takes_the_steps_of_its_members(arm: str) -> None:
    stack = PopulationTrainer([trainer(seed, arm) for seed in SEEDS])
    rows = []
    for _ in range(FIRST):  # later, rounding errors grow and the runs diverge
        rows.append(torch.stack(stack.one_step(), -1).clone())
        for member in stack.members:
            member.step += 1
    together, alone = torch.stack(rows, 1), torch.stack([curve(trainer(seed, arm)) for seed in SEEDS])
    names = ("nats", "gradient norm")
    for place, name in enumerate(names):
        assert_close({name: together[..., place]}, {name: alone[..., place]}, 5e-3)


@pytest.mark.parametrize("arm", sorted(VERIFIED_MECHANISMS))
def test_a_step_captured_as_a_graph_is_the_step(arm: str) -> None:
    plain, captured = curve(trainer(1, arm)), curve(trainer(1, arm, record=True))
    for place, name in enumerate(("nats", "gradient norm")):
        assert_close({name: captured[..., place]}, {name: plain[..., place]}, 5e-3)
