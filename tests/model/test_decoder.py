from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.kernels import plain
from headtohead.mechanisms.contract.base import Circuit, Frame, Mechanism, Shape
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.mechanisms.contract.terms import Composed, class_term
from headtohead.model.decoder import Decoder
from headtohead.model.layers import Embedding
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size
from headtohead.model.spaces import SPACES, Space
from tests.model.paths import agreed_gradients

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=16, vocabulary=32)
STYLES = {
    "ours": {},
    "gpt2": {"positions": "learned", "bias": "all", "norm": "layer", "ffn": "gelu"},
    "untied": {"tied": False, "positions": "none"},
    "biased-swiglu": {"bias": "all"},
}


def model(arm: str = "standard", size: Size = TINY, seed: int = 1, **settings: object) -> Decoder:
    size = size.with_settings(**settings)
    return Decoder(size, parse_layout(arm).layers(size.layers), seed)


def tokens(batch: int = 2, time: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, 32, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("style", STYLES)
def test_no_logit_depends_on_future_tokens(style: str) -> None:
    decoder, first = model(**STYLES[style]).double(), tokens()
    second = first.clone()
    second[:, 7:] = (second[:, 7:] + 5) % 32
    assert torch.equal(decoder.logits(first)[:, :7], decoder.logits(second)[:, :7])


@pytest.mark.parametrize("style", STYLES)
def test_left_padding_is_invisible(style: str) -> None:
    decoder, text = model(**STYLES[style]).double(), tokens(time=8)
    padded = torch.cat((torch.full((2, 3), 9), text), 1)
    real = torch.ones(2, 11, dtype=torch.bool)
    real[:, :3] = False
    assert torch.allclose(decoder.logits(padded, padding=real)[:, 3:], decoder.logits(text), atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_the_fast_path_is_the_plain_path(style: str) -> None:
    decoder, text = model(**STYLES[style]).double(), tokens()
    agreed_gradients(decoder, text, atol=1e-14)


def test_every_parameter_is_in_one_circuit_with_a_tag() -> None:
    decoder = model(positions="learned", bias="all", norm="layer", tied=False)
    tags: dict[str, set[str]] = {}
    for circuit in decoder.circuits():
        tags.setdefault(circuit.tag, set()).update(circuit.parameters)
    assert set(tags) == {"embedding", "position", "norm", "ffn", "head", "qk", "ov"}
    assert sum(map(len, tags.values())) == len(list(decoder.named_parameters()))
    undecayed = {name for circuit in decoder.circuits() if not circuit.decay for name in circuit.parameters}
    assert undecayed == {name for name, parameter in decoder.named_parameters() if parameter.ndim < 2}


class Forgetful(Mechanism):
    name = "forgetful"

    def __init__(self, shape: Shape, options: object) -> None:
        super().__init__(shape, options)
        self.v = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        return self.v(x)

    def circuits(self) -> list[Circuit]:
        return [Circuit("ov", ("v.weight",))]


class Doubled(Forgetful):
    def circuits(self) -> list[Circuit]:
        return [Circuit("ov", ("v.weight", "v.bias")), Circuit("qk", ("v.weight",))]


class Strange(Forgetful):
    def circuits(self) -> list[Circuit]:
        return [Circuit("oq", ("v.weight", "v.bias"))]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Forgetful, "is in no parameter group"),
        (Doubled, "in two parameter groups"),
        (Strange, "unknown circuit tag 'oq'"),
    ],
)
def test_incomplete_circuits_are_rejected_by_name(kind: type[Mechanism], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Decoder(TINY, [Composed((class_term(kind),))] * 2, seed=1).circuits()


def test_a_mechanism_without_padding_support_rejects_padding() -> None:
    import headtohead as h2h

    wrapped = h2h.wrap(lambda shape: nn.Linear(shape.width, shape.width), name="plain")
    decoder = Decoder(TINY, [Composed((class_term(wrapped),))] * 2, seed=1)
    with pytest.raises(UserError, match="plain does not support padded batches"):
        decoder.logits(tokens(), padding=torch.ones(2, 12, dtype=torch.bool))
    with pytest.raises(UserError, match="does not support bidirectional"):
        decoder.hidden(tokens(), causal=False)


def test_dropout_is_active_only_in_training() -> None:
    decoder = model(dropout=0.5)
    decoder.train()
    assert not torch.equal(decoder.logits(tokens()), decoder.logits(tokens()))
    decoder.eval()
    assert torch.equal(decoder.logits(tokens()), decoder.logits(tokens()))


def test_hybrid_layouts_decode_from_the_cache() -> None:
    decoder = model("even(sharing:tie=kv,kv_heads=1)", dataclasses.replace(TINY, layers=4)).double()
    text = tokens()
    caches = decoder.new_caches(2, 12)
    parts = torch.cat([decoder.logits(text[:, i : i + 3], caches=caches) for i in range(0, 12, 3)], 1)
    assert torch.allclose(parts, decoder.logits(text), atol=1e-12)
    assert caches.bytes == decoder.cache_bytes(2, 12, torch.float64)


def test_learned_positions_end() -> None:
    with pytest.raises(UserError, match="has 16 learned positions"):
        model(positions="learned").logits(tokens(time=17))


def test_whole_model_flops_are_the_counted_ones() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for arm in ("standard", "sharing:tie=kv", "diagonal"):
        decoder = Decoder.on_meta(TINY, parse_layout(arm).layers(2))
        with plain(), FlopCounterMode(display=False) as counter:
            decoder.logits(torch.zeros(1, 16, dtype=torch.long, device="meta"))
        assert counter.get_total_flops() / 16 == decoder.flops(16).full


class Halved(Space):
    """A separate space: states are stored at half their size."""

    name = "halved"

    def embedding(self) -> Embedding:
        return super().embedding()

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        return x + 0.5 * update


class InHalved(Forgetful):
    name = "in_halved"
    residual = "halved"

    def circuits(self) -> list[Circuit]:
        return Mechanism.circuits(self)


def test_an_adapter_connects_layers_in_different_spaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SPACES, "halved", Halved)
    other, usual = Composed((class_term(InHalved),)), parse_layout("standard").pattern[0]
    decoder = Decoder(dataclasses.replace(TINY, layers=3), [usual, other, usual], seed=1)
    assert [block.adapter is not None for block in decoder.layers] == [False, True, True]
    decoder(tokens(), tokens())[0].backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    decoder.circuits()
    with pytest.raises(UserError, match="tied head"):
        Decoder(TINY, [usual, other], seed=1)
    monkeypatch.delitem(SPACES, "halved")
    with pytest.raises(UserError, match="unknown residual space"):
        Decoder(TINY, [usual, other], seed=1)


