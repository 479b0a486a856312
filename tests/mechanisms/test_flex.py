"""Score functions: arms, declarations, mistakes, FlexAttention against the dense path, costs."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import headtohead as h2h
from headtohead.common.errors import UserError
from headtohead.kernels import stacking
from headtohead.kernels.attention import scored as kernel
from headtohead.mechanisms.contract.base import Frame, Rotary, Shape, seeded_draw
from headtohead.mechanisms.contract.describe import describe
from headtohead.mechanisms.contract.projected import mean_keys
from headtohead.mechanisms.contract.score import bind, visible_keys
from headtohead.mechanisms.contract.scored import scored_mechanism
from headtohead.mechanisms.families.scores import SCORES
from headtohead.mechanisms.flex import Flex
from headtohead.model.check import raceable
from headtohead.model.check.fixture import Failure, Fixture
from headtohead.model.check.gate import Trial, check_causality
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

TINY = dataclasses.replace(SIZES["nano"], width=16, ffn=16, context=32)
MINE = """\
import headtohead as h2h
import torch


@h2h.score
def softcap(s, head, i, j, cap: float = 30.0):
    return cap * torch.tanh(s / cap)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Any:
    """A function that writes a user's file and returns its path."""

    def write(body: str = "", text: str = MINE) -> str:
        file = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
        file.write_text(text + ("\n\n" + body if body else ""))
        return str(file)

    return write


def build(arm: str, heads: int = 4, context: int = 32, positions: str = "rope") -> Any:
    shape = Shape(16, heads, 0, 1, context, positions=positions)  # type: ignore[arg-type]
    mechanism = parse_layout(arm).pattern[0].build(shape)
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    return mechanism


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Arms.


