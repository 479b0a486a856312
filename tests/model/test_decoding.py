from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from headtohead.common.errors import UserError
from headtohead.kernels import plain, weights_kept
from headtohead.kernels.matmul.projection import joined
from headtohead.mechanisms.contract.options import changed_options, value_text
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.mechanisms.contract.terms import Composed, class_term
from headtohead.model.decoder import Decoder
from headtohead.model.decoding import Decoding, decoding, graph_blocker, one_step
from headtohead.model.generation import Sampling, generate
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

TINY = dataclasses.replace(SIZES["nano"], width=32, ffn=24, context=24, vocabulary=20)


def arms(name: str) -> list[str]:
    """Return every example of a mechanism's options, as an arm."""
    found = []
    for options in builtin_mechanisms()[name].Options.examples():
        changed = changed_options(options)
        words = ",".join(f"{key}={value_text(value)}" for key, value in changed.items())
        found.append(f"{name}:{words}" if words else name)
    return found


def model(arm: str, **settings: Any) -> Decoder:
    size = TINY.with_settings(init_std=0.3, **settings)
    return Decoder(size, parse_layout(arm).layers(2), seed=2).double().eval()


TEXT = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(1))
SERVED = [
    arm
    for name in ("standard", "sharing")
    for arm in (*arms(name), f"{name}+coupled", f"{name}+coupled:order=after_rope")
    if model(arm).graph_safe
]
NOT_SERVED = ("diagonal", "latent", "sink", "forgetting")
SERVED += ["gated:window=3", "exclusive:kv_heads=2", "(value_residual canon)*1"]
SERVED += ["gated_linear", "gated_delta", "gated_delta:decay=channel,conv=0", "(selective_state standard)*1"]


def test_which_arms_support_cuda_graphs() -> None:
    assert {"standard", "standard:window=3", "sharing:tie=kv", "sharing:tie=kv,rope=score"} <= set(SERVED)
    assert "standard+coupled" in SERVED
    others = [model(arm).graph_safe for name in NOT_SERVED for arm in arms(name)]
    assert not any(others)


@torch.inference_mode()
@pytest.mark.parametrize("settings", [{}, {"positions": "learned"}, {"positions": "none"}], ids=str)
@pytest.mark.parametrize("arm", SERVED)
def test_steps_at_fixed_shapes_are_the_full_forward(arm: str, settings: dict[str, Any]) -> None:
    if "after_rope" in arm and settings:
        pytest.skip("order=after_rope needs rope")
    decoder = model(arm, **settings)
    whole = decoder.logits(TEXT)
    caches, usual = decoder.new_caches(3, 16), decoder.new_caches(3, 12)
    decoder.logits(TEXT[:, :5], caches=caches)
    decoder.logits(TEXT[:, :5], caches=usual)
    for layer in caches.layers:  # later positions have no effect, whatever their content
        for name in layer.tensors.keys() - layer.states:
            layer.tensors[name][..., 5:, :] = 1e6
    step = Decoding(decoder, caches)
    for place in range(5, 12):
        scores = step(TEXT[:, place : place + 1])
        assert torch.allclose(scores, whole[:, place], rtol=1e-9, atol=1e-12)
        assert torch.allclose(scores, one_step(decoder, usual, TEXT[:, place : place + 1]), rtol=1e-9)
    assert caches.length == 12


