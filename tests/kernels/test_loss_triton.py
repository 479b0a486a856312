"""The loss kernel in Triton's interpreter against the plain reference: values and gradients, odd sizes, extremes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headtohead.kernels import path
from headtohead.kernels.matmul import loss
from headtohead.kernels.matmul import loss_triton as loss_rows
from tests.compare import assert_close, named


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("vocabulary", "line", "inputs"), [(257, 64, 2), (50, 1, 3), (128, 64, 2), (300, 128, 3)]
)
def test_the_kernel_is_the_definition(
    vocabulary: int, line: int, inputs: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_rows, "BLOCK", 64)
    monkeypatch.setattr(loss, "_LINE", line)
    generator = torch.Generator().manual_seed(0)
    shapes = ((20, 6), (vocabulary, 6), (vocabulary,))
    given = [torch.randn(*shape, generator=generator) for shape in shapes]
    given[0][3] *= 1e4
    targets = torch.randint(0, vocabulary, (20,), generator=generator)
    targets[::3] = -1
    assert path.triton_serves(given[0])
    results = []
    for function in (loss.linear_cross_entropy, loss.linear_cross_entropy_plain):
        leaves = [tensor.clone().requires_grad_() for tensor in given[:inputs]]
        objective, nats = function(leaves[0], leaves[1], targets, smoothing, *leaves[2:])
        (3 * objective).backward()
        names = ["objective", "nats", *("dx", "dweight", "dbias")[:inputs]]
        results.append(named([objective, nats, *(leaf.grad for leaf in leaves)], names))  # type: ignore[list-item]
    assert_close(*results, 1e-5, by="norm")
    each = loss.token_nats(given[0], given[1], targets)
    assert (each[targets < 0] == 0).all()
    plain = loss.linear_cross_entropy_plain(given[0], given[1], targets)[1]
    assert torch.allclose(each.sum() / (targets >= 0).sum(), plain)