def test_the_compiled_forward_is_one_graph() -> None:
    decoder = model()
    decoder.hidden(tokens())  # the rotary table is computed outside the graph
    torch._dynamo.reset()
    compiled = torch.compile(decoder.hidden, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(tokens()), decoder.hidden(tokens()), atol=1e-5)


def common_block(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    block = tuple(slice(min(sides)) for sides in zip(one.shape, other.shape, strict=True))
    return one[block], other[block]


@pytest.mark.parametrize("changed", [{"ffn": 150}, {"width": 96}], ids=["ffn", "width"])
@pytest.mark.parametrize("name", builtin_mechanisms())
def test_arms_of_different_widths_share_common_initial_values(name: str, changed: dict[str, int]) -> None:
    """`shape = params` solves for the feed-forward width, `shape = cache` for the width: seeds stay paired across both."""
    layers = parse_layout(name).layers(2)
    rope = "rope" in layers[0].base.kind.supports.positions
    size = SIZES["nano"].with_settings(positions="rope" if rope else "learned")
    text = list(range(256)) * 4
    one, other = (
        Decoder(given, layers, seed=1, companion=text)
        for given in (size, dataclasses.replace(size, **changed))
    )
    for (parameter, here), there in zip(one.named_parameters(), other.parameters(), strict=True):
        if here.ndim < 2 or not here.any():
            continue  # constants
        a, b = common_block(here.detach(), there.detach())
        # Some have an initial scale that depends on the width; the draw itself does not.
        assert torch.allclose(a / a.std(), b / b.std(), rtol=1e-4, atol=1e-6), parameter