@pytest.mark.parametrize(
    "arm", [arm if ":" not in arm else pytest.param(arm, marks=pytest.mark.slow) for arm in SERVED]
)
def test_a_captured_step_is_correct_at_other_positions(arm: str) -> None:
    """A trace fixes every number that Python read, as a CUDA graph does: a replay at another position would show it."""
    decoder = model(arm).requires_grad_(False)
    whole = decoder.logits(TEXT)
    caches = decoder.new_caches(3, 16)
    decoder.logits(TEXT[:, :5], caches=caches)
    names = [(layer, name) for layer in caches.layers for name in layer.tensors]
    decoder.rotary.reach(16)  # type: ignore[union-attr]

    def step(token: Tensor, place: Tensor, *kept: Tensor) -> Tensor:
        for (layer, name), tensor in zip(names, kept, strict=True):
            layer.tensors[name] = tensor
        with caches.at(place):
            return one_step(decoder, caches, token)

    kept = [layer.tensors[name] for layer, name in names]
    replay = make_fx(step)(TEXT[:, 5:6], torch.tensor([5]), *(tensor.clone() for tensor in kept))
    for place in range(5, 12):
        scores = replay(TEXT[:, place : place + 1], torch.tensor([place]), *kept)
        assert torch.allclose(scores, whole[:, place], rtol=1e-9, atol=1e-12)


