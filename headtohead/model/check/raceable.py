"""Checks of level `raceable`: the requirements of a fair comparison."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.options import changed_options
from headtohead.model.check.fixture import TIME, Fixture, relative, require, require_close
from headtohead.model.decoder import Decoder

# Messages shared with the causality gate (gate.py).
NEIGHBORS = "a sequence's output depends on its batch neighbors (by {error})"
SECOND_TIME = "the same input gives another output the second time"
PADDING = (
    "{side} padding changes the outputs of real tokens (by {error}); use frame.padding, or declare "
    "supports = Supports(padding=False)"
)


# Autocast may change outputs and gradients by this multiple of the change from rounding the parameters to bf16 in float32
# arithmetic, and always by _LEAST. Measured over every setting of the built-in mechanisms: at most 1.9 times for
# outputs and 2.4 times for gradients. A fixed tolerance fails where the function itself is steep: the norm of
# gated_linear changes by 10 % when its parameters are rounded.
_TIMES = 4.0
_LEAST = 0.02


def future_words(cut: int, error: float) -> str:
    """Return the message for a leak."""
    return f"it sees the future: changing tokens from position {cut} on changes outputs before it (by {error:.1e})"


def shape(bench: Fixture) -> None:
    """The output has the shape (batch, time, width) and the dtype of x."""
    x = bench.inputs()
    mechanism = bench.mechanism()
    output = bench.run(mechanism, x)
    require(isinstance(output, Tensor), f"forward returned a {type(output).__name__}, not a tensor")
    require(output.shape == x.shape, f"forward returned shape {tuple(output.shape)} for x {tuple(x.shape)}")
    require(output.dtype == x.dtype, f"forward returned {output.dtype} for x {x.dtype}")
    usable = bool(torch.isfinite(output).all())
    require(usable, "forward returns values that are not finite on ordinary inputs")
    silent = bool((output == 0).all())
    require(mechanism.writes or silent, "it declares writes = False, but its output is not zero")


def causal(bench: Fixture) -> None:
    """Changing future tokens leaves earlier outputs bitwise unchanged."""
    mechanism, x = bench.mechanism(), bench.inputs()
    before = bench.run(mechanism, x)
    for cut in (1, 4, TIME - 1):
        changed = x.clone()
        changed[:, cut:] = bench.inputs(seed=6)[:, cut:] * 3
        after = bench.run(mechanism, changed)
        require(
            torch.equal(before[:, :cut], after[:, :cut]),
            future_words(cut, relative(after[:, :cut], before[:, :cut])),
        )
        words = f"the first {cut} outputs depend on how many tokens follow (by {{error}})"
        require_close(bench.run(mechanism, x[:, :cut]), before[:, :cut], words)
    # Every cut of a longer context, one for each sequence: a leak may be in a few positions only, such as the ends of chunks.
    time = bench.shape.context
    x = bench.inputs(1, time).expand(time - 1, -1, -1).clone()
    cuts = torch.arange(1, time)
    later = torch.arange(time) >= cuts.unsqueeze(-1)
    changed = torch.where(later.unsqueeze(-1), bench.inputs(1, time, seed=6) * 3, x)
    before, after = (bench.run(mechanism, inputs) for inputs in (x, changed))
    moved = (before != after).any(-1) & ~later
    if moved.any():
        row = int(moved.any(-1).int().argmax())
        kept = slice(row, row + 1), slice(0, int(cuts[row]))
        require(False, future_words(int(cuts[row]), relative(after[kept], before[kept])))


def deterministic(bench: Fixture) -> None:
    """The same seed gives the same initial values, and the same input the same output, bitwise."""
    first, second, x = bench.mechanism(), bench.mechanism(), bench.inputs()
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        require(torch.equal(one, other), f"initial values of {name} differ between two builds with one seed")
    output = bench.run(first, x)
    require(torch.equal(output, bench.run(first, x)), SECOND_TIME)
    require(torch.equal(output, bench.run(second, x)), "two builds with one seed give different outputs")
    pairs = zip(first.parameters(), bench.mechanism(seed=4).parameters(), strict=True)
    same = [torch.equal(one, other) for one, other in pairs if one.ndim >= 2]
    # An option may request a fixed initial value, such as the identity; the default may not.
    fixed = bool(same) and all(same) and not changed_options(bench.composed.base.options)
    require(not fixed, "initial values do not depend on the seed, so all seeds would be the same run")


def neighbours(bench: Fixture) -> None:
    """A sequence's output does not depend on the others in its batch."""
    mechanism, x = bench.mechanism(), bench.inputs()
    together = bench.run(mechanism, x)
    for row in range(len(x)):
        own = slice(row, row + 1)
        require_close(bench.run(mechanism, x[own]), together[own], NEIGHBORS)


