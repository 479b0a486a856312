"""Defaults of the contract, user files, wrapping and composition."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headtohead as h2h
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.contract.cache import Cache, Entry
from headtohead.mechanisms.contract.counting import counted_flops
from headtohead.mechanisms.contract.projected import mean_keys
from headtohead.mechanisms.contract.registry import load_mechanism
from headtohead.mechanisms.contract.terms import Composed, class_term
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=24, context=16, vocabulary=32)

MINE = '''
import torch
from torch import nn

class Mine(nn.Module):
    """Mean of the past: the smallest class that can race."""

    def __init__(self, shape, options):
        super().__init__()
        self.v = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x, frame):
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return self.v(x).cumsum(1) / count[:, None]
'''

SHIFT = '''
import torch
from torch import nn
import headtohead as h2h

class Shift(h2h.Stage):
    """q + a k, with a learned a per head."""

    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.a = nn.Parameter(torch.full((shape.heads,), 0.1))

    def evolve(self, q, k, frame):
        return q + self.a[:, None, None] * k, k
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return f"{path}:Mine"


@pytest.fixture
def shift(tmp_path: Path) -> str:
    path = tmp_path / "shift.py"
    path.write_text(SHIFT)
    return f"{path}:Shift"


def test_a_class_with_two_methods_is_a_whole_model(mine: str) -> None:
    model = Decoder(TINY, parse_layout(mine).layers(2), seed=1)
    tokens = torch.randint(0, 32, (2, 16))
    objective, nats, _ = model(tokens, tokens)
    objective.backward()
    assert torch.isfinite(nats)
    assert not model.decodable
    assert model.flops(16).full > 0
    assert {circuit.tag for circuit in model.circuits()} == {"embedding", "norm", "ffn", "ov"}


def test_its_source_is_part_of_what_it_is(mine: str) -> None:
    before = parse_layout(mine).pattern[0].as_dict()
    path = Path(mine.rpartition(":")[0])
    path.write_text(MINE.replace("cumsum(1)", "cumsum(1) * 1.0"))
    assert parse_layout(mine).pattern[0].as_dict() != before


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = (", r"mine\.py, line 1"),
        ("raise RuntimeError('no')", r"mine\.py, line 1: failed on import: RuntimeError: no"),
        ("class Mein: pass", "unknown class in .* 'Mine'; did you mean 'Mein'"),
        ("\n\nclass Mine: pass", r"mine\.py, line 3: Mine is not a mechanism"),
        ("Mine = 3", "is not a mechanism"),
    ],
)
def test_a_users_mistakes_are_one_line(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=words):
        load_mechanism(str(tmp_path / "mine.py"), "Mine")


def test_initial_values_are_seeded_by_name_layer_and_seed() -> None:
    draw = seeded_draw(1, "layer0", 0.02)
    assert torch.equal(draw("q.weight", (3, 4)), draw("q.weight", (3, 4)))
    assert not torch.equal(draw("q.weight", (3, 4)), draw("k.weight", (3, 4)))
    assert not torch.equal(draw("q.weight", (3, 4)), seeded_draw(2, "layer0", 0.02)("q.weight", (3, 4)))
    assert not torch.equal(draw("q.weight", (3, 4)), seeded_draw(1, "layer1", 0.02)("q.weight", (3, 4)))


def test_arms_share_the_initial_values_of_common_parameters() -> None:
    one = dict(Decoder(TINY, parse_layout("standard").layers(2), seed=3).named_parameters())
    two = dict(Decoder(TINY, parse_layout("sharing:tie=kv").layers(2), seed=3).named_parameters())
    common = set(one) & set(two)
    assert {"blocks.0.mechanism.q.weight", "blocks.1.mechanism.o.weight", "embedding.weight"} <= common
    assert all(torch.equal(one[name], two[name]) for name in common)


def test_wrap_takes_a_module_or_a_factory() -> None:
    class Past(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.mix = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x).cumsum(1)

    for wrapped in (h2h.wrap(Past(16)), h2h.wrap(lambda shape: Past(shape.width), name="past")):
        model = Decoder(TINY, [Composed((class_term(wrapped),))] * 2, seed=1)
        assert model.parameter_count() > 0
        first, second = (model.blocks[i].mechanism.inner.mix.weight for i in range(2))
        assert not torch.equal(first, second), "layers have different initial values"
    assert parse_layout(h2h.wrap(Past(16), name="past")).label == "past"


def test_wrap_rejects_a_module_that_changes_the_shape() -> None:
    wrapped = h2h.wrap(nn.Linear(16, 8), name="narrow")
    model = Decoder(TINY, [Composed((class_term(wrapped),))] * 2, seed=1)
    with pytest.raises(UserError, match="must keep"):
        model.logits(torch.zeros(1, 4, dtype=torch.long))


def test_a_stage_composes_and_decodes(shift: str) -> None:
    for base in ("standard", "sharing:tie=kv", "sharing:tie=qk"):
        composed = parse_layout(f"{base}+{shift}").pattern[0]
        model = Decoder(TINY, [composed] * 2, seed=1).double()
        tokens = torch.randint(0, 32, (2, 10))
        caches = model.new_caches(2, 10)
        parts = torch.cat([model.logits(tokens[:, i : i + 1], caches=caches) for i in range(10)], 1)
        assert torch.allclose(parts, model.logits(tokens), atol=1e-12)
        assert any("stages.Shift.a" in name for circuit in model.circuits() for name in circuit.parameters)


def test_under_a_stage_k_equals_v_means_the_evolved_unrotated_key(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(
        SHIFT.replace(
            "return q + self.a[:, None, None] * k, k", "return q, k * (1 + 10 * self.a[:, None, None])"
        )
    )
    arm = f"sharing:tie=kv,rope=score+{tmp_path / 'double.py'}:Shift"
    shape = Shape(16, 4, 0, 1, 16)
    evolved = parse_layout(arm).pattern[0].build(shape).double()
    plain = parse_layout("sharing:tie=kv,rope=score").pattern[0].build(shape).double()
    for mechanism in (evolved, plain):
        mechanism.initialise(seeded_draw(1, "x", 0.3))
    with torch.no_grad():
        plain.k.weight.mul_(2.0)  # 1 + 10 * 0.1
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    frame = Frame(time=6, rotary=Rotary(10_000.0, 16))
    assert torch.allclose(evolved(x, frame), plain(x, frame), atol=1e-12)


def test_a_stage_alone_is_added_to_standard(shift: str) -> None:
    composed = parse_layout(shift).pattern[0]
    assert composed.base.kind.name == "standard"
    assert "stages" in dict(composed.build(Shape(16, 4)).named_children())


def test_invalid_compositions_are_rejected_with_the_reason(shift: str, mine: str) -> None:
    for arm, words in (
        (f"standard:kv_heads=2+{shift}", "one query per key"),
        (f"diagonal+{shift}", "one cached tensor"),
        (f"{mine}+{shift}", "no separate evolve stage"),
    ):
        with pytest.raises(UserError, match=words):
            parse_layout(arm).pattern[0].build(Shape(16, 4))
    with pytest.raises(UserError, match="only a stage"):
        parse_layout("standard+sharing")


def test_positions_a_mechanism_cannot_take_are_rejected() -> None:
    class Still(h2h.Mechanism):
        name = "still"
        supports = h2h.Supports(positions=frozenset({"learned", "none"}))

        def forward(self, x: torch.Tensor, frame: h2h.Frame) -> torch.Tensor:
            return x

    composed = Composed((class_term(Still),))
    with pytest.raises(UserError, match="still does not support positions=rope; it supports learned, none"):
        composed.build(Shape(16, 4, positions="rope"))


def test_an_impossible_shape_is_rejected() -> None:
    for values, words in (
        ({"width": 10, "heads": 4}, "not divisible"),
        ({"width": 12, "heads": 4}, "odd"),
        ({"width": 16, "heads": 4, "kv_heads": 3}, "evenly"),
    ):
        with pytest.raises(UserError, match=words):
            Shape(**values)


def test_a_cache_counts_each_storage_once_and_raises_on_overflow() -> None:
    cache = Cache(
        (Entry("k", (2, 4)), Entry("state", (3,), "sequence", torch.float64), Entry("table", (5,), "shared")),
        2,
        6,
        torch.float32,
        "cpu",
    )
    assert cache.bytes == 2 * 2 * 6 * 4 * 4 + 2 * 3 * 8 + 5 * 4
    cache.append("k", torch.ones(2, 2, 6, 4))
    cache.length = 6
    with pytest.raises(UserError, match="holds 6 tokens"):
        cache.append("k", torch.ones(2, 2, 1, 4))


@pytest.mark.parametrize(
    ("made_with", "kept"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_a_wide_entry_is_never_kept_narrower_than_float32(made_with: str, kept: str) -> None:
    entry = Entry("state", (3,), "sequence", least=torch.float32)
    cache = Cache((entry,), 2, 6, getattr(torch, made_with), "cpu")
    assert cache.tensors["state"].dtype == getattr(torch, kept)
    assert cache.bytes == entry.bytes(2, 6, getattr(torch, made_with))


def test_flops_are_counted_where_no_formula_is_given(mine: str) -> None:
    mechanism = parse_layout(mine).pattern[0].build(Shape(16, 4))
    assert mechanism.flops(8).full == 2 * 16 * 16
    assert counted_flops(mechanism, 8, 1, "decode") == 8 * 2 * 16 * 16, (
        "without a cache, decoding recomputes the context"
    )


@pytest.mark.parametrize(
    ("context", "window", "strict"),
    [(1, 0, False), (7, 0, False), (7, 3, False), (7, 0, True), (5, 9, False)],
)
def test_mean_keys_is_the_mean_over_queries(context: int, window: int, strict: bool) -> None:
    seen = []
    for i in range(context):
        keys = min(i + 1, window) if window else i + 1
        seen.append(max(1, keys - 1) if strict else keys)
    assert mean_keys(context, window, strict) == pytest.approx(sum(seen) / context)


def test_extra_losses_are_added_and_named() -> None:
    class Costly(h2h.Mechanism):
        def __init__(self, shape: Shape, options: object) -> None:
            super().__init__(shape, options)
            self.v = nn.Linear(shape.width, shape.width)

        def forward(self, x: Tensor, frame: Frame) -> Tensor:
            frame.add_loss("size", 2.0 + 0.0 * x.sum())
            return self.v(x)

    model = Decoder(TINY, [Composed((class_term(Costly),))] * 2, seed=1)
    tokens = torch.randint(0, 32, (1, 8))
    objective, nats, losses = model(tokens, tokens)
    assert float(objective.detach()) == pytest.approx(float(nats) + 4.0)
    assert float(losses["size"]) == 4.0


@pytest.mark.parametrize(
    ("shape", "wider"),
    [((64, 176), (64, 200)), ((5, 7), (6, 300)), ((3, 5, 7), (4, 5, 70)), ((5,), (300,)), ((), (1,))],
)
def test_an_initial_value_does_not_depend_on_the_shape(
    shape: tuple[int, ...], wider: tuple[int, ...]
) -> None:
    draw = seeded_draw(1, "here", 0.5)
    small, large = draw("w", shape), draw("w", wider)
    assert small.shape == shape
    assert torch.equal(small, large[tuple(slice(count) for count in shape)].reshape(shape))
    assert draw("w", (4, 0)).shape == (4, 0)


def test_initial_values_are_normal_with_distinct_columns() -> None:
    values = seeded_draw(1, "here", 0.5)("w", (4000, 200))
    assert values.mean().abs() < 0.002
    assert values.std() == pytest.approx(0.5, rel=0.005)
    assert (values.T.corrcoef() - torch.eye(200)).abs().max() < 0.1


def test_a_users_subclass_has_its_own_name_whichever_was_loaded_first() -> None:
    arms = Path(__file__).parents[1] / "user_arms.py"
    for names in (("Copy", "Fused"), ("Fused", "Copy")):
        assert [parse_layout(f"{arms}:{name}").layers(1)[0].base.kind.name for name in names] == list(names)


def test_a_users_class_is_found_by_its_text_under_any_name(tmp_path: Path) -> None:
    """Workers build arms from their text: a built-in mechanism's subclass, and a class that sets its own name."""
    (tmp_path / "mine.py").write_text(
        "from headtohead.mechanisms.standard import Standard\n"
        "class Mine(Standard):\n    pass\n"
        "class Other(Standard):\n    name = 'called otherwise'\n"
    )
    for name, called in (("Mine", "Mine"), ("Other", "called otherwise")):
        (layer,) = parse_layout(f"{tmp_path / 'mine.py'}:{name}").layers(1)
        assert layer.base.kind.name == called
        assert parse_layout(layer.text).layers(1) == [layer]
    assert parse_layout("standard").layers(1)[0].base.kind.name == "standard"


def test_an_authors_frame_has_no_state_of_decoding_or_capture() -> None:
    fields = {field.name for field in dataclasses.fields(Frame)}
    read = {
        "start",
        "time",
        "causal",
        "padding",
        "rotary",
        "embeddings",
        "norm",
        "companion",
        "training",
        "losses",
    }
    assert fields == read | {"state"}
    mechanisms = Path(h2h.__file__).parent / "mechanisms"
    files = [*mechanisms.glob("*.py"), *(mechanisms / "families").glob("*.py")]
    assert len(files) > 20
    assert [file.name for file in files if "frame.state" in file.read_text()] == []
