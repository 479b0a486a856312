"""Checks of level `accounted`: correct costs and circuits, and a fast path equal to the plain reference."""

from __future__ import annotations

import torch
from torch import Tensor

from headtohead.kernels import plain
from headtohead.mechanisms.contract.base import TAGS, Mechanism, Mode, circuit_fault
from headtohead.mechanisms.contract.counting import counted_flops
from headtohead.model.check.fixture import Fixture, require, require_close


def flops(bench: Fixture) -> None:
    """Declared matrix FLOPs per token equal those counted with the plain reference."""
    mechanism = bench.mechanism(torch.float32)
    modes: tuple[Mode, ...] = ("train", "prefill", "decode") if mechanism.decodable else ("train",)
    for mode in modes:
        for context in (7, 16):
            declared = mechanism.flops(context, 1, mode)
            counted = counted_flops(mechanism, context, 1, mode)
            require(
                abs(declared.full - counted) <= 1e-6 * max(counted, 1.0),
                f"flops() declares {declared.full:,.0f} per token for mode={mode}, context={context}; "
                f"{counted:,.0f} were counted",
            )
            causal, full = declared.causal, declared.full
            more = f"flops() declares more with a causal mask ({causal:,.0f}) than without ({full:,.0f})"
            require(0 <= causal <= full * (1 + 1e-9), more)


def circuits(bench: Fixture) -> None:
    """Every trainable parameter is in exactly one circuit with a known tag."""
    mechanism = bench.mechanism()
    groups = mechanism.circuits()
    fault = circuit_fault(groups, mechanism, TAGS)
    require(not fault, fault)
    for circuit in groups:
        good = circuit.follows is None or (circuit.tag == "own" and circuit.follows in TAGS)
        allowed = ", ".join(TAGS)
        require(good, f"only an own circuit can follow another, and only {allowed}; got '{circuit.follows}'")


def fast_path(bench: Fixture) -> None:
    """The fast path has the outputs and gradients of the plain reference."""
    mechanism = bench.mechanism()
    if not mechanism.writes:
        return
    for real in (None, _left_padding()) if mechanism.supports.padding else (None,):
        fast, fast_gradients = _outputs(bench, mechanism, real)
        with plain():
            slow, slow_gradients = _outputs(bench, mechanism, real)
        require_close(fast, slow, "the fast path's output differs from the plain reference (by {error})")
        largest = max(float(gradient.abs().max()) for gradient in slow_gradients.values())
        for name, gradient in slow_gradients.items():
            words = f"the fast path's gradient of {name} differs from the plain reference (by {{error}})"
            require_close(fast_gradients[name], gradient, words, least=1e-3 * largest)


def attention_map(bench: Fixture) -> None:
    """An attention map, if any, is (batch, heads, time, time), finite, causal, and of its declared kind."""
    mechanism, x = bench.mechanism(), bench.inputs()
    with torch.no_grad():
        weights = mechanism.attention_map(x, bench.frame(x))
    if weights is None:
        return
    time = x.shape[1]
    good = weights.ndim == 4 and len(weights) == len(x) and weights.shape[-2:] == (time, time)
    require(good, f"attention_map returned {tuple(weights.shape)}, not (batch, heads, time, time)")
    require(bool(torch.isfinite(weights).all()), "attention_map returns values that are not finite")
    require(bool((weights.triu(1) == 0).all()), "attention_map has weight on future tokens")
    _require_kind(mechanism, weights)


def _require_kind(mechanism: Mechanism, weights: Tensor) -> None:
    """Check that rows are distributions, or sum to at most 1 if substochastic, or are of any sign if signed."""
    if mechanism.signed:
        require(not mechanism.substochastic, "signed and substochastic exclude each other; set one of them")
        return
    require(bool((weights >= 0).all()), "attention_map has negative weights; set signed = True")
    sums = weights.sum(-1)
    if mechanism.substochastic:
        low, high = float(sums.min()), float(sums.max())
        good = low > 0 and high < 1 + 1e-9
        words = f"it declares substochastic, but rows of attention_map sum to {low:.6g} to {high:.6g}, not above 0 to 1"
        require(good, words)
        return
    rows = (sums - 1).abs() < 1e-9
    words = "rows of attention_map do not sum to 1; set substochastic = True if they sum to less, or signed = True"
    require(bool((rows | (sums == 0)).all()), words)


def compiles(bench: Fixture) -> None:
    """torch.compile captures the forward without graph breaks and returns the same output."""
    mechanism, x = bench.mechanism(torch.float32), bench.inputs(dtype=torch.float32)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(mechanism, fullgraph=True, backend="aot_eager")
        output = compiled(x, bench.frame(x))
    except torch._dynamo.exc.TorchDynamoException as problem:
        first = next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        require(False, f"torch.compile breaks the graph: {first}")
    words = "the compiled forward differs from the eager one (by {error})"
    require_close(output, bench.run(mechanism, x), words, 1e-4)


def _outputs(bench: Fixture, mechanism: Mechanism, real: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    x = bench.inputs().requires_grad_()
    output = bench.run(mechanism, x, padding=real)
    if real is not None:
        output = output[real]
    names = ["x", *(name for name, _ in mechanism.named_parameters())]
    weights = bench.inputs(seed=8)
    score = (output * (weights if real is None else weights[real])).sum()
    found = torch.autograd.grad(score, (x, *mechanism.parameters()), allow_unused=True)
    return output.detach(), {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def _left_padding() -> Tensor:
    real = torch.ones(3, 11, dtype=torch.bool)
    real[0, :3] = False
    return real