def padding(bench: Fixture) -> None:
    """Padding on either side does not affect the real tokens."""
    mechanism, x = bench.mechanism(), bench.inputs()
    if not mechanism.supports.padding:
        return
    wanted = bench.run(mechanism, x)
    filler = bench.inputs(time=4, seed=9) * 5
    for side, parts in (("right", (x, filler)), ("left", (filler, x))):
        real = torch.ones(len(x), TIME + 4, dtype=torch.bool)
        kept = slice(0, TIME) if side == "right" else slice(4, TIME + 4)
        real[:, TIME:] = False
        real = real if side == "right" else real.flip(1)
        joined = torch.cat(parts, 1)
        embeddings = torch.cat([part.flip(-1) for part in parts], 1)
        output = mechanism(joined, bench.frame(joined, padding=real, embeddings=embeddings))[:, kept]
        require_close(output, wanted, PADDING.replace("{side}", side))


def bidirectional(bench: Fixture) -> None:
    """If bidirectional models are supported, `frame.causal` has an effect."""
    mechanism, x = bench.mechanism(), bench.inputs()
    if not mechanism.supports.bidirectional:
        return
    changed = x.clone()
    changed[:, 1] += 1.0

    def moved(place: int, causal: bool) -> bool:
        before, after = (bench.run(mechanism, inputs, causal=causal)[:, place] for inputs in (x, changed))
        return not torch.equal(before, after)

    # A mechanism that does not mix tokens has no direction.
    require(
        moved(0, causal=False) or not moved(2, causal=True),
        "frame.causal = False has no effect at the first token; use it, or declare "
        "supports = Supports(bidirectional=False)",
    )


def gradients(bench: Fixture) -> None:
    """Analytic gradients equal numerical ones, for x and every parameter, and every parameter is used."""
    mechanism = bench.mechanism()
    if not mechanism.writes:
        return
    names = [name for name, parameter in mechanism.named_parameters() if parameter.requires_grad]
    values = [parameter.detach().clone() for parameter in mechanism.parameters() if parameter.requires_grad]
    if not names and not bench.run(mechanism, bench.inputs(batch=2, time=4)).any():
        return  # a control without output and parameters has no gradient

    # A mechanism that hides near keys needs more tokens; every other is checked on four, which is faster.
    for time in (4, TIME, bench.shape.context):
        inputs, score, found = _objective(bench, mechanism, names, values, time)
        used = {name for name, one in zip(("x", *names), found, strict=True) if one is not None and one.any()}
        if used | set(mechanism.idle) >= {"x", *names}:
            break
    _require_gradients(mechanism, names, inputs, score, found, directions=3)
    if time < TIME:  # an error may begin after a window or chunk of more than four tokens
        longer = _objective(bench, mechanism, names, values, TIME)
        _require_gradients(mechanism, names, *longer, directions=1)


def _objective(
    bench: Fixture, mechanism: Mechanism, names: list[str], values: list[Tensor], time: int
) -> tuple[list[Tensor], Callable[..., Tensor], tuple[Tensor | None, ...]]:
    """Return x and the parameters, a number as a function of them, and its gradients."""
    x, weights, embeddings = (bench.inputs(batch=2, time=time, seed=seed) for seed in (5, 8, 7))

    def score(x: Tensor, *values: Tensor) -> Tensor:
        frame = bench.frame(x, embeddings=embeddings)
        output = functional_call(mechanism, dict(zip(names, values, strict=True)), (x, frame))
        return (output * weights).sum()

    inputs = [tensor.requires_grad_() for tensor in (x, *values)]
    number = score(*inputs)
    require(number.requires_grad, "the output has no gradient at all")
    return inputs, score, torch.autograd.grad(number, inputs, allow_unused=True)