@pytest.mark.parametrize(
    ("arm", "text", "options"),
    [
        ("flex", "flex", {"score": "plain"}),
        ("flex:plain", "flex", {"score": "plain"}),
        ("flex:alibi", "flex:alibi", {"score": "alibi"}),
        ("flex:softcap", "flex:softcap", {"score": "softcap", "cap": 30.0}),
        ("flex:softcap=20", "flex:softcap,cap=20", {"score": "softcap", "cap": 20.0}),
        ("flex:softcap,cap=20", "flex:softcap,cap=20", {"score": "softcap", "cap": 20.0}),
        ("flex:score=softcap,cap=20", "flex:softcap,cap=20", {"score": "softcap", "cap": 20.0}),
        ("flex:prefix=4", "flex:prefix,prefix=4", {"score": "prefix", "prefix": 4, "window": 64}),
        (
            "flex:prefix,prefix=4,window=2",
            "flex:prefix,prefix=4,window=2",
            {"score": "prefix", "prefix": 4, "window": 2},
        ),
        ("flex:sliding=8,kv_heads=2", "flex:sliding,kv_heads=2,window=8", {"score": "sliding", "window": 8}),
    ],
)
def test_an_arm_names_a_function_and_its_options(arm: str, text: str, options: dict[str, Any]) -> None:
    (term,) = parse_layout(arm).pattern[0].terms
    assert term.text == text
    record = term.as_dict()
    assert record["mechanism"] == "flex"
    assert {"kv_heads": 0, **options}.keys() == record["options"].keys()
    assert options.items() <= record["options"].items()
    assert parse_layout(text).pattern == parse_layout(arm).pattern


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("flex:softcp", "unknown score of flex 'softcp'; did you mean 'softcap'"),
        ("flex:softcp=3", "unknown option or score of flex 'softcp'; did you mean 'softcap'"),
        ("flex:alibi,cap=3", r"unknown option of flex:alibi 'cap' .*allowed: kv_heads, score"),
        ("flex:softcap,cup=3", "unknown option of flex:softcap 'cup'; did you mean 'cap'"),
        ("flex:softcap=many", "option cap takes a float, got 'many'"),
        ("flex:sliding=0", "window=0 is too small; at least 1"),
        ("flex:sliding=99999999999999999999", "window=99999999999999999999 is too large; at most 2147483647"),
        ("flex:softcap=nan", "cap=nan must be finite"),
        ("flex:relative=100000000000000", "reach=100000000000000 is too large; at most 131072"),
        ("flex:sandwich=100000000", "dim=100000000 is too large; at most 4096"),
        ("flex:sliding=2.5", "option window takes a int, got '2.5'"),
        ("flex:alibi=3", "alibi has no options of its own; write flex:alibi"),
        ("flex:softcap=3,cap=4", "option 'cap' of softcap is given twice"),
        ("standard:window", "'=' is missing"),
    ],
)
def test_a_wrong_arm_is_one_line_with_the_nearest_match(arm: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse_layout(arm)
    assert "\n" not in str(caught.value)


def test_the_options_of_every_function_are_listed() -> None:
    rows = {(row["name"], row["help"].partition(":")[0]): row for row in describe(Flex).options}
    assert rows["cap", "of softcap"] == {
        "name": "cap",
        "type": "float",
        "default": 30.0,
        "choices": None,
        "help": "of softcap: bound of the scores",
    }
    assert rows["score", "the score function"]["choices"] == list(SCORES)
    assert {("window", f"of {name}") for name in ("sliding", "dilated", "prefix")} <= rows.keys()


# A user's file.


def test_a_decorated_function_in_a_file_is_an_arm(mine: Any) -> None:
    file = mine()
    terms = [
        parse_layout(file + rest).pattern[0].base for rest in (":softcap", "", ":softcap,cap=20", ":cap=20")
    ]
    assert [term.text for term in terms] == [*[f"{file}:softcap"] * 2, *[f"{file}:softcap:cap=20"] * 2]
    assert [term.options.cap for term in terms] == [30, 30, 20, 20]
    assert parse_layout(terms[2].text).pattern[0].base == terms[2]
    assert terms[0].user_code
    assert terms[0].as_dict()["mechanism"] == "softcap"
    other = parse_layout(f"{mine('# edited')}:softcap").pattern[0].base
    assert other.as_dict()["source"] != terms[0].as_dict()["source"]
    x, frame = drawn(2, 9, 16).float(), Frame(time=9, rotary=Rotary(10_000.0, 32))
    assert torch.equal(build(terms[2].text)(x, frame), build("flex:softcap=20")(x, frame))


def test_a_function_passed_in_python_is_an_arm() -> None:
    @h2h.score
    def halved(s: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s / 2

    (composed,) = parse_layout(halved).pattern
    assert (composed.label, composed.user_code, composed.portable) == ("halved", True, False)
    assert parse_layout(halved).pattern == (composed,)


def test_unknown_and_undecorated_functions_are_one_line(mine: Any) -> None:
    file = mine("def bare(s, head, i, j):\n    return s\n")
    with pytest.raises(
        UserError, match=r"unknown class or score function .* 'softcp'; did you mean 'softcap'"
    ):
        parse_layout(f"{file}:softcp")
    with pytest.raises(UserError, match=r"line 10: bare is a function; race it with @headtohead.score"):
        parse_layout(f"{file}:bare")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("@h2h.score\ndef f(s, i, j):\n    return s", r"f\(s, i, j\) must begin with \(s, head, i, j\)"),
        ("@h2h.score\ndef f(s, head, i, j, cap):\n    return s", "argument cap of f has no default"),
        (
            "@h2h.score\ndef f(s, head, i, j, cap: list = 3):\n    return s",
            "has type list; allowed are int, float",
        ),
        ("@h2h.score\ndef f(s, head, i, j, cap='x'):\n    return s", "has type str; allowed are"),
        ("@h2h.score\ndef f(s, head, i, j, cap: int = 0.5):\n    return s", "default 0.5; it must be a int"),
        (
            "@h2h.score\ndef f(s, head, i, j, cap: 'Nope' = 1):\n    return s",
            "annotation of f cannot be read",
        ),
        ("@h2h.score\ndef f(s, head, i, j, **more):\n    return s", "argument more of f is variable"),
        ("@h2h.score(normalize='sigmiod')\ndef f(s, head, i, j):\n    return s", "did you mean 'sigmoid'"),
        (
            "@h2h.score\ndef f(s, head, i, j, t: h2h.Learned = h2h.learned('reach')):\n    return s",
            "dimension 'reach' of learned t is not a number above 0 or one of context, heads",
        ),
    ],
)
def test_a_wrong_declaration_is_one_line_with_its_place(mine: Any, source: str, words: str) -> None:
    file = mine(source)
    with pytest.raises(UserError, match=words) as caught:
        parse_layout(f"{file}:f")
    assert f"{file}, line 10: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return s.nope", "line 12, in f: AttributeError: 'Tensor' object has no attribute 'nope'"),
        ("return 3.0", "f returned a float, not a tensor"),
        ("return s.sum(-1)", r"f returned shape \(2, 4, 7\) for s \(2, 4, 7, 7\); it must keep the shape"),
        ("return (i - j).expand_as(s)", "f returned int64; it must return floating-point"),
        ("return s / (i - j)", "f returned inf at head 0, i=0, j=0; allowed are numbers, and -inf"),
        ("return torch.sqrt(s)", "f returned nan at head 0, i=0, j=0"),
        ("return torch.where(s > 0, s, -torch.inf)", "hides head 0, .* for some scores only"),
        ("return s - s.mean()", "it must be elementwise and keep no state"),
        (
            "s /= 1 + s.abs().amax(-1, keepdim=True); return s",
            "changes its arguments in place; it must return",
        ),
        ("return s.masked_fill_((i - j) < 2, -torch.inf)", "changes its arguments in place; it must return"),
        ("i += 1; return s * i", "changes its arguments in place; it must return"),
        ("return s.cumsum(-1)", "in f: IndexError|it must be elementwise"),
    ],
)
def test_a_function_that_is_no_score_is_one_line(mine: Any, body: str, words: str) -> None:
    file = mine(f"@h2h.score\ndef f(s, head, i, j):\n    {body}\n")
    with pytest.raises(UserError, match=words) as caught:
        build(f"{file}:f")
    assert "\n" not in str(caught.value)


