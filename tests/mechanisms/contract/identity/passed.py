"""Objects passed in Python: pairs that compute something else, each made by two calls of one factory.

`python -m tests.mechanisms.contract.identity.passed` prints their digests.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import headtohead as h2h
from headtohead.mechanisms.contract.identity.object_digest import object_digest

OPTIONS = "@h2h.score\ndef mine(s, head, i, j, cap: float = {0}):\n    return cap * torch.tanh(s / cap)"
CONSTANTS = "class mine(h2h.Mechanism):\n    def forward(self, x, frame):\n        return x * {0}"
NUMBER = "CAP = {0}\n@h2h.score\ndef mine(s, head, i, j):\n    return CAP * torch.tanh(s / CAP)"
FUNCTION = "def f(x):\n    return x * {0}\nclass mine(h2h.Mechanism):\n    def forward(self, x, frame):\n        return f(x)"
BASE = (
    "class Base(h2h.Mechanism):\n    def forward(self, x, frame):\n        return x * {0}\n"
    "class mine(Base):\n    pass"
)
MODULE = (
    "import types\nhelper = types.ModuleType('helper')\nhelper.cap = {0}\nhelper.other = object\n"
    "@h2h.score\ndef mine(s, head, i, j):\n    return s.clamp_max(helper.cap)"
)


def typed(text: str, number: float) -> Any:
    """Return `mine` of a program without a file, as in a notebook."""
    scope: dict[str, Any] = {"h2h": h2h, "torch": torch, "__name__": "__main__"}
    exec(compile(text.format(number), "<stdin>", "exec"), scope)
    return scope["mine"]


def score(c: float = 30.0, init: float = 0.0, normalize: str = "softmax") -> Any:
    @h2h.score(normalize=normalize)
    def cap(s, head, i, j, t: h2h.Learned = h2h.learned("heads", init=init)):  # type: ignore[no-untyped-def]  # noqa: B008
        return c * torch.tanh(s / c) + t[head]

    return cap


def holder(value: Any) -> type[h2h.Mechanism]:
    """Return a class that reads a value of the function around it."""

    class Mine(h2h.Mechanism):
        def forward(self, x: torch.Tensor, frame: Any) -> Any:
            return x, value

    return Mine


def owner(value: Any) -> type[h2h.Mechanism]:
    """Return a class with a value among its members."""

    class Mine(h2h.Mechanism):
        act = value

        def forward(self, x: torch.Tensor, frame: Any) -> Any:
            return self.act(x)

    return Mine


def default(c: float) -> type[h2h.Mechanism]:
    class Mine(h2h.Mechanism):
        def forward(self, x: torch.Tensor, frame: Any, c: float = c) -> torch.Tensor:
            return c * x

    return Mine


def keyword(c: float) -> type[h2h.Mechanism]:
    class Mine(h2h.Mechanism):
        def forward(self, x: torch.Tensor, frame: Any, *, c: float = c) -> torch.Tensor:
            return c * x

    return Mine


def branch(flag: bool) -> type[h2h.Mechanism]:
    if flag:

        class Mine(h2h.Mechanism):
            def forward(self, x: torch.Tensor, frame: Any) -> torch.Tensor:
                return x
    else:

        class Mine(h2h.Mechanism):  # type: ignore[no-redef]
            def forward(self, x: torch.Tensor, frame: Any) -> torch.Tensor:
                return -x

    return Mine


def double(x: torch.Tensor, frame: Any = None) -> torch.Tensor:
    return x + x


def square(x: torch.Tensor, frame: Any = None) -> torch.Tensor:
    return x * x


class Twice:
    """Two methods of one object, and a number without which it is not described."""

    __slots__ = ("number",)

    def __init__(self, number: float = 2.0) -> None:
        self.number = number

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.number


class Net(nn.Module):
    """A module with an attribute that its text does not show, a buffer and weights that each run draws again."""

    def __init__(self, held: Any = 1.0, buffer: float = 1.0, weight: float = 1.0) -> None:
        super().__init__()
        self.held = held
        self.register_buffer("scale", torch.full((2,), buffer))
        self.linear = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))
        nn.init.constant_(self.linear.weight, weight)
        nn.init.zeros_(self.linear.bias)


def gained(gain: float) -> type[h2h.Mechanism]:
    """Return a module whose vector is not drawn again, wrapped."""
    net = Net()
    nn.init.constant_(net.gain, gain)
    return h2h.wrap(net)


def shared(same: bool) -> type[h2h.Mechanism]:
    """Return a class that reads three functions, one of them twice."""
    f, g = (functools.partial(torch.mul, other=2.0) for _ in range(2))
    return holder([f, g, f if same else g])


LAMBDAS = [lambda x: x + 1, lambda x: x + 2]  # on one line
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "closure of a score": (lambda: score(30.0), lambda: score(0.001)),
    "learned tensor": (lambda: score(), lambda: score(init=1.0)),
    "normalization": (lambda: score(), lambda: score(normalize="sigmoid")),
    "number of a class": (lambda: owner(1.0), lambda: owner(2.0)),
    "tuple of a class": (lambda: owner((1.0, 2.0)), lambda: owner((1.0, 3.0))),
    "list of a class": (lambda: owner([1.0]), lambda: owner([2.0])),
    "dict of a class": (lambda: owner({"a": 1.0}), lambda: owner({"a": 2.0})),
    "builtin of a class": (lambda: owner(staticmethod(torch.tanh)), lambda: owner(staticmethod(torch.relu))),
    "function of a class": (lambda: owner(staticmethod(double)), lambda: owner(staticmethod(square))),
    "property of a class": (lambda: owner(property(double)), lambda: owner(property(square))),
    "cached property": (
        lambda: owner(functools.cached_property(double)),
        lambda: owner(functools.cached_property(square)),
    ),
    "default argument": (lambda: default(1.0), lambda: default(2.0)),
    "keyword default": (lambda: keyword(1.0), lambda: keyword(2.0)),
    "dynamic class": (
        lambda: type("Mine", (h2h.Mechanism,), {"forward": double}),
        lambda: type("Mine", (h2h.Mechanism,), {"forward": square}),
    ),
    "branches": (lambda: branch(True), lambda: branch(False)),
    "local base": (lambda: type("Mine", (default(1.0),), {}), lambda: type("Mine", (default(2.0),), {})),
    "option without a file": (lambda: typed(OPTIONS, 30.0), lambda: typed(OPTIONS, 1.0)),
    "constant without a file": (lambda: typed(CONSTANTS, 30.0), lambda: typed(CONSTANTS, 1.0)),
    "global number": (lambda: typed(NUMBER, 30.0), lambda: typed(NUMBER, 1.0)),
    "global function": (lambda: typed(FUNCTION, 30.0), lambda: typed(FUNCTION, 1.0)),
    "global base": (lambda: typed(BASE, 30.0), lambda: typed(BASE, 1.0)),
    "number of a module": (lambda: typed(MODULE, 30.0), lambda: typed(MODULE, 1.0)),
    "partial": (
        lambda: holder(functools.partial(torch.clamp, max=1.0)),
        lambda: holder(functools.partial(torch.clamp, max=2.0)),
    ),
    "bound method": (lambda: holder(Twice().add), lambda: holder(Twice().multiply)),
    "slot of an object": (lambda: holder(Twice(2.0)), lambda: holder(Twice(3.0))),
    "lambdas of one line": (lambda: holder(LAMBDAS[0]), lambda: holder(LAMBDAS[1])),
    "repeated object": (lambda: shared(True), lambda: shared(False)),
    "cached function": (
        lambda: holder(functools.cache(double)),
        lambda: holder(functools.cache(square)),
    ),
    "tensor": (lambda: holder(torch.tensor([1.0])), lambda: holder(torch.tensor([2.0]))),
    "dtype of a tensor": (
        lambda: holder(torch.zeros(2)),
        lambda: holder(torch.zeros(2, dtype=torch.int32)),
    ),
    "set of texts": (lambda: holder({"a", "b", "c", "d"}), lambda: holder({"a", "b", "c", "e"})),
    "wrapped number": (lambda: h2h.wrap(Net(2.0)), lambda: h2h.wrap(Net(3.0))),
    "wrapped tuple": (lambda: h2h.wrap(Net((1, 2))), lambda: h2h.wrap(Net((1, 3)))),
    "wrapped function": (lambda: h2h.wrap(Net(double)), lambda: h2h.wrap(Net(square))),
    "wrapped buffer": (lambda: h2h.wrap(Net(buffer=1.0)), lambda: h2h.wrap(Net(buffer=2.0))),
    "wrapped vector": (lambda: gained(1.0), lambda: gained(2.0)),
    "start of a wrapped module": (lambda: h2h.wrap(Net()), lambda: h2h.wrap(Net(), own_start=True)),
    "own weights": (
        lambda: h2h.wrap(Net(weight=1.0), own_start=True),
        lambda: h2h.wrap(Net(weight=2.0), own_start=True),
    ),
}


def digests() -> dict[str, list[str]]:
    """Return the digests of all pairs."""
    return {name: [object_digest(make()) for make in pair] for name, pair in PAIRS.items()}


if __name__ == "__main__":
    print(json.dumps(digests()))
