"""The torus as a residual space: whole models of Kuramoto layers, alone and in hybrids."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headtohead.common.errors import UserError
from headtohead.kernels import plain
from headtohead.mechanisms.families.groups import Quaternions, TorusOptions
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from headtohead.model.spaces import Torus
from headtohead.study.plan.budgets import match_params
from tests.model.paths import agreed_gradients

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=16, vocabulary=32)
ARMS = [
    "kuramoto:ffn_start=small",
    "kuramoto_gated",
    "kuramoto:readout=tied,ffn=tanh_bounded,ffn_start=small",
    "kuramoto:group=s3,ffn_start=small",
    "kuramoto:group=so3,readout=tied,ffn=gelu,ffn_start=small",
    "kuramoto:group=son,order=2,ffn_start=small",
    "kuramoto:group=sphere,ffn=none",
    "kuramoto:heads=full,mask=strict_null,ffn_start=small",
]
HYBRIDS = [
    "kuramoto:ffn_start=small standard",
    "standard kuramoto_gated",
    "kuramoto:ffn_start=small kuramoto:group=s3,ffn_start=small",
]


def model(arm: str, layers: int = 2, seed: int = 1, **settings: object) -> Decoder:
    size = dataclasses.replace(TINY, layers=layers).with_settings(**settings)
    return Decoder(size, parse_layout(arm).layers(layers), seed)


def tokens(batch: int = 2, time: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, 32, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("arm", [*ARMS, *HYBRIDS])
def test_no_logit_sees_the_future_and_left_padding_is_invisible(arm: str) -> None:
    decoder, text = model(arm, tied=False).double(), tokens()
    changed = text.clone()
    changed[:, 7:] = (changed[:, 7:] + 5) % 32
    logits = decoder.logits(text)
    assert torch.equal(logits[:, :7], decoder.logits(changed)[:, :7])
    real = torch.ones(2, 15, dtype=torch.bool)
    real[:, :3] = False
    padded = torch.cat((torch.full((2, 3), 9), text), 1)
    assert torch.allclose(decoder.logits(padded, padding=real)[:, 3:], logits, atol=1e-12)


@pytest.mark.parametrize("arm", [*ARMS, *HYBRIDS])
def test_decoding_from_the_cache_is_the_full_forward(arm: str) -> None:
    decoder, text = model(arm, tied=False).double(), tokens()
    caches = decoder.new_caches(2, 12)
    parts = torch.cat([decoder.logits(text[:, i : i + 3], caches=caches) for i in range(0, 12, 3)], 1)
    assert torch.allclose(parts, decoder.logits(text), atol=1e-12)
    assert caches.bytes == decoder.cache_bytes(2, 12, torch.float64)


@pytest.mark.parametrize("arm", [*ARMS, *HYBRIDS])
def test_the_fast_path_is_the_plain_path_and_every_parameter_learns(arm: str) -> None:
    decoder, text = model(arm, tied=False).double(), tokens()
    for name, grad in agreed_gradients(decoder, text, atol=1e-13).items():
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize("arm", [*ARMS[:4], *HYBRIDS[:2]])
def test_whole_model_flops_are_the_counted_ones(arm: str) -> None:
    size = TINY.with_settings(tied=False)
    decoder = Decoder.on_meta(size, parse_layout(arm).layers(2))
    with plain(), FlopCounterMode(display=False) as counter:
        decoder.logits(torch.zeros(1, 16, dtype=torch.long, device="meta"))
    assert counter.get_total_flops() / 16 == decoder.flops(16).full


def states(decoder: Decoder) -> list[torch.dtype]:
    """Return the dtypes of the states after each block."""
    seen: list[torch.dtype] = []
    hooks = [
        block.register_forward_hook(lambda *args: seen.append(args[2].dtype)) for block in decoder.layers
    ]
    with torch.no_grad():
        decoder.logits(tokens())
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("arm", ["kuramoto:ffn_start=small", "kuramoto_gated", "standard kuramoto:group=s3"])
def test_phases_stay_in_float32_at_least(arm: str) -> None:
    decoder = model(arm, tied=False)
    with torch.autocast("cpu", torch.bfloat16):
        last = states(decoder)[-1]
        objective = decoder(tokens(), tokens())[0]
    assert last == torch.float32
    objective.backward()
    exact = decoder(tokens(), tokens())[0]
    assert abs(objective.item() - exact.item()) < 0.02
    if arm.startswith("kuramoto"):
        assert states(decoder.bfloat16()) == [torch.float32] * 2
        assert states(decoder.double()) == [torch.float64] * 2


@pytest.mark.parametrize("arm", ["kuramoto", pytest.param("kuramoto_gated", marks=pytest.mark.slow)])
def test_the_compiled_forward_is_one_graph(arm: str) -> None:
    decoder = model(arm)
    decoder.hidden(tokens())  # the rotary table is computed outside the graph
    torch._dynamo.reset()
    compiled = torch.compile(decoder.hidden, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(tokens()), decoder.hidden(tokens()), atol=1e-5)


def test_logits_are_those_of_the_equations() -> None:
    decoder = model("kuramoto:coupling=off,ffn=none").double()
    phase = decoder.embedding.weight[tokens()]
    pairs = torch.stack((phase.cos(), phase.sin()), -1).flatten(-2)
    assert torch.allclose(decoder.logits(tokens()), pairs @ decoder.head.weight.T + decoder.head.bias)
    tied = model("kuramoto:coupling=off,ffn=none,readout=tied").double()
    with torch.no_grad():
        tied.head.gain.normal_()
        tied.head.bias.normal_()
    phase, table = tied.embedding.weight[tokens()], tied.embedding.weight
    scores = (tied.head.gain * torch.cos(phase.unsqueeze(-2) - table)).sum(-1) + tied.head.bias
    assert torch.allclose(tied.logits(tokens()), scores, atol=1e-12)


def test_the_feed_forward_part_is_that_of_the_equations() -> None:
    decoder = model("kuramoto:ffn_start=small,ffn=tanh_bounded").double()
    part, phase = decoder.layers[0].ffn, 2 * torch.randn(3, 5, 16, dtype=torch.float64)
    pairs = torch.stack((phase.cos(), phase.sin()), -1).flatten(-2)
    gate, up = pairs @ part.gate.weight.T, pairs @ part.up.weight.T
    wanted = math.pi * torch.tanh((gate * torch.sigmoid(gate) * up) @ part.down.weight.T)
    assert torch.allclose(part(phase), wanted, atol=1e-12)
    assert part.flops() == 10 * 16 * 24


def test_initial_values_are_the_published_ones() -> None:
    size = dataclasses.replace(SIZES["1m"], ffn=288)
    decoder = Decoder(size, parse_layout("kuramoto").layers(5), seed=1)
    table, part = decoder.embedding.weight, decoder.layers[2].ffn
    assert table.abs().max() <= math.pi
    assert table.std().item() == pytest.approx(math.pi / math.sqrt(3), rel=0.02)
    assert part.gate.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert torch.count_nonzero(part.down.weight) == 0
    assert decoder.head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    small = Decoder(size, parse_layout("kuramoto_gated").layers(5), seed=1)
    assert small.layers[2].ffn.down.weight.std().item() == pytest.approx(
        0.5 / math.sqrt(2 * 288 * 5), rel=0.02
    )
    assert small.layers[2].mechanism.gate_q.weight.std().item() == pytest.approx(0.5 / 16, rel=0.02)
    assert torch.equal(small.embedding.weight, table), "arms share the values of common parameters"
    half = model("kuramoto:spread=0.5").embedding.weight
    assert 0.9 * math.pi / 2 < half.abs().max() <= math.pi / 2


def test_phases_gates_and_gains_are_not_decayed() -> None:
    decoder = model("kuramoto_gated", positions="learned")
    kinds = {name: circuit for circuit in decoder.circuits() for name in circuit.parameters}
    assert (kinds["embedding.weight"].tag, kinds["embedding.weight"].decay) == ("own", False)
    assert kinds["embedding.positions"].tag == "position"
    for name in ("blocks.0.mechanism.gate", "blocks.0.mechanism.kappa", "head.bias"):
        assert not kinds[name].decay
    for name in ("blocks.0.mechanism.gate_q.weight", "blocks.0.ffn.down.weight", "head.weight"):
        assert kinds[name].decay


def test_an_adapter_scatters_phases_however_large_the_states_are() -> None:
    decoder = model("standard kuramoto")
    adapter = decoder.layers[1].adapter
    assert adapter is not None
    for scale in (1e-2, 1.0, 1e3):
        phases = adapter(scale * torch.randn(50, 20, 16))
        assert 1.0 < phases.std() < 2.6


def test_tied_heads_need_one_space_at_both_ends() -> None:
    model("kuramoto:readout=tied standard kuramoto:readout=tied", 3)(tokens(), tokens())[0].backward()
    model("standard kuramoto standard", 3)(tokens(), tokens())[0].backward()
    model("standard kuramoto")  # its output layer has a separate matrix
    for arm, words in (
        ("kuramoto standard", "tied head needs the same residual space"),
        ("standard kuramoto:readout=tied", "states are in torus of s1, the embedding is in euclidean"),
        ("kuramoto:group=s3 kuramoto:readout=tied", "the embedding is in torus of s3"),
    ):
        with pytest.raises(UserError, match=words):
            model(arm)
    model("kuramoto standard", tied=False)


def test_neighboring_layers_on_one_torus_need_no_adapter() -> None:
    decoder = model("kuramoto kuramoto_gated kuramoto:group=s3 kuramoto:group=s3,ffn=none", 4)
    assert [block.adapter is not None for block in decoder.layers] == [False, False, True, False]
    assert decoder.layers[3].ffn is None


def test_dropout_leaves_the_embeddings_phases() -> None:
    decoder = model("kuramoto", dropout=0.5)
    decoder.train()
    entered: list[Tensor] = []
    decoder.layers[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    first, second = decoder.hidden(tokens()), decoder.hidden(tokens())
    assert torch.equal(entered[0], decoder.embedding.weight[tokens()])
    assert not torch.equal(first, second), "updates are dropped"


def test_a_width_that_the_group_does_not_divide_is_rejected() -> None:
    with pytest.raises(UserError, match="s3 has blocks of 4 coordinates, which do not divide width 10"):
        Torus(Size("odd", 10, 1, 1, 8, 32, 16), TorusOptions(Quaternions()))


def test_an_arm_without_a_feed_forward_part_cannot_be_matched() -> None:
    with pytest.raises(UserError, match="no feed-forward layer"):
        match_params(TINY, parse_layout("kuramoto:ffn=none").layers(2), 10**6)


def test_it_learns() -> None:
    decoder = model("kuramoto:successor=replace")
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    text = (torch.arange(17) * 5 % 32).repeat(4, 1)
    losses = []
    for _ in range(40):
        objective, nats, _ = decoder(text[:, :-1], text[:, 1:])
        objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nats.item())
    assert losses[-1] < 0.3 * losses[0]