STATEFUL = """\
seen = []

@h2h.score
def f(s, head, i, j):
    if s.ndim == 4 and s.shape[-1] != 7:
        seen.append(s.detach())
    return s * (1 + {state})
"""


def test_state_between_calls_is_caught(mine: Any) -> None:
    bench = Fixture.of(parse_layout(f"{mine(STATEFUL.format(state='0.1 * len(seen)'))}:f").pattern[0])
    with pytest.raises(Failure, match="second time"):
        raceable.deterministic(bench)


def test_the_gate_catches_a_function_that_reads_other_sequences(mine: Any) -> None:
    file = mine(STATEFUL.format(state="(seen[-1].mean() if s.ndim == 4 and seen else 0.0)"))
    model = Decoder(TINY.with_settings(init_std=0.3), parse_layout(f"{file}:f").layers(2), seed=1)
    tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(1))
    found = check_causality(model, Trial(tokens, tokens), shake=False)
    assert any("future" in words or "other sequences" in words for words in found.failed)


# Options and learned tensors.


def test_options_have_the_types_of_their_annotations() -> None:
    @h2h.score
    def typed(
        s: Tensor,
        head: Tensor,
        i: Tensor,
        j: Tensor,
        heads: int,
        power: int = 2,
        scale: float = 1,
        twice: bool = False,
        side: Literal["left", "right"] = "left",
    ) -> Tensor:
        return s * scale * (2 if twice else 1) + (heads if side == "right" else power)

    kind = scored_mechanism(typed, "typed")
    built = parse_layout(typed).pattern[0].base.options
    assert (built.power, built.scale, built.twice, built.side) == (2, 1.0, False, "left")
    assert type(built.scale) is float
    with pytest.raises(UserError, match="unknown value for side 'rigth'; did you mean 'right'"):
        kind.Options(side="rigth")
    given = kind.Options(power=5, side="right", twice=True)
    change = bind(given, heads=4, context=8)
    one = torch.tensor(3.0)
    assert change(one, *[torch.tensor(0)] * 3) == 3 * 2 + 4


