"""A training step reaches PyTorch's attention in few Python frames; `docs/architecture.md` lists them."""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import walk_stack
from types import CodeType
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.nn import functional as F

import headtohead
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer

PACKAGE = Path(headtohead.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "architecture.md"
MOST = 10


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[CodeType]:
    """The frames of the first call of PyTorch's attention in a step of `standard`, the trainer's step first."""
    found: list[CodeType] = []
    attention = F.scaled_dot_product_attention

    def recorded(*given: Any, **named: Any) -> Tensor:
        if not found:
            found.extend(frame.f_code for frame, _ in walk_stack(sys._getframe(1)))
            found.reverse()
        return attention(*given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    size = SIZES["nano"]
    tokens = np.random.default_rng(0).integers(0, 250, 4096).astype(np.uint8)
    windows = Windows(Split(tokens, np.array([0], dtype=np.uint64), len(tokens)), size.context, 0)
    settings = TrainSettings(tokens=4 * size.context, batch=2 * size.context)
    Trainer(Decoder(size, parse_layout("standard").layers(size.layers)), windows, settings)._one_step()
    return found[found.index(Trainer._one_step.__code__) :]


def ours(code: CodeType) -> bool:
    """Return whether a frame is of the package, not PyTorch's part of a module call."""
    return PACKAGE in Path(code.co_filename).parents


def names(frames: list[CodeType]) -> list[str]:
    """Return `file: function` of each frame of the package."""
    own = [code for code in frames if ours(code)]
    return [f"{Path(code.co_filename).relative_to(PACKAGE).as_posix()}: {code.co_qualname}" for code in own]


def test_a_step_reaches_attention_in_ten_calls(frames: list[CodeType]) -> None:
    assert len(names(frames)) <= MOST, "\n".join(names(frames))


def test_pytorch_adds_only_its_two_frames_per_module_call(frames: list[CodeType]) -> None:
    rest = [code.co_name for code in frames if not ours(code)]
    assert rest == ["_wrapped_call_impl", "_call_impl"] * 3, "the model, a block and its mechanism"


def test_the_frames_are_those_in_the_documentation(frames: list[CodeType]) -> None:
    text = DOCUMENT.read_text()
    listed = text.split("From the step to PyTorch's attention:\n\n", 1)[1].split("\n\n", 1)[0]
    assert [line.strip() for line in listed.splitlines()] == names(frames)
