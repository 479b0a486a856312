"""Parse one layer's mechanism in an arm: `name:option=value`, `path.py:Class` or `path.py`, joined by `+`."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.base import Mechanism, Shape, default_label
from headtohead.mechanisms.contract.identity.object_digest import object_digest
from headtohead.mechanisms.contract.identity.source_digests import source_digests
from headtohead.mechanisms.contract.options import build_options, identifying_options
from headtohead.mechanisms.contract.projected import Projected, Stage
from headtohead.mechanisms.contract.registry import (
    Kind,
    adopt,
    find_mechanism,
    load_mechanism,
    user_value,
)
from headtohead.mechanisms.contract.score import Score
from headtohead.mechanisms.contract.user_code import user_errors


@dataclass(frozen=True)
class Term:
    """A mechanism class with its options, and its origin."""

    kind: Kind
    options: Any
    path: str = ""
    """The user's file, empty for a built-in mechanism."""
    source: str = ""
    """Digest of a user's source file and the user's modules that it imports: an edited file is another mechanism."""
    program: str = ""
    """Digest of the parsed source, which comments and formatting do not change; empty if it cannot be parsed."""

    @property
    def text(self) -> str:
        """The term as written in an arm."""
        return default_label(
            f"{self.path}:{self.kind.__name__}" if self.path else self.kind.name, self.options
        )

    @property
    def user_code(self) -> bool:
        """Whether the class comes from a user's file or was passed in Python."""
        return bool(self.path or self.source)

    def as_dict(self) -> dict[str, Any]:
        """Return every part of this term that can change a result."""
        record: dict[str, Any] = {"mechanism": self.kind.name, "options": identifying_options(self.options)}
        return record | ({"source": self.source} if self.source else {})


def named_term(name: str, given: dict[str, Any]) -> Term:
    """Return the term of a built-in mechanism."""
    kind = find_mechanism(name)
    return Term(kind, build_options(name, kind.Options, given))


def file_term(path: str, name: str, given: dict[str, Any]) -> Term:
    """Return the term of a class or score function in a user's file; without a name, of its only mechanism."""
    kind = load_mechanism(path, name)
    source, program = source_digests(path)
    return Term(kind, build_options(kind.__name__, kind.Options, given), path, source, program)


def class_term(value: type | Score, given: dict[str, Any] | None = None) -> Term:
    """Return the term of a class or score function passed in Python; one at the top level of a file is named by it."""
    subject = value.function if isinstance(value, Score) else value
    own = value.name if isinstance(value, Score) else value.__name__
    module = getattr(inspect.getmodule(subject), "__dict__", {})
    others = [name for name, other in module.items() if other is value and name[0] != "_"]
    names = [own] if module.get(own) is value else others
    file = inspect.getsourcefile(subject) if _has_file(subject) else None
    source = object_digest(value)
    for name in names if file else ():
        # What `if __name__ == "__main__":` defines is in no process that imports the file.
        found = _imported_value(str(file), name)
        if isinstance(found, type | Score) and object_digest(found) == source:
            return file_term(str(file), name, given or {})
    kind = adopt(value, (names or [own])[0], "the given arms")
    return Term(kind, build_options(kind.name, kind.Options, given or {}), "", source)


@dataclass(frozen=True)
class Composed:
    """The mechanism of one layer, and the stages added to its evolve stage with `+`."""

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        for term in self.stages:
            if not issubclass(term.kind, Stage):
                raise UserError(f"{term.text} is a whole layer; only a stage of (q, k) can follow a '+'")

    @property
    def base(self) -> Term:
        """The mechanism; a stage alone is added to `standard`."""
        first = self.terms[0]
        return named_term("standard", {}) if issubclass(first.kind, Stage) else first

    @property
    def stages(self) -> tuple[Term, ...]:
        """The stages."""
        return self.terms if issubclass(self.terms[0].kind, Stage) else self.terms[1:]

    @property
    def text(self) -> str:
        """The composition as written in an arm."""
        return "+".join(term.text for term in self.terms)

    @property
    def label(self) -> str:
        """The short display label."""
        return " + ".join(term.kind.label(term.options) for term in self.terms)

    @property
    def portable(self) -> bool:
        """Whether another process can build this from its text alone."""
        return all(term.path or not term.source for term in self.terms)

    @property
    def user_code(self) -> bool:
        """Whether any of its classes is user code."""
        return any(term.user_code for term in self.terms)

    def as_dict(self) -> list[dict[str, Any]]:
        """Return everything that can change a result, base first."""
        return [term.as_dict() for term in (self.base, *self.stages)]

    def build(self, shape: Shape) -> Mechanism:
        """Return the mechanism for one layer; `initialise` sets the initial values later."""
        base = self.base
        assert issubclass(base.kind, Mechanism)
        if shape.positions not in base.kind.supports.positions:
            name, able = base.kind.name, ", ".join(sorted(base.kind.supports.positions))
            raise UserError(f"{name} does not support positions={shape.positions}; it supports {able}")
        with user_errors(kind=base.kind) if base.user_code else nullcontext():
            mechanism = base.kind(shape, base.options)
        mechanism.shape, mechanism.options = shape, base.options
        for term in self.stages:
            if not isinstance(mechanism, Projected):
                raise UserError(
                    f"{base.text} has no separate evolve stage, so {term.text} cannot be added to it"
                )
            assert issubclass(term.kind, Stage)
            with user_errors(kind=term.kind) if term.user_code else nullcontext():
                mechanism.add_stage(term.kind(shape, term.options))
        return mechanism


def _imported_value(path: str, name: str) -> Any:
    """Return what a file that is imported by its path has under a name; None if it fails then, such as part of a package."""
    try:
        return user_value(path, name)
    except UserError as error:
        if error.__cause__ is None:  # not from the user's code: the file races itself
            raise
        return None


def _has_file(value: Any) -> bool:
    try:
        return Path(inspect.getsourcefile(value) or "").is_file()
    except TypeError:
        return False