def test_learned_tensors_are_parameters_of_the_layer() -> None:
    @h2h.score
    def noisy(
        s: Tensor,
        head: Tensor,
        i: Tensor,
        j: Tensor,
        reach: int = 3,
        table: h2h.Learned = h2h.learned("heads", "reach", 5, init=2.0, std=0.1),  # noqa: B008
    ) -> Tensor:
        return s + table[head, (i - j).clamp_max(reach - 1), 0]

    layer = parse_layout(noisy).pattern[0].build(Shape(16, 4))
    layer.initialise(seeded_draw(1, "test", 0.3))
    table = layer.get_parameter("learned.table").detach()
    assert table.shape == (4, 3, 5)
    assert abs(float(table.mean()) - 2) < 0.1
    assert 0.05 < float(table.std()) < 0.2
    (circuit,) = (one for one in layer.circuits() if "learned.table" in one.parameters)
    assert (circuit.tag, circuit.decay) == ("qk", False)
    model = Decoder(TINY, parse_layout("flex:relative=6").layers(2), seed=1)
    assert model.state_dict()["blocks.1.mechanism.learned.table"].shape == (4, 6)
    assert not model.get_parameter("blocks.1.mechanism.learned.table").any()


# The arithmetic.


def test_plain_is_standard_attention() -> None:
    x, frame = drawn(2, 9, 16), Frame(time=9, rotary=Rotary(10_000.0, 32))
    for arms in (
        ("flex", "standard"),
        ("flex:kv_heads=2", "standard:kv_heads=2"),
        ("flex:sliding=3", "standard:window=3"),
    ):
        flex, standard = (build(arm).double()(x, frame) for arm in arms)
        torch.testing.assert_close(flex, standard, rtol=1e-12, atol=1e-12)


def test_a_query_always_sees_itself(mine: Any) -> None:
    file = mine("@h2h.score\ndef none(s, head, i, j):\n    return torch.where(i < 0, s, -torch.inf)\n")
    x = drawn(2, 5, 16).float()
    frame = Frame(time=5, rotary=Rotary(10_000.0, 32))
    assert torch.equal(build(f"{file}:none").attention_map(x, frame), torch.eye(5).expand(2, 4, 5, 5))


def test_a_function_never_gets_a_later_key(mine: Any) -> None:
    # The logarithm of a negative distance would be nan, and so would its gradient.
    file = mine("@h2h.score\ndef far(s, head, i, j):\n    return s * torch.log(i - j + 2.0)\n")
    layer, x = build(f"{file}:far"), drawn(2, 9, 16).float().requires_grad_()
    output = layer(x, Frame(time=9, rotary=Rotary(10_000.0, 32)))
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.isfinite(grad).all()


