"""Rotation, gate and norm in Triton's interpreter against plain references: values and gradients, odd sizes, any strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from headtohead.kernels.path import stacking
from headtohead.kernels.pointwise import norm_triton as norm_kernel
from headtohead.kernels.pointwise.norm import rms_norm, rms_norm_plain
from headtohead.kernels.pointwise.rope_swiglu_triton import apply_rope, gate
from headtohead.kernels.pointwise.rotary import rotary_table, rotate_plain
from tests.compare import agree, assert_close, named

pytestmark = pytest.mark.usefixtures("interpreted")


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("inverse", [False, True], ids=("forth", "back"))
@pytest.mark.parametrize("strided", [False, True], ids=("whole", "strided"))
@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (1, 1, 1, 2), (2, 4, 40, 8)])
def test_rotation_equals_its_plain_reference(shape: tuple[int, ...], strided: bool, inverse: bool) -> None:
    batch, heads, time, dim = shape
    table = rotary_table(torch.arange(time), dim, 10_000.0, torch.float32)
    joined = draw(batch, time, 3, heads, dim)
    x = joined[:, :, 1].transpose(1, 2) if strided else joined[:, :, 0].permute(0, 2, 1, 3).contiguous()
    agree(
        lambda x: apply_rope(x, table, inverse),
        lambda x: rotate_plain(x, table, inverse),
        (x.detach().requires_grad_(),),
        1e-6,
    )


def test_the_operators_pass_opcheck() -> None:
    table = rotary_table(torch.arange(5), 6, 10_000.0, torch.float32)
    torch.library.opcheck(apply_rope, (draw(2, 3, 5, 6).requires_grad_(), table, False))
    torch.library.opcheck(gate, (draw(7, 26).requires_grad_(),))
    torch.library.opcheck(
        norm_kernel.norm_rows, (draw(2, 4, 6).requires_grad_(), draw(2, 6).requires_grad_(), 1e-6)
    )


@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (9, 600)])
def test_the_gate_equals_its_plain_reference(shape: tuple[int, int]) -> None:
    rows, hidden = shape
    joined = 5 * draw(rows, 2 * hidden)
    joined[0, 0], joined[-1, -1] = -200.0, 200.0
    agree(
        lambda joined: gate(joined),
        lambda joined: F.silu(joined[:, :hidden]) * joined[:, hidden:],
        (joined.requires_grad_(),),
        1e-6,
    )
    strided = torch.stack((joined.detach(), joined.detach()), -1)[..., 0]
    assert torch.equal(gate(strided), gate(joined))


def turned(x: Tensor) -> Tensor:
    return apply_rope(x, rotary_table(torch.arange(5), 6, 10_000.0, torch.float32), False)


@pytest.mark.parametrize("kind", ["rope", "gate"])
def test_a_population_equals_its_rows(kind: str) -> None:
    function: Callable[[Tensor], Tensor] = turned if kind == "rope" else gate
    given = draw(3, 2, 5, 2, 6).transpose(2, 3) if kind == "rope" else draw(3, 7, 26)
    given = given.requires_grad_()
    together, apart = torch.vmap(function)(given), torch.stack([function(part) for part in given])
    assert torch.equal(together, apart)
    weights = torch.linspace(-1, 1, apart.numel()).view(apart.shape)
    for axis in (0, 1):
        assert torch.equal(torch.vmap(function, in_dims=axis)(given.movedim(0, axis)), apart)
    grads = [torch.autograd.grad((out * weights).sum(), given)[0] for out in (together, apart)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (3, 2, 5, 6), (2, 3, 7, 32), (2, 2, 2, 100)])
def test_the_norm_of_a_population_equals_its_plain_reference(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_kernel, "_NUMBERS", 64)  # several blocks and programs, the last ones not full
    monkeypatch.setattr(norm_kernel, "_PROGRAMS", 2)
    x, gain = 3 * draw(*shape), draw(shape[0], shape[-1]).requires_grad_()
    x[0, 0, 0] = 0.0
    x[-1, -1, -1] *= 1e4
    x.requires_grad_()
    weights = torch.linspace(-1, 1, x.numel()).view(x.shape)
    with stacking():
        ours = torch.vmap(lambda x, gain: rms_norm(x, gain, 1e-6))(x, gain)
    theirs = torch.stack([rms_norm_plain(one, its, 1e-6) for one, its in zip(x, gain, strict=True)])
    names = ["output", "dx", "dgain"]
    found = [
        named([out, *torch.autograd.grad((out * weights).sum(), (x, gain))], names) for out in (ours, theirs)
    ]
    assert_close(*found, 2e-6, by="norm")