def _require_gradients(
    mechanism: Mechanism,
    names: list[str],
    inputs: list[Tensor],
    score: Callable[..., Tensor],
    found: tuple[Tensor | None, ...],
    directions: int,
) -> None:
    """Check the gradients of x and every parameter: they exist, are finite, not zero, and equal finite differences."""
    largest = max(float(gradient.norm()) for gradient in found if gradient is not None)
    # Along a few random directions instead of every coordinate: the same evidence in a hundredth of the time.
    for place, (name, gradient) in enumerate(zip(("x", *names), found, strict=True)):
        require(gradient is not None, f"no gradient reaches {name}")
        assert gradient is not None
        require(bool(torch.isfinite(gradient).all()), f"the gradient of {name} is not finite")
        # A gradient that vanishes everywhere never trains its parameter: the path is detached or unused.
        require(
            bool(gradient.abs().max() > 0) or name in mechanism.idle,
            f"the gradient of {name} is zero everywhere; is its path detached?",
        )
        for seed in range(0 if mechanism.singular else directions):
            _require_slope(score, inputs, place, gradient, largest, name, seed)


def _require_slope(
    score: Callable[..., Tensor],
    inputs: list[Tensor],
    place: int,
    gradient: Tensor,
    largest: float,
    name: str,
    seed: int,
) -> None:
    """Check the slope along one random direction; below a millionth of the norm `largest`, everything is noise."""
    tensor = inputs[place]
    direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)
    analytic, norm = float((gradient * direction).sum()), float(direction.norm())
    # A norm has high curvature where its input is small: the first step is too long there, so try a finer one.
    for step in (1e-3, 1e-4, 1e-5):
        numeric = _slope(score, inputs, place, direction, step)
        scale = max(abs(numeric), abs(analytic), 1e-3 * float(gradient.norm()) * norm, 1e-6 * largest * norm)
        if abs(numeric - analytic) < 1e-6 * scale:
            return
    require(False, f"the gradient of {name} is wrong: {analytic:.6g}; finite differences give {numeric:.6g}")


def _slope(
    score: Callable[..., Tensor], inputs: list[Tensor], place: int, direction: Tensor, step: float
) -> float:
    """Return the slope by two central differences whose h^2 errors cancel (Richardson): accurate to 1e-9."""
    slopes = []
    with torch.no_grad():
        for size in (step, step / 2):
            moved = [[other.detach() for other in inputs] for _ in range(2)]
            moved[0][place] = inputs[place] + size * direction
            moved[1][place] = inputs[place] - size * direction
            slopes.append((score(*moved[0]) - score(*moved[1])) / (2 * size))
    return float((4 * slopes[1] - slopes[0]) / 3)


def finite(bench: Fixture) -> None:
    """Outputs and gradients stay finite in bf16 and at extreme inputs."""
    plain = bench.mechanism(torch.float32)
    if not plain.writes:
        return
    kinds = {
        "ordinary inputs": bench.inputs(dtype=torch.float32),
        "inputs of size 1e4": bench.inputs(dtype=torch.float32) * 1e4,
        "inputs of size 1e-6": bench.inputs(dtype=torch.float32) * 1e-6,
        "all inputs zero": torch.zeros_like(bench.inputs(dtype=torch.float32)),
        "all tokens equal": bench.inputs(time=1, dtype=torch.float32).expand(-1, TIME, -1).contiguous(),
    }
    for dtype in (torch.float32, torch.bfloat16):
        mechanism = copy.deepcopy(plain).to(dtype)
        for kind, x in kinds.items():
            x = x.to(dtype).requires_grad_()
            output = bench.run(mechanism, x)
            require(bool(torch.isfinite(output).all()), f"not finite in {_short(dtype)} for {kind}")
            gradients = torch.autograd.grad(
                output.float().square().mean().clamp_max(1e30),
                (x, *mechanism.parameters()),
                allow_unused=True,
            )
            good = all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)
            require(good, f"gradients not finite in {_short(dtype)} for {kind}")
    x = bench.inputs(dtype=torch.float32)
    wanted = bench.run(plain, x).detach()
    coarse = bench.run(plain.bfloat16(), x.bfloat16()).detach().float()
    error = float((coarse - wanted).norm() / wanted.norm().clamp_min(1e-30))
    require(error < 0.1 or plain.singular, f"in bf16 the output has a relative error of {error:.0%}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat16", "bf16")