FUSED = ["plain", "alibi", "softcap=2", "sandwich=8", "sliding=3", "dilated=3", "prefix=2,window=3"]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("alibi", "sliding=3") else pytest.param(name, marks=pytest.mark.slow)
        for name in FUSED
    ],
)
def test_flex_attention_equals_the_dense_path(name: str) -> None:
    layer = build(f"flex:{name}")
    q, k, v = drawn(2, 4, 9, 4), drawn(2, 2, 9, 4, seed=2), drawn(2, 2, 9, 4, seed=3)
    place = torch.arange(9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is not compiled
        found = kernel.scored_flex(q, k, v, layer.change, flex_attention)
    wanted = kernel.scored_attend(q, k, v, layer.change, place, place)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_every_function_without_learned_tensors_and_with_a_softmax_is_compared() -> None:
    names = {name for name, one in SCORES.items() if one.normalize == "softmax" and not one.learned}
    assert names == {name.partition("=")[0] for name in FUSED}


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """FlexAttention on CPU, uncompiled; the list gets the batch of each call."""
    calls: list[int] = []

    def flex(q: Tensor, *given: Any, **named: Any) -> Any:
        calls.append(len(q))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return flex_attention(q, *given, **named)

    monkeypatch.setattr(kernel, "_fusible", lambda q, learned: not learned)
    monkeypatch.setattr(kernel, "compiled_flex", lambda: flex)
    monkeypatch.setattr(kernel, "_taken", {})
    return calls


def test_the_rows_of_a_population_are_one_batch_of_flex_attention(eager_flex: list[int]) -> None:
    layer, place = build("flex:sliding=3"), torch.arange(7)
    rows = [drawn(3, 2, 4, 7, 4, seed=seed) for seed in (1, 2, 3)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.scored_attend(q, k, v, layer.change, place, place)

    with stacking():
        together = torch.vmap(attend)(*rows)
    assert eager_flex == [6, 6]  # the trial, and the call
    alone = torch.stack([attend(*row) for row in zip(*rows, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


def by_hand(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any) -> Tensor:
    """FlexAttention on whole maps, with a backward pass."""
    time = torch.arange(q.shape[-2])
    batch, head = torch.arange(len(q))[:, None, None, None], torch.arange(q.shape[1])[:, None, None]
    scores = score_mod(q @ k.mT * q.shape[-1] ** -0.5, batch, head, time[:, None], time)
    return scores.masked_fill(time > time[:, None], -torch.inf).softmax(-1) @ v


def test_the_gradients_of_a_population_pass_through_flex_attention(
    eager_flex: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, place = build("flex:dilated=2"), torch.arange(7)
    heads = {1: 4, 2: 2, 3: 2}
    rows = [drawn(3, 2, count, 7, 4, seed=seed).requires_grad_() for seed, count in heads.items()]
    weights = drawn(3, 2, 4, 7, 4, seed=9)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.scored_attend(q, k, v, layer.change, place, place)

    monkeypatch.setattr(kernel, "compiled_flex", lambda: by_hand)
    with stacking():
        found = torch.autograd.grad((torch.vmap(attend)(*rows) * weights).sum(), rows)
    assert list(kernel._taken.values()) == [True]
    monkeypatch.setattr(kernel, "_fusible", lambda q, learned: False)
    alone = torch.stack([attend(*row) for row in zip(*rows, strict=True)])
    for grad, wanted in zip(found, torch.autograd.grad((alone * weights).sum(), rows), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_compiled_flex_attention_distinguishes_functions_and_options() -> None:
    place, flex = torch.arange(150), kernel.compiled_flex()
    q, k, v = (drawn(1, 4, 150, 16, seed=seed).float() for seed in (1, 2, 3))
    for arm in ("flex:softcap=0.5", "flex:softcap=2", "flex:alibi", "flex:sliding=20", "flex:softcap=0.5"):
        layer = build(arm, context=150)
        with torch.no_grad():
            found = kernel.scored_flex(q, k, v, layer.change, flex)
        wanted = kernel.scored_attend(q, k, v, layer.change, place, place)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_model_has_flex_attention_in_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without rotary positions: their plain form before FlexAttention is beyond the compiler on CPU.
    monkeypatch.setattr(kernel, "_fusible", lambda q, learned: not learned)
    size = dataclasses.replace(SIZES["nano"], context=32).with_settings(init_std=0.2, positions="learned")
    model = Decoder(size, parse_layout("(flex:alibi flex:sliding=5)*1").layers(2), seed=1).eval()
    text = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model.hidden(text)
        compiled = torch.compile(model.hidden, dynamic=False, fullgraph=True)
        torch.testing.assert_close(compiled(text), wanted, rtol=1e-4, atol=1e-4)


def test_what_flex_attention_cannot_run_is_dense_with_one_warning(
    eager_flex: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **named: Any) -> Any:
        raise NotImplementedError("embedding dimension must be at least 16\nmore")

    layer, place = build("flex:alibi"), torch.arange(7)
    q, k, v = (drawn(2, 4, 7, 4, seed=seed) for seed in (1, 2, 3))
    wanted = kernel.scored_attend(q, k, v, layer.change, place, place)
    monkeypatch.setattr(kernel, "_taken", {})
    monkeypatch.setattr(kernel, "compiled_flex", lambda: fails)
    words = r"cannot run alibi \(embedding dimension must be at least 16\); it runs dense"
    with pytest.warns(RuntimeWarning, match=words):
        found = kernel.scored_attend(q, k, v, layer.change, place, place)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.scored_attend(q, k, v, layer.change, place, place)


def test_sigmoid_and_learned_tensors_are_dense(eager_flex: list[int]) -> None:
    x, frame = drawn(2, 7, 16).float(), Frame(time=7)
    for arm in ("flex:sigmoid", "flex:relative"):
        build(arm, positions="none")(x, frame)
    assert eager_flex == []
    with torch.no_grad():  # there is no backward on CPU
        build("flex:alibi", positions="none")(x, frame)
    assert eager_flex == [2, 2]


def test_generation_from_a_cache_equals_the_full_pass() -> None:
    size = TINY.with_settings(init_std=0.3)
    model = (
        Decoder(size, parse_layout("(flex:relative=5 flex:dilated=3)*1").layers(2), seed=1).double().eval()
    )
    text = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(1))
    caches = model.new_caches(2, 30)
    with torch.no_grad():
        parts = [model.logits(part, caches=caches) for part in (text[:, :9], *text[:, 9:].split(1, 1))]
        torch.testing.assert_close(torch.cat(parts, 1), model.logits(text), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("distance", [4, 12])
def test_a_function_that_hides_near_keys_has_gradients(distance: int) -> None:
    raceable.gradients(Fixture.of(parse_layout(f"flex:dilated={distance}").pattern[0]))


def test_a_function_that_hides_every_other_key_has_none() -> None:
    with pytest.raises(Failure, match=r"the gradient of q\.weight is zero everywhere"):
        raceable.gradients(Fixture.of(parse_layout("flex:sliding=1").pattern[0]))


# Costs.


def test_flops_count_visible_pairs_and_every_cached_key() -> None:
    standard, windowed = build("standard"), build("standard:window=8")
    sliding, dilated = build("flex:sliding=8"), build("flex:dilated=3")
    assert build("flex:alibi").flops(32) == standard.flops(32)
    assert sliding.flops(32) == windowed.flops(32)
    seen = sum(i // 3 + 1 for i in range(32)) / 32
    per_key = dilated.key_flops("train")
    assert dilated.flops(32).causal == pytest.approx(dilated.linear_flops("train") + per_key * seen)
    assert dilated.flops(32).full == standard.flops(32).full
    assert sliding.flops(32, mode="decode") == standard.flops(32, mode="decode")


def test_a_long_context_is_counted_on_some_of_its_rows() -> None:
    found = build("flex:sliding=8").flops(2500).causal
    wanted = build("flex").linear_flops("train") + build("flex").key_flops("train") * mean_keys(2500, 8)
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("arm", "context", "keys"),
    [
        ("flex:sliding=64", 4096, 63.4765625),
        ("flex:sliding=64", 8192, 63.78515625),
        ("flex:dilated=3", 4096, 683.046875),
        ("flex:dilated=3", 8192, 1365.58203125),
    ],
)
def test_the_count_of_a_context_up_to_8192_keeps_its_value(arm: str, context: int, keys: float) -> None:
    layer = build(arm)
    assert visible_keys(layer.options, 4, 32, context) == keys


@pytest.mark.parametrize(
    ("arm", "share"),
    [
        ("flex:softcap", 0.5),
        ("flex:dilated=3", 1 / 6),
        ("flex:sliding=64", 64e-6),
        ("flex:sliding=5000", 5e-3),
        ("flex:prefix=1000,window=500", 1.5e-3),
    ],
)
def test_a_very_long_context_is_counted_on_some_of_its_pairs(arm: str, share: float) -> None:
    @h2h.score
    def counted(s: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        pairs.append(s.numel())
        return function.function(s, head, i, j, **options)

    layer, pairs = build(arm), list[int]()
    function = layer.options.function
    options = {name: getattr(layer.options, name) for name, _, _ in function.fields}
    mine = build(counted).options
    pairs.clear()
    found = visible_keys(mine, 4, 32, 10**6)
    assert found == pytest.approx(share * 10**6, rel=0.01)
    assert sum(pairs) <= 256 * 8192 * 4


def test_the_cache_is_that_of_standard() -> None:
    assert build("flex:sliding=8,kv_heads=2").cache_spec() == build("standard:kv_heads=2").cache_spec()
