"""When models are compiled, and that seeds of one arm share a compiled graph."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
from torch._dynamo.utils import counters

from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.training.acceleration import compiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("name", "pays"), [("nano", False), ("1m", False), ("5m", True), ("60m", True)])
def test_models_are_compiled_on_a_gpu_from_5m_on(
    name: str, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert compiles(None, SIZES[name], CUDA) is pays
    assert compiles(None, SIZES[name], CPU) is False
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compiles(None, SIZES[name], CUDA) is False


def test_an_explicit_setting_overrides_the_default() -> None:
    assert compiles(True, SIZES["nano"], CPU) is True
    assert compiles(False, SIZES["60m"], CUDA) is False


def test_another_seed_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    tokens, graphs = torch.zeros(2, SIZES["nano"].context, dtype=torch.long), []
    for seed, arm in ((1, "standard"), (2, "standard"), (1, "sharing:tie=kv"), (3, "standard")):
        model = Decoder(SIZES["nano"], parse_layout(arm).layers(2), seed)
        model.compile_hidden()
        model.hidden(tokens)
        graphs.append(counters["stats"]["unique_graphs"])
    assert [count - graphs[0] for count in graphs] == [0, 0, 1, 1]
