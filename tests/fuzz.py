"""Settings and strategies of property tests: seconds in `make test`, minutes where H2H_FUZZ multiplies their examples."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FACTOR = int(os.environ.get("H2H_FUZZ", "1"))
Test = Callable[..., None]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def fuzz(examples: int) -> Callable[[Test], Test]:
    """Run a property test on `examples` examples times H2H_FUZZ; `pytest -m fuzz` selects these tests."""
    chosen = settings(max_examples=examples * FACTOR, deadline=None, suppress_health_check=list(HealthCheck))

    def decorate(test: Test) -> Test:
        marked: Test = pytest.mark.fuzz(chosen(test))
        return marked

    return decorate


def member_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every member inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += member_paths(inner, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one to three of its members replaced or removed."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        paths = member_paths(value)
        if not paths:
            break
        *path, last = draw(st.sampled_from(paths))
        holder = value
        for key in path:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = draw(JSON)
        else:
            del holder[last]
    return value


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with bytes overwritten, cut off, or inserted."""
    changed = bytearray(content)
    kind = draw(st.sampled_from(["flip", "cut", "insert", "head"]))
    if kind == "cut":
        return bytes(changed[: draw(st.integers(0, len(changed)))])
    if kind == "insert":
        index = draw(st.integers(0, len(changed)))
        return bytes(changed[:index]) + draw(st.binary(max_size=20)) + bytes(changed[index:])
    # The first bytes of a file contain lengths and headers: change them as often as all the rest.
    most = min(len(changed), 200) if kind == "head" else len(changed)
    for _ in range(draw(st.integers(1, 4))):
        changed[draw(st.integers(0, most - 1))] = draw(st.integers(0, 255))
    return bytes(changed)
