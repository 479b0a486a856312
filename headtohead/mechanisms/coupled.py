"""Each token's (q, k) passes through a small learned dynamical system before the dot product; scores, softmax, values and
output are those of the layer it is added to.

    euler              (q, k) <- (q + dt k, k + dt f(q)), both from the old pair
    leapfrog           k <- k + dt/2 f(q);  q <- q + dt k;  k <- k + dt/2 f(q)       n steps evaluate f n + 1 times
    symplectic_euler   k <- k + dt f(q), then q <- q + dt k with the new k
    uncoupled          q <- q + dt g(q), k <- k + dt h(k): the control, two nets of half the width
    affine             q <- q exp(s(k)) + t(k), then k <- k exp(s'(q)) + t'(q): the invertible map of the revision

    f(q) = W2 silu(W1 q + b1) + b2 in head space, one for all heads of a layer, or `per_head`

Gahtan et al., "Coupled Query-Key Dynamics for Attention", arXiv 2604.01683 v1; the same number now has a revision with
`affine`. It is a stage: alone it is added to `standard`; `sharing:tie=kv+coupled` and `differential+coupled:dynamics=euler`
add it to other layers. With coupling, K=V means that v is the evolved key before rotation. f's last layer is initialized to
zero and dt to 0.1 per head, so a layer starts close to its baseline, and `affine` starts equal to it. `force=potential` is
the gradient of a learned energy, which makes `leapfrog` symplectic.

Arms: coupled:dynamics=leapfrog coupled:steps=7 coupled:dynamics=uncoupled coupled:dynamics=affine differential+coupled

Claims: v1, on WikiText-103 at 60M: perplexity 22.55 and 22.62 (two integrators) against 24.22 for 0.11 % more parameters,
and 23.81 for an uncoupled net of the same size; 1 to 7 steps all work. At 350M 19.35, 1 % better than standard, where
Differential Attention has 18.93; 10.3 % worse on mixed web text; no gain at equal time.

Watch: With one Euler step the query stays linear in x: any gain comes from the key. `force=linear` is standard attention
with other initial values, and `force=zero` only adds n dt k to q: run both before crediting the dynamics. It needs one
query per key; grouped keys and version 2 of `differential` are rejected. Compare at equal time too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import rms_norm
from headtohead.kernels.dynamics import integrator as dynamics
from headtohead.kernels.dynamics import operators as dynamics_fused
from headtohead.mechanisms.contract.base import Circuit, Draw, Frame, Shape
from headtohead.mechanisms.contract.options import Options, changed_options, option, value_text
from headtohead.mechanisms.contract.projected import Stage


@dataclass(frozen=True)
class CoupledOptions(Options):
    """Options of the coupling."""

    cases: ClassVar[str] = """
        steps=7,state_dtype=autocast per_head=true dynamics=leapfrog,steps=3 dynamics=leapfrog,force=potential
        dynamics=symplectic_euler,steps=2,force=potential,per_head=true dynamics=uncoupled
        dynamics=uncoupled,steps=2,per_head=true,force_bias=true dynamics=affine dynamics=affine,per_head=false,steps=2
        force=linear force=zero,steps=2 force_input=k hidden=6,force_bias=false,per_head=false
        dt_per=layer,dt_param=softplus order=after_rope
        dynamics=leapfrog,force=linear,per_head=true,dt_init=0,qk_norm=after
    """

    dynamics: str = option(
        "euler",
        "dynamics of (q, k); uncoupled is the control with q and k independent, affine the paper's revision",
        choices=("euler", "leapfrog", "symplectic_euler", "uncoupled", "affine"),
    )
    steps: int = option(1, "number of steps, with shared weights and step size", low=1, high=7)
    force: str = option(
        "mlp",
        "f: a free mlp, the gradient of a potential, or the controls linear (standard, reparametrized) and zero",
        choices=("mlp", "potential", "linear", "zero"),
    )
    force_input: str = option("q", "the input of f; k is the control euler k + dt f(k)", choices=("q", "k"))
    per_head: bool | str = option(
        "auto", "separate weights for each head; auto: only with affine", choices=("auto", True, False)
    )
    hidden: int = option(
        0, "hidden width of f; 0: 64 shared, 8 per head (potential 128 and 16); uncoupled halves it", low=0
    )
    force_bias: bool | str = option(
        "auto",
        "biases in f; auto: with shared weights and with a potential, never with linear",
        choices=("auto", True, False),
    )
    dt_init: float = option(0.1, "initial step size; 0 is exactly the layer without coupling")
    dt_per: str = option("head", "one learned step size per head or per layer", choices=("head", "layer"))
    dt_param: str = option(
        "free",
        "the step size is learned directly, or kept positive by softplus",
        choices=("free", "softplus"),
    )
    order: str = option(
        "before_rope",
        "couple before or after rotary positions; after, f depends on absolute positions",
        choices=("before_rope", "after_rope"),
    )
    qk_norm: str = option(
        "none",
        "normalize q and k per head, with learned gains, after the dynamics",
        choices=("none", "after"),
    )
    state_dtype: str = option(
        "float32",
        "precision of the update under bf16: float32, or that of the inputs; f runs in that of the inputs",
        choices=("float32", "autocast"),
    )

    def validate(self) -> None:
        """Raise if options contradict each other, have no effect, or can never train."""
        if self.dynamics == "affine":
            self._reject(
                "dynamics=affine is a map of its own", "force", "force_input", "dt_init", "dt_per", "dt_param"
            )
        if self.force == "zero":
            if self.dynamics == "uncoupled":
                raise UserError("dynamics=uncoupled with force=zero has no effect; use standard")
            self._reject("force=zero has no weights", "force_input", "per_head", "hidden", "force_bias")
        if self.force == "linear":
            self._reject("force=linear is one matrix", "hidden")
            if self.force_bias is True:
                raise UserError("force=linear is one matrix; force_bias=true would make it affine")
        if self.force_input == "k" and self.dynamics != "euler":
            raise UserError(
                f"force_input=k needs dynamics=euler; dynamics={self.dynamics} fixes the input of its force"
            )
        if self.dynamics == "uncoupled" and self.hidden % 2:
            raise UserError(f"dynamics=uncoupled halves the hidden width; hidden={self.hidden} is odd")
        if self.dynamics == "uncoupled" and self.dt_init == 0:
            raise UserError(
                "dynamics=uncoupled with dt_init=0 cannot train: the last layer is zero too, so both gradients are 0"
            )
        if self.dt_param == "softplus" and self.dt_init <= 0:
            raise UserError(f"dt_param=softplus keeps dt positive; dt_init={value_text(self.dt_init)} is not")

    def _reject(self, why: str, *names: str) -> None:
        for name, value in changed_options(self).items():
            if name in names:
                raise UserError(f"{why}; it takes no {name}={value_text(value)}")

    @property
    def heads_apart(self) -> bool:
        """Whether each head has its own weights."""
        return self.dynamics == "affine" if self.per_head == "auto" else bool(self.per_head)

    @property
    def biased(self) -> bool:
        """Whether f has biases."""
        if self.force_bias != "auto":
            return bool(self.force_bias)
        return self.force == "potential" or (self.force != "linear" and not self.heads_apart)

    @property
    def hidden_width(self) -> int:
        """Hidden width of f, in total if there are two nets of half the width."""
        shared, per_head = (128, 16) if self.force == "potential" else (64, 8)
        return self.hidden or (per_head if self.heads_apart else shared)

    @property
    def evaluations(self) -> int:
        """Number of evaluations of f."""
        return self.steps + (self.dynamics == "leapfrog")


class HeadForce(nn.Module):
    """A force in head space; its last layer is initialized to zero, so the initial force is zero."""

    def __init__(self, shape: Shape, options: CoupledOptions, hidden: int, out: int) -> None:
        super().__init__()
        self.kind = options.force
        heads = (shape.heads,) if options.heads_apart else ()
        dim = shape.head_dim
        if self.kind == "linear":
            self.w2 = nn.Parameter(torch.zeros(*heads, dim, dim))
            return
        potential = self.kind == "potential"
        self.w1 = nn.Parameter(torch.zeros(*heads, hidden, dim))
        self.b1 = nn.Parameter(torch.zeros(*heads, hidden)) if options.biased else None
        self.w2 = nn.Parameter(torch.zeros(*heads, hidden) if potential else torch.zeros(*heads, out, hidden))
        self.b2 = nn.Parameter(torch.zeros(*heads, out)) if options.biased and not potential else None

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x), (batch, time, heads, out)."""
        if self.kind == "linear":
            return dynamics.head_linear(x, self.w2)
        if self.kind == "potential":
            return dynamics.potential_force(x, self.w1, self.b1, self.w2)
        return dynamics.head_mlp(x, self.w1, self.b1, self.w2, self.b2)

    def initialise(self, draw: Draw) -> None:
        """Set W1 ~ N(0, 1/d) and everything else to zero."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.zero_()
                if name == "w1":
                    parameter.copy_(draw(name, parameter.shape, parameter.shape[-1] ** -0.5))

    def flops(self) -> float:
        """Return FLOPs of one evaluation for one head: two per weight; a potential uses W1 twice."""
        if self.kind == "potential":
            return 4.0 * self.w1.shape[-2] * self.w1.shape[-1]
        weights = [self.w2] if self.kind == "linear" else [self.w1, self.w2]
        return sum(2.0 * weight.shape[-2] * weight.shape[-1] for weight in weights)


class Coupled(Stage):
    """Coupled query-key dynamics, a stage of (q, k) before the dot product: (q, k) <- (q + dt k, k + dt f(q))."""

    name: ClassVar[str] = "coupled"
    Options: ClassVar[type] = CoupledOptions
    graph_safe: ClassVar[bool] = True

    def __init__(self, shape: Shape, options: Any) -> None:
        super().__init__(shape, options)
        if options.order == "after_rope" and shape.positions != "rope":
            raise UserError(
                f"coupled: order=after_rope needs positions=rope; this model has {shape.positions}"
            )
        dim, hidden = shape.head_dim, options.hidden_width
        # The nets that drive q and k. With two nets, uncoupled splits the width between them, and affine returns scale and
        # shift; otherwise k itself drives q.
        self.q_force = self.k_force = None
        if options.dynamics == "uncoupled":
            self.q_force, self.k_force = (HeadForce(shape, options, hidden // 2, dim) for _ in range(2))
        elif options.dynamics == "affine":
            self.q_force, self.k_force = (HeadForce(shape, options, hidden, 2 * dim) for _ in range(2))
        elif options.force != "zero":
            self.k_force = HeadForce(shape, options, hidden, dim)
        if options.dynamics != "affine":
            self.dt = nn.Parameter(torch.zeros(shape.heads if options.dt_per == "head" else 1))
        if options.qk_norm == "after":
            self.q_gain, self.k_gain = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def evolve(self, q: Tensor, k: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
        """Return q and k after the dynamics, both (batch, heads, time, dim)."""
        turned = self.options.order == "after_rope"
        if turned:
            # Rotated back below: the layer rotates the pair itself, and a shared K=V is the unrotated key.
            q, k = frame.rotate(q), frame.rotate(k)
        q, k = (side.transpose(1, 2) for side in self.integrate(q.transpose(1, 2), k.transpose(1, 2)))
        if turned:
            q, k = frame.rotate(q, inverse=True), frame.rotate(k, inverse=True)
        if self.options.qk_norm == "after":
            eps = self.shape.norm_eps
            q, k = rms_norm(q, self.q_gain, eps), rms_norm(k, self.k_gain, eps)
        return q, k

    def integrate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair (batch, time, heads, dim) after all steps."""
        options, given = self.options, q.dtype
        state = torch.promote_types(given, torch.float32) if options.state_dtype == "float32" else given
        net = self.k_force if state == torch.float32 and self.one_kernel else None
        if net is not None and dynamics_fused.serves(q, net.w1, net.w2):
            weights = (net.w1, net.b1, net.w2, net.b2 if net.kind == "mlp" else None)
            return dynamics_fused.integrate(q, k, self.step_size(), options.steps, options.dynamics, *weights)

        def force_of(net: HeadForce | None) -> dynamics.Force:
            assert net is not None
            return lambda x: net(x.to(given)).to(state)

        q, k = q.to(state), k.to(state)
        if options.dynamics == "affine":
            q, k = dynamics.affine(q, k, options.steps, force_of(self.q_force), force_of(self.k_force))
            return q.to(given), k.to(given)
        dt = self.step_size().to(state).unsqueeze(-1)
        if options.force == "zero":
            q, k = dynamics.drift(q, k, dt, options.steps)
        elif options.dynamics == "euler":
            of_keys = options.force_input == "k"
            q, k = dynamics.euler(q, k, dt, options.steps, force_of(self.k_force), of_keys)
        elif options.dynamics == "uncoupled":
            forces = force_of(self.q_force), force_of(self.k_force)
            q, k = dynamics.uncoupled(q, k, dt, options.steps, *forces)
        else:
            integrator = dynamics.leapfrog if options.dynamics == "leapfrog" else dynamics.symplectic_euler
            q, k = integrator(q, k, dt, options.steps, force_of(self.k_force))
        return q.to(given), k.to(given)

    @property
    def one_kernel(self) -> bool:
        """Whether the fused integrator supports these dynamics and this force."""
        options = self.options
        known = options.dynamics in dynamics_fused.SCHEMES and options.force in ("mlp", "potential")
        return known and options.force_input == "q"

    def step_size(self) -> Tensor:
        """Return dt, (heads,) or (1,)."""
        return F.softplus(self.dt) if self.options.dt_param == "softplus" else self.dt

    def initialise(self, draw: Draw) -> None:
        """Set initial values: zero force, dt from the options, gains one."""
        for name, net in self._forces():
            net.initialise(lambda key, shape, std=None, place=name: draw(f"{place}.{key}", shape, std))
        with torch.no_grad():
            if self.options.dynamics != "affine":
                start = self.options.dt_init
                # softplus(log(e^dt - 1)) = dt
                self.dt.fill_(math.log(math.expm1(start)) if self.options.dt_param == "softplus" else start)
            if self.options.qk_norm == "after":
                self.q_gain.fill_(1.0)
                self.k_gain.fill_(1.0)

    def circuits(self) -> list[Circuit]:
        """The dynamics are an own group that follows qk; step sizes and biases have no weight decay. The gains are qk."""
        groups: dict[Circuit, list[str]] = {}
        for name, _ in self.named_parameters():
            gain, weight = name.endswith("gain"), name.endswith(("w1", "w2"))
            kind = Circuit("qk", (), False) if gain else Circuit("own", (), weight, "qk")
            groups.setdefault(kind, []).append(name)
        return [replace(kind, parameters=tuple(names)) for kind, names in groups.items()]

    def flops(self) -> float:
        """Return FLOPs per token: 4 D m per evaluation of an mlp or potential, 12 D m per affine step."""
        per_head = sum(net.flops() for _, net in self._forces())
        return self.options.evaluations * self.shape.heads * per_head

    def _forces(self) -> list[tuple[str, HeadForce]]:
        return [(name, net) for name, net in self.named_children() if isinstance(net, HeadForce)]

    @classmethod
    def label(cls, options: Any) -> str:
        """Return a label such as `coupled (euler, 1 step)`."""
        parts = [options.dynamics.replace("_", " "), f"{options.steps} step" + "s" * (options.steps > 1)]
        parts += [f"{options.force} force"] if options.force != "mlp" else []
        parts += ["f(k)"] if options.force_input == "k" else []
        parts += [{True: "per head", False: "shared"}[options.per_head]] if options.per_head != "auto" else []
        said = ("dynamics", "steps", "force", "force_input", "per_head")
        parts += [
            f"{name}={value_text(value)}"
            for name, value in changed_options(options).items()
            if name not in said
        ]
        return f"coupled ({', '.join(parts)})"