@torch.inference_mode()
@pytest.mark.parametrize("arm", ["gated_delta", "(canon selective_state)*1"])
def test_warm_up_steps_of_a_capture_do_not_change_states(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Captured:
        replay: Callable[[], Tensor]

    def capture(call: Callable[[], Tensor], *given: Any, warmup: int) -> Captured:
        for _ in range(warmup):
            call()
        return Captured(call)

    monkeypatch.setattr("headtohead.model.decoding.try_capture", capture)
    decoder = model(arm)
    whole, caches = decoder.logits(TEXT), decoder.new_caches(3, 16)
    decoder.logits(TEXT[:, :5], caches=caches)
    step = Decoding(decoder, caches)
    step._able = True
    for place in range(5, 12):
        assert torch.allclose(step(TEXT[:, place : place + 1]), whole[:, place], rtol=1e-9, atol=1e-12)


def test_a_text_is_the_same_with_fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    from headtohead.model import generation

    decoder = model("sharing:tie=kv")
    for sampling in (Sampling(temperature=0), Sampling(seed=3)):
        usual = torch.cat(list(generate(decoder, TEXT, 20, sampling)), 1)
        with monkeypatch.context() as patch:
            patch.setattr(generation, "decoding", lambda model, caches, steps, warn: Decoding(model, caches))
            fixed = torch.cat(list(generate(decoder, TEXT, 20, sampling)), 1)
        assert torch.equal(usual, fixed)


def test_steps_of_both_kinds_may_follow_each_other() -> None:
    decoder = model("sharing:tie=kv,rope=score")
    with torch.inference_mode():
        whole, caches = decoder.logits(TEXT), decoder.new_caches(3, 12)
        decoder.logits(TEXT[:, :4], caches=caches)
        fixed = Decoding(decoder, caches)
        for place in range(4, 12):
            token = TEXT[:, place : place + 1]
            scores = fixed(token) if place % 2 else one_step(decoder, caches, token)
            assert torch.allclose(scores, whole[:, place], rtol=1e-9)


def test_a_text_may_grow_longer_than_the_context() -> None:
    decoder = model("standard")
    text = TEXT.repeat(1, 3)
    with torch.inference_mode():
        caches = decoder.new_caches(3, 36)
        decoder.logits(text[:, :20], caches=caches)
        step = Decoding(decoder, caches)
        scores = torch.stack([step(text[:, place : place + 1]) for place in range(20, 36)], 1)
        assert torch.allclose(scores, decoder.logits(text)[:, 20:], rtol=1e-9)
        with pytest.raises(UserError, match="holds 36 tokens; 37 were requested"):
            step(text[:, :1])


def test_weights_are_joined_once_for_all_steps() -> None:
    decoder = model("standard", bias="all")
    caches = decoder.new_caches(3, 12)
    with torch.inference_mode(), plain():
        decoder.logits(TEXT[:, :4], caches=caches)
        step = Decoding(decoder, caches)
        step(TEXT[:, 4:5])
        kept = dict(step._weights)
        assert torch.allclose(step(TEXT[:, 5:6]), decoder.logits(TEXT[:, :6])[:, -1], rtol=1e-9)
    # The weights of q, k, v and their biases, in two layers.
    assert sorted(tuple(tensor.shape) for tensor in kept.values()) == [(96,), (96,), (96, 32), (96, 32)]
    assert all(step._weights[key] is tensor for key, tensor in kept.items())
    assert len(step._weights) == len(kept)


@torch.inference_mode()
def test_a_step_under_autocast_keeps_nothing_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model("standard").float()
    caches = decoder.new_caches(3, 8)
    decoder.logits(TEXT[:, :5], caches=caches)
    seen = []

    def watched(*given: Any) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return one_step(*given)

    monkeypatch.setattr("headtohead.model.decoding.one_step", watched)
    step = Decoding(decoder, caches)
    step(TEXT[:, 5:6])
    with torch.autocast("cpu", torch.bfloat16):
        assert step(TEXT[:, 6:7]).dtype == torch.bfloat16
    assert seen == [(False, False), (True, False)]


def test_intermediate_results_are_not_cached() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    store: dict[tuple[int, ...], Tensor] = {}
    with weights_kept(store):
        assert joined(weights) is joined(weights)
        assert joined([2 * weight for weight in weights]).tolist() == [[2.0] * 3] * 4
    assert len(store) == 1
    assert joined(weights) is not joined(weights)


def test_a_model_that_cannot_be_captured_reports_why() -> None:
    mixed = model("(standard diagonal)*1")
    assert "diagonal does not support it" in graph_blocker(mixed, mixed.new_caches(1, 4))
    padded = model("standard")
    real = torch.ones(1, 4, dtype=torch.bool)
    assert "padded" in graph_blocker(padded, padded.new_caches(1, 4, padding=real))
    assert not graph_blocker(padded, padded.new_caches(1, 4))


@pytest.mark.parametrize(
    "name",
    [
        *("canon", "exclusive", "gated", "gated_delta", "gated_linear", "selective_state", "sharing"),
        *("standard", "value_residual"),
    ],
)
def test_graph_safe_is_not_inherited(name: str) -> None:
    kind = builtin_mechanisms()[name]
    mine = type("Mine", (kind,), {})  # a subclass may read the frame's start
    layers = [[Composed((class_term(one),))] * 2 for one in (kind, mine)]
    assert [Decoder(TINY, each, 0).graph_safe for each in layers] == [True, False]


def test_on_cpu_steps_run_eagerly() -> None:
    decoder = model("standard")
    caches = decoder.new_caches(1, 40)
    assert not isinstance(decoding(decoder, caches, 32), Decoding)


class Pretended:
    """Replaces torch.cuda: a graph whose replay runs the step again, as the device would."""

    def __init__(self, patch: pytest.MonkeyPatch, step: Decoding, fails: str = "") -> None:
        self.replays = 0

        @contextmanager
        def graph(made: object, stream: object) -> Iterator[None]:
            yield
            if fails:
                raise RuntimeError(f"{fails}\nand more")

        def replay(made: object) -> None:
            self.replays += 1
            step._graph.outputs.copy_(step._step(step._token))  # type: ignore[arg-type,union-attr]

        stream = SimpleNamespace(wait_stream=lambda other: None)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        patch.setattr(torch.cuda, "Stream", lambda device: stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(torch.cuda, "CUDAGraph", type("Graph", (), {"replay": replay}))
        step._able = True


@torch.inference_mode()
@pytest.mark.parametrize("fails", ["", "operation not permitted when stream is capturing"])
def test_a_step_is_captured_once_or_stays_eager(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, receive = model("sharing:tie=kv"), []
    whole, caches = decoder.logits(TEXT), decoder.new_caches(3, 12)
    decoder.logits(TEXT[:, :4], caches=caches)
    step = Decoding(decoder, caches, receive.append)
    device = Pretended(monkeypatch, step, fails)
    for place in range(4, 12):
        scores = step(TEXT[:, place : place + 1])
        assert torch.allclose(scores, whole[:, place], rtol=1e-9)
    assert device.replays == (0 if fails else 8)
    assert receive == ([f"decoding runs eagerly, CUDA graph capture failed: {fails}"] if fails else [])
