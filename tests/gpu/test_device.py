"""GPU tests: kernels, populations and CUDA graphs against their plain references. `make test-gpu` runs them."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from headtohead.bench import fused
from headtohead.bench import kernels as bench
from headtohead.bench.clock import seconds_of
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.kernels import path_name, scored_attend, sink_attend
from headtohead.kernels.attention import sink
from headtohead.kernels.attention.decode import ROPE_MODES, attend_placed, decode, decode_plain
from headtohead.kernels.attention.recurrence import gated_scan, gated_scan_plain
from headtohead.kernels.attention.softmax import per_query_head, view_mask
from headtohead.kernels.pointwise.rotary import rotary_table
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.mechanisms.contract.score import bind
from headtohead.model.decoder import Decoder
from headtohead.model.decoding import Decoding
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.papers.faster_qk.runs import ToyRun
from headtohead.papers.faster_qk.train import train as train_toy
from headtohead.training.population import PopulationTrainer
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Hooks, Runs, Trainer
from tests.compare import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GPU = torch.device("cuda")
SIZE = dataclasses.replace(SIZES["nano"], context=64)
SETTINGS = TrainSettings(tokens=1024 * 40, batch=1024, lr=2e-3)
TEXT = (np.random.default_rng(0).integers(0, 255, 60_000) // 7 * 3).astype(np.uint8)
SPLIT = Split(TEXT, np.array([0], dtype=np.uint64), len(TEXT))
SEEDS = (1, 2, 5)


def trainer(seed: int, arm: str = "standard", settings: TrainSettings = SETTINGS, **given: Any) -> Trainer:
    layers = parse_layout(arm).layers(SIZE.layers)
    positions = "learned" if "factorised" in arm else "rope"
    size = SIZE.with_settings(init_std=0.08, tied="kuramoto_gated" not in arm, positions=positions)
    model = Decoder(size, layers, seed, companion=TEXT).to(GPU)
    return Trainer(model, Windows(SPLIT, SIZE.context, seed), settings, **given)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bf16"))
@pytest.mark.parametrize("widths", [(8, 16), (16, 32), (32, 64), (64, 64), (5, 7)], ids=str)
@pytest.mark.parametrize("kind", ["channel", "head", "channel delta", "head delta"])
def test_recurrences_equal_their_plain_reference(
    kind: str, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    keys, values, time = *widths, 150
    draw = torch.Generator(GPU).manual_seed(0)
    channels = 1 if "head" in kind else keys
    shapes = ((time, keys), (time, keys), (time, values), (time, channels), (keys, values), (time, 1))
    q, k, v, log_decay, state, beta = (
        torch.randn(2, 3, *shape, device=GPU, generator=draw) for shape in shapes
    )
    k = k / k.norm(dim=-1, keepdim=True)
    given = [x.to(dtype) for x in (q, k, v)] + [-0.2 * log_decay.abs(), state]
    given += [beta.sigmoid()] if "delta" in kind else []
    names = ("output", "end", "q", "k", "v", "log_decay", "state", "beta")

    def outputs(function: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        own = [x.detach().to(dtype or x.dtype).requires_grad_() for x in given]
        found, end = function(*own)
        weights = torch.linspace(-1, 1, found.numel(), device=GPU).view(found.shape)
        grads = torch.autograd.grad((found * weights).sum() + end.square().sum(), own)
        return dict(zip(names, (found, end, *grads), strict=False))

    wanted = outputs(gated_scan_plain, torch.float64)
    assert_close(outputs(gated_scan, None), wanted, 1e-4 if dtype == torch.float32 else 1e-2, by="norm")


ARMS = (
    *builtin_mechanisms(),
    *("coupled:dynamics=leapfrog,force=potential,steps=2", "sharing:tie=kv", "standard:window=16"),
    *("(standard coupled)*1", "first(kuramoto)", "last(gated_linear)", "(gated_delta selective_state)*1"),
    *("flex:alibi", "flex:relative", "flex:sigmoid", "(flex:sliding=16 flex:softcap)*1"),
)
STEPS = 20
"""Number of compared steps; a graph is captured at the fourth."""
FIRST_STEP, LAST_STEP = 1e-3, 3e-2
"""Allowed relative error of the loss and of gradients at the first step, and of the loss at the last."""


def curves(runs: Runs) -> torch.Tensor:
    """Return nats and gradient norm of every run at every step (runs, steps, 2)."""
    rows = []
    for member in runs.members:
        member.model.train()
    for _ in range(STEPS):
        rows.append(torch.stack([torch.stack(list(part)) for part in runs.one_step()], -1).clone())
        for member in runs.members:
            member.step += 1
    return torch.stack(rows, 1)


def assert_same_steps(found: torch.Tensor, wanted: torch.Tensor) -> None:
    for place, name in enumerate(("nats", "gradient norm")):
        assert_close({name: found[:, 0, place]}, {name: wanted[:, 0, place]}, FIRST_STEP)
    assert_close({"nats": found[..., 0]}, {"nats": wanted[..., 0]}, LAST_STEP)


@pytest.mark.parametrize("record", [False, True], ids=("eager", "graph"))
@pytest.mark.parametrize("arm", ARMS)
def test_rows_take_the_steps_of_separate_runs(arm: str, record: bool) -> None:
    rates = (2e-3, 2e-3, 5e-4)
    rows = [
        {"seed": seed, "settings": dataclasses.replace(SETTINGS, lr=lr)}
        for seed, lr in zip(SEEDS, rates, strict=True)
    ]
    warnings: list[str] = []
    members = [trainer(arm=arm, hooks=Hooks(warn=warnings.append), **row) for row in rows]
    found = curves(PopulationTrainer(members, record=record))
    assert not warnings
    assert_same_steps(found, torch.cat([curves(trainer(arm=arm, **row)) for row in rows]))


@pytest.mark.parametrize("arm", ARMS)
def test_the_gradients_of_rows_are_those_of_separate_runs(arm: str) -> None:
    population = PopulationTrainer([trainer(seed, arm) for seed in SEEDS])
    kept: list[torch.Tensor] = []

    def keep(grads: list[torch.Tensor]) -> torch.Tensor:
        kept[:] = [grad.clone() for grad in grads]
        return grads[0].new_zeros(len(SEEDS))

    population._clip = keep  # type: ignore[method-assign]
    for member in population.members:
        member.model.train()
    population.one_step()
    for row, seed in enumerate(SEEDS):
        alone = trainer(seed, arm)
        alone.model.train()
        alone._backward(alone.batches.parts(0, alone.micro))
        for slots, grads in zip(population.slots, kept, strict=True):
            found = {slot.name: slot.of(grads[row]) for slot in slots}
            wanted = {name: alone.model.get_parameter(name).grad for name in found}
            largest = max(float(grad.norm()) for grad in wanted.values())
            for name, grad in wanted.items():
                assert (found[name] - grad).norm() <= FIRST_STEP * (grad.norm() + 0.01 * largest), name


@pytest.mark.parametrize("arm", ARMS)
def test_a_step_captured_as_a_graph_is_the_step(arm: str) -> None:
    warnings: list[str] = []
    found = curves(trainer(1, arm, record=True, hooks=Hooks(warn=warnings.append)))
    assert not warnings
    assert_same_steps(found, curves(trainer(1, arm)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bf16"))
@pytest.mark.parametrize(
    "arm", ["alibi", "softcap=2", "sandwich=8", "sliding=20", "dilated=3", "prefix=20,window=30"]
)
def test_flex_attention_equals_the_dense_path(arm: str, dtype: torch.dtype) -> None:
    change = bind(parse_layout(f"flex:{arm}").pattern[0].base.options, 4, 200)
    draw = torch.Generator(GPU).manual_seed(0)
    heads = (4, 2, 2, 4)
    q, k, v, weights = (torch.randn(2, count, 200, 16, device=GPU, generator=draw) for count in heads)
    place = torch.arange(200, device=GPU)

    def outputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        given = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        output = scored_attend(given[0], given[1], given[2], change, place, place)
        grads = torch.autograd.grad((output * weights).sum(), given)
        return dict(zip(("output", "q", "k", "v"), (output, *grads), strict=True))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FlexAttention cannot run")  # it would be dense
        found = outputs(dtype)
    assert_close(found, outputs(torch.float64), 2e-2 if dtype == torch.bfloat16 else 2e-3, by="norm")


def sink_results(
    attends: Any, time: int, dim: int, dtype: torch.dtype, kv_heads: int = 2
) -> dict[str, torch.Tensor]:
    """Return output and gradients; q, k and v are views of one tensor, as after one projection."""
    draw, sizes = torch.Generator(GPU).manual_seed(0), (4 * dim, kv_heads * dim, kv_heads * dim)
    joined = torch.randn(2, time, sum(sizes), device=GPU, generator=draw).to(dtype)
    weights = torch.randn(2, 4, time, dim, device=GPU, generator=draw)
    given = [part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in joined.split(sizes, -1)]
    given = [tensor.requires_grad_() for tensor in given]
    bias = torch.tensor([0.5, -1.0, 2.0, 0.0], device=GPU)
    score = bias.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    output = attends(*given, score, dim**-0.5)
    grads = torch.autograd.grad((output * weights).sum(), [*given, score])
    return dict(zip(("output", "q", "k", "v", "bias"), (output, *grads), strict=True))


def sink_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    mask = view_mask(q.shape[-2], k.shape[-2], q.device, True)
    return sink.sink_weights(q, k, mask, bias, scale) @ per_query_head(v, q)


@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        ("cudnn_attention", torch.bfloat16, 2e-2),
        ("flash_attention", torch.bfloat16, 2e-2),
        ("efficient_attention", torch.bfloat16, 2e-2),
        ("efficient_attention", torch.float32, 2e-3),
    ],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dim", [16, 20, 64])
@pytest.mark.parametrize("time", [64, 200])
def test_attention_with_a_sink_equals_its_plain_reference(
    time: int, dim: int, kv_heads: int, kernel: str, dtype: torch.dtype, tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    wanted = sink_results(sink_plain, time, dim, torch.float64, kv_heads)
    monkeypatch.setattr(sink, "backend_name", lambda *given: kernel)
    found = sink_results(sink_attend, time, dim, dtype, kv_heads)
    assert_close(found, wanted, tolerance, by="norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bf16"))
def test_a_compiled_sink_is_the_sink(dtype: torch.dtype) -> None:
    compiled = torch.compile(sink_attend, fullgraph=True)
    found = sink_results(compiled, 200, 64, dtype)
    assert_close(found, sink_results(sink_attend, 200, 64, dtype), 2e-3, by="norm")


def test_a_toy_window_captured_as_a_graph_is_that_of_the_cpu() -> None:
    runs = [
        ToyRun("a", "CACO", seed, adam=rate, epochs=2, batches=50, length=16)
        for seed, rate in ((1, 1e-3), (2, 3e-3))
    ]
    for found, wanted in zip(train_toy(runs, GPU), train_toy(runs), strict=True):
        assert found.marks["end"].loss == pytest.approx(wanted.marks["end"].loss, rel=1e-3)


def test_the_seconds_of_a_call_grow_with_its_work() -> None:
    small, large = (torch.randn(count, device=GPU) for count in (2**20, 2**27))
    # 128 times the bytes; far more than launches or caches could hide
    assert seconds_of(lambda: large * 2, GPU) > 10 * seconds_of(lambda: small * 2, GPU)


@pytest.mark.parametrize(
    "arm",
    [
        *("standard:window=16", "(standard:window=16 standard)*1", "canon", "gated_linear"),
        *("gated_delta", "gated_delta:decay=channel", "(selective_state standard)*1"),
    ],
)
def test_buffers_and_states_under_a_graph_equal_decoding_without_a_cache(arm: str) -> None:
    model = Decoder(SIZE.with_settings(init_std=0.3), parse_layout(arm).layers(SIZE.layers), 1).to(GPU).eval()
    text = torch.randint(0, 256, (2, 40), device=GPU, generator=torch.Generator(GPU).manual_seed(1))
    with torch.inference_mode():
        caches = model.new_caches(2, 100)
        model.logits(text, caches=caches)
        step = Decoding(model, caches)
        for _ in range(60):
            token = text[:, -1:].flip(0)
            text = torch.cat((text, token), 1)
            found, wanted = step(token), model.logits(text)[:, -1]
            assert float((found - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())
    assert step._graph is not None
