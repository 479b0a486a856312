"""Factored attention: the four arms in a whole model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Frame, Mechanism, Shape, seeded_draw
from headtohead.mechanisms.contract.counting import counted_flops
from headtohead.mechanisms.factorised import FactorisedOptions
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

FORMS = ("FAFO", "FACO", "CAFO", "CACO")
WIDTH, HEADS, TIME = 16, 4, 9


def build(arm: str, dtype: torch.dtype = torch.float64, bias: str = "none") -> Mechanism:
    shape = Shape(WIDTH, HEADS, 0, 1, 32, positions="none", bias=bias)
    mechanism = parse_layout(arm).pattern[0].build(shape).to(dtype)
    mechanism.initialise(seeded_draw(1, "test", 0.3))
    return mechanism


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, TIME, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("inner", [0, 6, WIDTH])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_t7_product_initial_values_make_the_four_arms_one_function(
    dtype: torch.dtype, tolerance: float, inner: int
) -> None:
    outputs = [
        build(f"factorised:form={form},inner={inner}", dtype)(inputs(dtype), Frame(time=TIME))
        for form in FORMS
    ]
    for output in outputs[1:]:
        assert (output - outputs[0]).abs().max() < tolerance * outputs[0].abs().max()


@pytest.mark.parametrize("inner", [0, 6])
def test_t7_gradients_of_the_factors_follow_from_the_collapsed_gradient(inner: int) -> None:
    """With W_QK = W_K^T W_Q and G its gradient: dL/dW_Q = W_K G, dL/dW_K = W_Q G^T; for W_OV = W_O W_V likewise."""
    factors, whole = (build(f"factorised:form={form},inner={inner}") for form in ("FAFO", "CACO"))
    for mechanism in (factors, whole):
        mechanism(inputs(), Frame(time=TIME)).square().sum().backward()
    q, k, v, o = (getattr(factors, name).weight for name in "qkvo")
    for head in range(HEADS):
        narrow = slice(head * factors.inner, (head + 1) * factors.inner)
        wide = slice(head * WIDTH, (head + 1) * WIDTH)
        g = whole.qk.weight.grad[wide]
        assert torch.allclose(q.grad[narrow], k[narrow] @ g, rtol=1e-9, atol=1e-12)
        assert torch.allclose(k.grad[narrow], q[narrow] @ g.T, rtol=1e-9, atol=1e-12)
        g = whole.ov.weight.grad[:, wide]
        assert torch.allclose(o.grad[:, narrow], g @ v[narrow].T, rtol=1e-9, atol=1e-12)
        assert torch.allclose(v.grad[narrow], o[:, narrow].T @ g, rtol=1e-9, atol=1e-12)


# Per token and layer, by part: parameters, projection FLOPs, mixing FLOPs per key, cache elements.
def table(form: str, d: int, heads: int, k: int) -> tuple[int, int, int, int]:
    factorised = (2 * heads * d * k, 4 * heads * d * k, 2 * heads * k, heads * k)
    collapsed = (heads * d * d, 2 * heads * d * d, 2 * heads * d, d)
    parts = [collapsed if letter == "C" else factorised for letter in (form[0], form[2])]
    parameters, projection, mixing, cache = (sum(column) for column in zip(*parts, strict=True))
    return parameters, projection, mixing, d if form == "CACO" else cache


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("width", "heads", "inner"), [(16, 4, 0), (16, 2, 0), (16, 2, 16), (64, 4, 24)])
def test_t7_parameters_flops_and_cache_equal_the_table(form: str, width: int, heads: int, inner: int) -> None:
    arm, context = f"factorised:form={form},inner={inner}", 16
    mechanism = parse_layout(arm).pattern[0].build(Shape(width, heads, positions="none", context=context))
    parameters, projection, mixing, cache = table(form, width, heads, inner or width // heads)
    assert sum(parameter.numel() for parameter in mechanism.parameters()) == parameters
    for mode in ("train", "prefill", "decode"):
        wanted = projection + mixing * context
        assert mechanism.flops(context, 1, mode).full == counted_flops(mechanism, context, 1, mode) == wanted
    assert sum(entry.bytes(1, 1, torch.bfloat16) for entry in mechanism.cache_spec()) == 2 * cache


def test_the_usual_cache_is_two_widths_and_one_where_both_are_collapsed() -> None:
    size = dataclasses.replace(SIZES["sharing-s"], layers=1)
    found = [
        Decoder.on_meta(size, parse_layout(f"factorised:form={form}").layers(1)).cache_bytes(
            1, 1, torch.bfloat16
        )
        for form in FORMS
    ]
    assert found == [4 * size.width] * 3 + [2 * size.width]


def test_two_heads_of_half_the_width_have_equal_parameters_in_all_forms() -> None:
    counts = {
        sum(
            parameter.numel()
            for parameter in parse_layout(f"factorised:form={form}")
            .pattern[0]
            .build(Shape(WIDTH, 2, positions="none"))
            .parameters()
        )
        for form in FORMS
    }
    assert counts == {4 * WIDTH**2}


@pytest.mark.parametrize("bias", ["none", "all"])
def test_fafo_is_the_standard_layer(bias: str) -> None:
    ours, theirs = build("factorised", bias=bias), build("standard", bias=bias)
    assert torch.equal(ours(inputs(), Frame(time=TIME)), theirs(inputs(), Frame(time=TIME)))


def test_biases_collapse_as_the_comments_say() -> None:
    """FAFO with biases equals CACO with bias W_K^T b_q in the scores and W_O b_v + b_o in the output."""
    factors, whole = build("factorised", bias="all"), build("factorised:form=CACO", bias="all")
    with torch.no_grad():
        for name in "qkvo":
            getattr(factors, name).bias.normal_(generator=torch.Generator().manual_seed(ord(name)))
        heads = factors.k.weight.unflatten(0, (HEADS, -1)), factors.q.bias.unflatten(0, (HEADS, -1))
        whole.qk.bias.copy_(torch.einsum("hkd,hk->hd", *heads).flatten())
        whole.ov.bias.copy_(factors.o.weight @ factors.v.bias + factors.o.bias)
    ours, theirs = (mechanism(inputs(), Frame(time=TIME)) for mechanism in (factors, whole))
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_tiny_initial_values_are_a_millionth_of_the_identity() -> None:
    whole, factors = build("factorised:form=CACO,init=tiny"), build("factorised:init=tiny")
    identity = torch.eye(WIDTH, dtype=torch.float64) * 1e-6
    for head in range(HEADS):
        wide = slice(head * WIDTH, (head + 1) * WIDTH)
        assert torch.allclose(whole.qk.weight[wide], identity, rtol=1e-6)
        assert torch.allclose(whole.ov.weight[:, wide], identity, rtol=1e-6)
    for name in "qkvo":
        assert torch.allclose(getattr(factors, name).weight, identity, rtol=1e-6)


def test_default_initial_values_fill_the_usual_range() -> None:
    weights = build("factorised:form=CACO,init=default").qk.weight.detach()
    edge = WIDTH**-0.5
    assert weights.abs().max() < edge
    assert float(weights.std()) == pytest.approx(edge / 3**0.5, rel=0.05)


def test_circuits_of_collapsed_matrices_are_those_of_their_factors() -> None:
    for form in FORMS:
        tags = {name: c.tag for c in build(f"factorised:form={form}").circuits() for name in c.parameters}
        assert all(tag == ("qk" if name[0] in "qk" else "ov") for name, tag in tags.items())


def test_rotary_positions_are_rejected() -> None:
    with pytest.raises(UserError, match="does not support positions=rope"):
        parse_layout("factorised:form=CACO").pattern[0].build(Shape(16, 4, positions="rope"))


def test_unknown_forms_are_rejected() -> None:
    with pytest.raises(UserError, match="did you mean 'FACO'"):
        FactorisedOptions(form="FAC0")


def test_labels_name_the_form() -> None:
    assert parse_layout("factorised:form=CACO,init=tiny").label == "CACO, tiny init"