# Checks on a whole decoder: two blocks with norms, feed-forward blocks and residual space. A mechanism may behave differently
# inside a model: the decoder runs a companion together with the batch, autocast narrows some products but not others, and
# the residual space adds the updates.


def padded_batch(bench: Fixture) -> None:
    """A sequence in a padded batch has the same states as alone, causal and bidirectional."""
    model = bench.model()
    supports = model.layers[0].mechanism.supports
    if not supports.padding:
        return
    lengths = (TIME, 7, 4)
    tokens = bench.tokens(len(lengths))
    for causal in (True, False) if supports.bidirectional else (True,):
        with torch.no_grad():
            alone = [
                model.hidden(row[None, :length], causal=causal)[0]
                for row, length in zip(tokens, lengths, strict=True)
            ]
        for side in ("right", "left"):
            real = torch.arange(TIME) < torch.tensor(lengths)[:, None]
            real = real if side == "right" else real.flip(1)
            filled = bench.tokens(len(lengths), seed=9)
            for row, length in enumerate(lengths):
                filled[row, real[row]] = tokens[row, :length]
            with torch.no_grad():
                together = model.hidden(filled, padding=real, causal=causal)
            for row, wanted in enumerate(alone):
                words = (
                    f"in a {'causal' if causal else 'bidirectional'} model, a batch with {side} padding changes the "
                    "states of a sequence (by {error}); use frame.padding, or declare "
                    f"supports = Supports({'padding' if causal else 'bidirectional'}=False)"
                )
                require_close(together[row, real[row]], wanted, words)


def autocast(bench: Fixture) -> None:
    """Under autocast to bf16 a whole decoder stays finite and close to float32, outputs and gradients."""
    model = bench.model(torch.float32)
    if not model.layers[0].mechanism.writes:
        return
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    errors: dict[str, list[tuple[float, float]]] = {"output": [], "gradient": []}
    for tokens in bench.tokens(5).split(1):
        exact = _outcome(model, tokens)
        narrow = _outcome(model, tokens, narrow=True)
        nearby = _outcome(rounded, tokens)
        for what in errors:
            require(bool(torch.isfinite(narrow[what]).all()), f"{what} not finite under autocast to bf16")
            size = float(exact[what].norm().clamp_min(1e-30))
            found, allowed = (float((other[what] - exact[what]).norm()) / size for other in (narrow, nearby))
            errors[what].append((found, allowed))
    if model.layers[0].mechanism.singular:
        return
    for what, pairs in errors.items():
        # The median of five sequences: two at a pole of the function are not decisive.
        found, nearby_error = (statistics.median(side) for side in zip(*pairs, strict=True))
        allowed = max(_LEAST, _TIMES * nearby_error)
        require(
            found < allowed,
            f"under autocast to bf16 the {what} has a relative error of {found:.1%}, at most {allowed:.1%} is allowed; "
            "compute in float32 where bf16 is too narrow (torch.autocast(..., enabled=False))",
        )


def _outcome(model: Decoder, tokens: Tensor, narrow: bool = False) -> dict[str, Tensor]:
    """Return the model's states and its gradient, all parameters concatenated."""
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        states = model.hidden(tokens)
    states = states.float()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(8))
    found = torch.autograd.grad((states * weights).sum(), list(model.parameters()), allow_unused=True)
    gradient = torch.cat([part.flatten() for part in found if part is not None])
    return {"output": states.detach(), "gradient": gradient}
