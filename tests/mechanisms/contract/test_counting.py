"""Counted FLOPs use the convention of the declared ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headtohead.mechanisms.contract.base import Flops
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import find_size

ARMS = Path(__file__).parents[1] / "user_arms.py"


def on_meta(arm: str, context: int) -> Decoder:
    size = dataclasses.replace(find_size("nano"), context=context, layers=1)
    return Decoder.on_meta(size, parse_layout(arm).layers(1))


def cost(arm: str, context: int) -> Flops:
    return on_meta(arm, context).flops(context)


@pytest.mark.parametrize("context", [128, 1024])
@pytest.mark.parametrize("name", ["Copy", "Fused", "Masked", "LooksAtValues"])
def test_a_copy_of_standard_costs_what_standard_declares(name: str, context: int) -> None:
    counted, declared = cost(f"{ARMS}:{name}", context), cost("standard", context)
    assert counted.causal == pytest.approx(declared.causal, rel=1e-9)
    assert counted.full == declared.full


def test_code_without_attention_costs_the_same_at_every_context() -> None:
    example = f"{ARMS.parents[2] / 'examples' / 'prefix_mean.py'}:PrefixMean"
    assert cost(example, 128) == cost(example, 1024) == cost("prefix_mean", 128)


def test_a_count_of_masked_windows_is_an_upper_bound() -> None:
    counted, declared = cost(f"{ARMS}:Windowed", 128), cost("standard:window=8", 128)
    assert counted.causal == pytest.approx(cost("standard", 128).causal)
    assert counted.causal > declared.causal


def test_a_declaration_that_the_count_does_not_confirm_is_not_used() -> None:
    assert cost(f"{ARMS}:Understated", 128) == cost("standard", 128)
    assert on_meta(f"{ARMS}:Understated", 128).flops_source(128) == "counted"


def test_code_for_one_context_alone_is_charged_for_the_whole_map() -> None:
    found = cost(f"{ARMS}:OneContext", 128)
    assert found.causal == found.full == cost("standard", 128).full


@pytest.mark.parametrize(
    ("arm", "source"),
    [("standard", "declared"), (f"{ARMS}:Copy", "counted"), (f"(standard {ARMS}:Copy)", "counted")],
    ids=["builtin", "user", "mixed"],
)
def test_a_model_reports_how_its_flops_were_obtained(arm: str, source: str) -> None:
    size = dataclasses.replace(find_size("nano"), layers=2)
    assert Decoder.on_meta(size, parse_layout(arm).layers(2)).flops_source(128) == source
