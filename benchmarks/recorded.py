"""Steps recorded as a CUDA graph beside steps one by one, by mechanism, in float32.

    python benchmarks/recorded.py [--arms standard gated_linear] [--size 1m] [--steps 30] [--device cuda] [--out FILE]

Four runs of the same seed and batches are laid beside one that goes step by step: the same again (what the device does
not give twice), one whose start weights were moved by one unit in the last place (what rounding grows into), one that
is recorded, and one that is recorded and put back on the first one's path after every step (what recording itself adds
to a step). A recorded run that parts no further than the moved one is as good as any. Each line says how far nats and gradient norm
went apart at most, at which step by more than 1e-5, and which parameter's gradient was off most at that step.
Without a GPU nothing is recorded, and the rest is shown. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtohead.bench.population import Case
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
    """Move every weight to a neighbour among float32 numbers, up or down by lot."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            lot = torch.rand(parameter.shape, generator=draw).to(parameter.device)
            up = torch.nextafter(parameter, torch.full_like(parameter, torch.inf))
            down = torch.nextafter(parameter, torch.full_like(parameter, -torch.inf))
            parameter.copy_(torch.where(lot < 0.5, up, down))


def put_back(other: Trainer, plain: Trainer) -> None:
    """Give one trainer the weights and the optimiser's state of another, in the place where they stand."""
    with torch.no_grad():
        for name, parameter in plain.model.named_parameters():
            place = other.model.get_parameter(name)
            place.copy_(parameter)
            for key, value in plain.optimizer.state.get(parameter, {}).items():
                if key in (own := other.optimizer.state.get(place, {})):
                    own[key].copy_(value)


def moments(trainer: Trainer) -> dict[str, Tensor]:
    """Return the mean gradients that the optimiser keeps, by parameter."""
    state = trainer.optimizer.state
    return {
        name: state[parameter]["exp_avg"].clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter in state
    }


def gradients(before: dict[str, Tensor], after: dict[str, Tensor], beta: float) -> dict[str, Tensor]:
    """Return the clipped gradients between two states of the optimiser."""
    return {name: (mean - beta * before[name] if name in before else mean) for name, mean in after.items()}


def compare(plain: Trainer, other: Trainer, steps: int, way: str) -> dict[str, Any]:
    """Return how far the other goes from the plain one, from when on, and where that shows first."""
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


def measure(case: Case, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return every way beside the plain one; a way that fails leaves its reason."""
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
            found[way] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        row = found[way]
        say(
            f"{case.arm}, {way}: "
            + (
                row.get("error")
                or f"nats {row['nats']:.1e}, norm {row['norm']:.1e}, apart from step {row['first_apart']} {row['most']} "
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
        case = Case(given.size, arm, batch, "float32", str(where))
        document["arms"][arm] = measure(case, given.steps, lambda words: print(words, flush=True))
        if given.out is not None:
            write_json(given.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
