"""Compare training steps replayed as a CUDA graph with eager steps, by mechanism, in float32.

    python benchmarks/recorded.py [--arms standard gated_linear] [--size 1m] [--steps 30] [--device cuda] [--out FILE]

An eager run is compared with runs of the same seed and batches. `again`: the same run repeated (nondeterminism of the
device). `moved`: start weights moved by one unit in the last place (amplification of rounding). `recorded`: steps captured as
a CUDA graph. `put back`: weights and optimizer state reset to the eager run's after every step (the error of a single step).
A `recorded` run that differs no more than the `moved` one is acceptable. Each line shows the largest differences of nats and
gradient norm, the first step where one exceeds 1e-5, and the parameter whose gradient differs most at that step. Without a
GPU the `recorded` runs are skipped. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtohead.bench.harness import in_a_line
from headtohead.bench.population import Setup
from headtohead.bench.train import find_shape
from headtohead.common.files import write_json
from headtohead.study.environment import choose_device, device_name, provenance
from headtohead.training.trainer import Trainer

ARMS = (
    *("standard", "coupled", "sharing:tie=kv", "kuramoto", "differential", "approximate", "latent"),
    *("gated_linear", "non_approximate", "token_mlp"),
)
APART = 1e-5
WAYS = ("again", "moved", "moved, put back", "recorded", "recorded, put back")


def moved(model: torch.nn.Module) -> None:
    """Move every weight to a neighboring float32 number, up or down at random."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            chance = torch.rand(parameter.shape, generator=draw).to(parameter.device)
            up = torch.nextafter(parameter, torch.full_like(parameter, torch.inf))
            down = torch.nextafter(parameter, torch.full_like(parameter, -torch.inf))
            parameter.copy_(torch.where(chance < 0.5, up, down))


def put_back(other: Trainer, plain: Trainer) -> None:
    """Copy the weights and optimizer state of `plain` into `other`, in place."""
    with torch.no_grad():
        for name, parameter in plain.model.named_parameters():
            target = other.model.get_parameter(name)
            target.copy_(parameter)
            for key, value in plain.optimizer.state.get(parameter, {}).items():
                if key in (own := other.optimizer.state.get(target, {})):
                    own[key].copy_(value)


def moments(trainer: Trainer) -> dict[str, Tensor]:
    """Return the optimizer's first moments by parameter name."""
    state = trainer.optimizer.state
    return {
        name: state[parameter]["exp_avg"].clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter in state
    }


def gradients(before: dict[str, Tensor], after: dict[str, Tensor], beta: float) -> dict[str, Tensor]:
    """Return the clipped gradients, recovered from the first moments before and after a step."""
    return {name: (mean - beta * before[name] if name in before else mean) for name, mean in after.items()}


def compare(plain: Trainer, other: Trainer, steps: int, way: str) -> dict[str, Any]:
    """Return the largest differences of two trainers, the first step that differs, and the parameter that differs most."""
    back, beta = way.endswith("put back"), plain.settings.beta1
    worst, first, where = [0.0, 0.0], None, ""
    if way == "moved":
        moved(other.model)
    for step in range(steps):
        if back and step:
            put_back(other, plain)
        if way == "moved, put back":
            moved(other.model)
        before = moments(plain), moments(other)
        found = []
        for trainer in (plain, other):
            found.append(torch.stack(trainer._one_step()).double())
            trainer.step += 1
        apart = ((found[0] - found[1]) / found[0]).abs().tolist()
        worst = [max(pair) for pair in zip(worst, apart, strict=True)]
        if first is None and max(apart) > APART:
            first = step
            mine, theirs = (
                gradients(old, moments(trainer), beta)
                for old, trainer in zip(before, (plain, other), strict=True)
            )
            off = {
                name: float((grad - theirs[name]).norm() / (grad.norm() + 1e-30))
                for name, grad in mine.items()
            }
            name = max(off, key=off.__getitem__)
            where = f"{name} {off[name]:.1e}"
    return {"nats": worst[0], "norm": worst[1], "first_apart": first, "most": where}


def measure(case: Setup, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the comparison of every kind of run with the eager run, or the reason it failed."""
    on_gpu = torch.device(case.device).type == "cuda"
    found: dict[str, Any] = {}
    for way in WAYS:
        record = way.startswith("recorded")
        if record and not on_gpu:
            continue
        warnings: list[str] = []
        try:
            other = case.trainer(0, record=record, warn=warnings.append)
            found[way] = compare(case.trainer(0), other, steps, way) | {"warnings": warnings}
        except Exception as error:
            found[way] = {"error": in_a_line(error)}
        row = found[way]
        say(
            f"{case.arm}, {way}: "
            + (
                row.get("error")
                or f"nats {row['nats']:.1e}, norm {row['norm']:.1e}, differs from step {row['first_apart']} {row['most']} "
                + "; ".join(warnings)
            )
        )
    return found


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--size", default="1m")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    where = choose_device(given.device)
    document: dict[str, Any] = {"benchmark": "recorded", **provenance(), "device": device_name(where)}
    document |= {"size": given.size, "steps": given.steps, "sequences": given.sequences, "arms": {}}
    for arm in given.arms:
        batch = given.sequences * find_shape(given.size).context
        case = Setup(given.size, arm, batch, "float32", str(where))
        document["arms"][arm] = measure(case, given.steps, lambda line: print(line, flush=True))
        if given.out is not None:
            write_json(given.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
