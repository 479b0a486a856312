"""A run: every number resolved, named by the hash of its identity, stored in spec.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta, ValidationError, convert

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json, digest
from headtohead.common.schema import Stored
from headtohead.common.typed import Amount, Count, Text
from headtohead.evaluation.cost import FORMULAS
from headtohead.model.sizes import Settings, Size
from headtohead.study.numerics import NUMERICS
from headtohead.training.circuit_rates import recorded_rules
from headtohead.training.settings import TrainSettings

RunId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$", max_length=16)]


@dataclass(frozen=True)
class DataSource:
    """The corpus or task of a run."""

    name: Text
    label: Text
    tokenizer: Text
    content: Text
    """Hash of everything that determines the data a run sees."""


@dataclass(frozen=True)
class TaskKind(Stored):
    """The kind of model that a task needs."""

    model: Literal["classifier", "reader", "pointer"]
    classes: Count
    causal: bool
    answers: Literal["", "likeliest"] = ""
    """How a reader's answers are chosen; empty for other models and for runs before it was recorded."""

    def as_dict(self) -> dict[str, Any]:
        """Return the stored values."""
        return {key: value for key, value in vars(self).items() if key != "answers" or value}


@dataclass(frozen=True)
class Parent:
    """The run and step that a branch starts from."""

    run: RunId
    step: Count


@dataclass(frozen=True)
class RunSpec(Stored):
    """One arm, seed, corpus or task, size, shape rule and length rule, with every number resolved.

    What differs between machines (device, threads, directories) is in `ExecutionSettings`.
    """

    arm: Text
    label: Text
    layers: tuple[Text, ...]
    """The mechanism of each layer as text."""
    corpus: DataSource
    size: Size
    training: TrainSettings
    seed: int
    shape: Text
    length: Text
    parameters: Count
    flops_per_token: Amount
    """Forward FLOPs per token, counting attended keys; costs shared by a batch are divided by its sequences."""
    cache_bytes_per_token: Amount | None
    """Cache bytes per token in bf16, or None if a layer has no cache."""
    flops_source: Text = "declared"
    """How the FLOPs were obtained: declared, or counted in at least one layer."""
    parent: Parent | None = None
    """The run and step that a branch starts from."""
    task: TaskKind | None = None
    start: RunId | Literal[""] = ""
    """The run whose weights it starts from."""
    branches: tuple[Count, ...] = ()
    """The steps at which a trunk's branches start."""
    steps: Count = 0
    """All steps, including those of the trunk before a branch."""
    start_path: Text = ""
    """The directory of the run whose weights it starts from."""
    stacked: bool = False
    """Whether it is a row of a population."""
    formulas: int | Text = FORMULAS
    """Version of the cost formulas."""
    mechanisms: tuple[Any, ...] = ()
    """What identifies the mechanism of each layer: resolved options and the source of user code."""
    programs: tuple[tuple[Text, Text], ...] = ()
    """For each source of user code in `mechanisms`, the digest of the program that it is parsed to."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that can change the result, and nothing else.

        A companion is covered: its tokens by corpus, size and options, its noise by the seed.
        """
        return {
            "numerics": NUMERICS,
            "layers": list(self.mechanisms),
            "size": _plain_size(self.size),
            "corpus": self.corpus.content,
            "training": _plain_training(self.training),
            "seed": self.seed,
            "stacked": self.stacked,
            **self._further,
        }

    @property
    def _further(self) -> dict[str, Any]:
        """Keys that only some runs have; omitting them keeps the ids of the other runs unchanged."""
        return {
            **({"parent": dict(vars(self.parent))} if self.parent else {}),
            **({"task": self.task.as_dict()} if self.task else {}),
            **({"start": self.start} if self.start else {}),
        }

    @cached_property
    def id(self) -> str:
        """The run's id: the hash of its identity."""
        return digest(canonical_json(self.identity))[:16]

    @property
    def numerics(self) -> str:
        """The NUMERICS value that the run is computed with."""
        return str(self.identity.get("numerics", "unknown"))

    @property
    def own_steps(self) -> int:
        """The steps after those of its trunk, if it is a branch."""
        return self.steps - (self.parent.step if self.parent else 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of spec.json."""
        return {
            "id": self.id,
            "arm": self.arm,
            "label": self.label,
            "layers": list(self.layers),
            "corpus": dict(vars(self.corpus)),
            "size": {"name": self.size.name} | _plain_size(self.size),
            "training": _plain_training(self.training),
            "seed": self.seed,
            "shape": self.shape,
            "length": self.length,
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "flops_source": self.flops_source,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "formulas": self.formulas,
            "identity": self.identity,
            **self._further,
            **({"branches": list(self.branches)} if self.branches else {}),
            **({"steps": self.steps} if self.task else {}),
            **({"start_path": self.start_path} if self.start else {}),
            **({"programs": dict(self.programs)} if self.programs else {}),
        }


# Hundreds of runs share a size and training settings: each is converted once.


@cache
def _plain_size(size: Size) -> dict[str, Any]:
    return size.as_dict()


@cache
def _plain_training(training: TrainSettings) -> dict[str, Any]:
    return training.as_dict()


_KNOWN = {
    name: {field.name for field in dataclasses.fields(kind)}
    for name, kind in (("size", Size), ("model", Settings), ("training", TrainSettings))
}
"""The settings that this version knows; a run with others cannot be rebuilt."""


class InvalidSpec(ValueError):
    """The content of a spec.json is not that of a run."""


def run_spec_from(record: Any, run_id: str) -> RunSpec:
    """Return the run in the content of a spec.json; raise InvalidSpec if it is invalid or not the run `run_id`."""
    try:
        identity = record["identity"]
        if digest(canonical_json(identity))[:16] != run_id or record["id"] != run_id:
            raise InvalidSpec("the run id is not the hash of its identity")
        size = {key: value for key, value in record["size"].items() if key != "name"}
        shown = (size, record["training"], record["seed"], record["corpus"]["content"], len(record["layers"]))
        meant = (
            *(identity[key] for key in ("size", "training", "seed", "corpus")),
            len(identity["layers"]),
        )
        others = ("parent", "task", "start")
        if shown != meant or any(record.get(key) != identity.get(key) for key in others):
            raise InvalidSpec("its fields do not match its identity")
        training = _with_rules(record["training"])
        for name, given in (
            ("size", record["size"]),
            ("model", record["size"]["settings"]),
            ("training", training),
        ):
            if more := given.keys() - _KNOWN[name]:
                raise InvalidSpec(f"unknown {name} setting {', '.join(sorted(map(str, more)))[:80]}")
        derived = {
            "training": training,
            "mechanisms": identity["layers"],
            "stacked": identity.get("stacked", False),
            "formulas": record.get("formulas", "unknown"),
            "programs": [*record.get("programs", {}).items()],
            # Stored for tasks only, whose steps have whole examples.
            "steps": record.get("steps") or training["tokens"] // training["batch"],
        }
        spec = convert({**record, **derived}, RunSpec)
    except InvalidSpec:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        UserError,
        RecursionError,
    ) as error:
        kind = "" if isinstance(error, ValidationError | UserError) else f"{type(error).__name__}: "
        raise InvalidSpec(f"{kind}{str(error)[:200]}") from None
    spec.__dict__["identity"] = identity  # older versions had fewer settings; the id is the hash of theirs
    return spec


def _with_rules(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored training settings with validated rules of circuits; `rates` is an older form of them."""
    rules, decay = recorded_rules(training)
    rest = {key: value for key, value in training.items() if key != "rates"}
    return rest | {"circuit_lr": [rule.as_dict() for rule in rules], "circuit_decay": decay}
