"""Run the checks level by level and report what is missing for the next level."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from headtohead.common.errors import UserError
from headtohead.common.stop import STOPS
from headtohead.mechanisms.contract.terms import Composed
from headtohead.mechanisms.contract.user_code import describe_error
from headtohead.model.check import accounted, decodable, raceable
from headtohead.model.check.fixture import Failure, Fixture

Check = Callable[[Fixture], None]
LEVELS: dict[str, tuple[Check, ...]] = {
    "raceable": (
        raceable.shape,
        raceable.deterministic,
        raceable.causal,
        raceable.neighbours,
        raceable.padding,
        raceable.bidirectional,
        raceable.gradients,
        raceable.finite,
        raceable.padded_batch,
        raceable.autocast,
    ),
    "decodable": (
        decodable.cache_declared,
        decodable.cache_agrees,
        decodable.cache_bytes,
        decodable.recorded_agrees,
    ),
    "accounted": (accounted.flops, accounted.circuits, accounted.fast_path, accounted.attention_map),
}
SLOW: tuple[Check, ...] = (accounted.compiles,)


@dataclass(frozen=True)
class Finding:
    """One failed check."""

    check: str
    setting: str
    words: str


@dataclass
class Verification:
    """The result of the suite for one mechanism."""

    text: str
    findings: list[Finding]
    passed: dict[str, list[str]]
    seconds: float

    @property
    def level(self) -> str:
        """The last level with all checks passed, or `none`."""
        reached = "none"
        failed = {finding.check for finding in self.findings}
        for level, checks in LEVELS.items():
            names = {check.__name__ for check in checks} | ({"compiles"} if level == "accounted" else set())
            if failed & (names | {"build"}):
                break
            reached = level
        return reached

    @property
    def complete(self) -> bool:
        """Whether the last level was reached."""
        return self.level == list(LEVELS)[-1]


def check_composed(
    settings: list[Composed], compile: bool = False, progress: Callable[[str], None] | None = None
) -> Verification:
    """Return the result for a mechanism at each of its settings; a failing check ends that check, not the suite."""
    began = time.perf_counter()
    findings: list[Finding] = []
    passed: dict[str, list[str]] = {level: [] for level in LEVELS}
    for level, checks in LEVELS.items():
        for check in (*checks, *(SLOW if compile and level == "accounted" else ())):
            if progress:
                progress(f"{level}: {check.__name__.replace('_', ' ')}")
            finding = _first_failure(check, settings)
            if finding:
                findings.append(finding)
                if finding.check == "build":
                    return Verification(settings[0].text, findings, passed, time.perf_counter() - began)
            else:
                passed[level].append(check.__name__)
        if level == "decodable" and any(finding.check == "cache_declared" for finding in findings):
            implied = ("cache_agrees", "cache_bytes")
            findings = [finding for finding in findings if finding.check not in implied]
    return Verification(settings[0].text, findings, passed, time.perf_counter() - began)


def _first_failure(check: Check, settings: list[Composed]) -> Finding | None:
    for bench in _benches(check, settings):
        where = bench.composed.text
        where += f" (positions={bench.shape.positions}, bias={bench.shape.bias})"
        try:
            bench.mechanism()
        except UserError as error:
            return Finding("build", where, str(error))
        except STOPS:
            raise
        except BaseException as error:
            return Finding("build", where, f"it cannot be built: {_raised(error)}")
        try:
            check(bench)
        except Failure as failure:
            return Finding(check.__name__, where, str(failure))
        except STOPS:
            raise
        except BaseException as error:
            return Finding(check.__name__, where, f"it raised {_raised(error)}")
    return None


def _benches(check: Check, settings: list[Composed]) -> Iterator[Fixture]:
    """Every setting once with rope; the default and the last also with other positions and biases."""
    for place, composed in enumerate(settings):
        able = composed.base.kind.supports.positions
        kinds = [("rope", "none")]
        if place in (0, len(settings) - 1):
            kinds += [("learned", "all"), ("none", "qkv")]
        if check in SLOW:
            kinds = kinds[:1]
        usable = [kind for kind in kinds if kind[0] in able] or [(sorted(able)[0], "none")]
        for positions, bias in usable:
            yield Fixture.of(composed, positions, bias)


def _raised(error: BaseException) -> str:
    torch._dynamo.reset()
    return describe_error(error)
