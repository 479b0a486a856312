"""Objects passed in Python have one identity if they compute the same, in every process, and another if they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import headtohead as h2h
from headtohead.mechanisms.contract.identity.object_digest import object_digest
from headtohead.model.layout import parse_layout
from tests.mechanisms.contract.identity.passed import PAIRS, Net, default, digests


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_computed_is_the_identity(name: str) -> None:
    make, other = PAIRS[name]
    assert object_digest(make()) == object_digest(make())
    assert object_digest(make()) != object_digest(other())


def test_another_process_gives_the_same_identities() -> None:
    command = [sys.executable, "-m", "tests.mechanisms.contract.identity.passed"]
    settings = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(h2h.__file__).parents[1])}
    found = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    # There, classes of the file itself belong to the module `__main__`.
    assert json.loads(found.stdout) == digests()


def test_weights_that_each_run_draws_again_are_no_part_of_the_identity() -> None:
    one, other = (object_digest(h2h.wrap(nn.Linear(4, 4))) for _ in range(2))
    assert one == other
    net = Net(weight=1.0)
    h2h.wrap(net)
    assert bool((net.linear.weight == 1).all())


def test_an_identity_does_not_change_when_the_class_is_used() -> None:
    kind = default(1.0)
    before = object_digest(kind)
    term = parse_layout(kind).pattern[0].terms[0]
    assert term.source == before
    assert parse_layout(kind).pattern[0].terms[0].source == before
    assert kind.__annotations__ == {}  # created when it is read
    assert object_digest(kind) == before


def test_a_compiled_function_is_identified_by_the_function() -> None:
    def compiled(factor: float) -> str:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        class Mine(h2h.Mechanism):
            act = staticmethod(torch.compile(scaled, backend="eager"))

        return object_digest(Mine)

    assert compiled(1.0) == compiled(1.0) != compiled(2.0)
