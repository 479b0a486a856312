"""The JSON documents in a study directory: each has a schema number and a checksum, both checked when it is read.

A document without a number has schema 0; one without a checksum was written by an older version and is accepted.
docs/compatibility.md lists the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headtohead.common.errors import DamagedFile, NewerFile
from headtohead.common.files import parse_json, read_json, verify_checksum, with_checksum, write_atomic

SCHEMA = 1
"""The number that this version writes, and the highest that it reads."""


class Plain:
    """Base of dataclasses that are printed or written as JSON."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


class Stored:
    """Base of dataclasses that msgspec decodes: every field is stored in the object, as their constructor does.

    msgspec leaves a missing field with a default to the class, where `vars` and msgspec's own encoder do not see it.
    """

    def __post_init__(self) -> None:
        fields: dict[str, Any] = getattr(self, "__dataclass_fields__", {})
        for name in fields:
            self.__dict__.setdefault(name, getattr(self, name))


def with_schema(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with this version's schema number as its first key."""
    return {"schema": SCHEMA} | {key: item for key, item in value.items() if key != "schema"}


def check_schema(value: Any, source: Path | str) -> None:
    """Raise NewerFile for a document of a newer schema; `source` names it in the message."""
    found = value.get("schema", 0) if isinstance(value, dict) else 0
    if type(found) is not int or found < 0:
        raise DamagedFile(f"damaged file {source}: schema {str(found)[:40]!r} is not a whole number")
    if found > SCHEMA:
        raise NewerFile(
            f"{source} was written by a newer headtohead (schema {found}, this version reads up to {SCHEMA}); "
            "upgrade headtohead"
        )


def write_document(path: Path, value: Mapping[str, Any]) -> None:
    """Write a document with its schema number and its checksum, atomically."""
    write_atomic(path, with_checksum(with_schema(value)))


def read_document(path: Path, parse: Callable[[bytes], Any] = verify_checksum) -> Any:
    """Return the JSON in `path`. Errors for a missing, damaged or newer file name it."""

    def parsed(content: bytes) -> Any:
        try:
            value = parse(content)
        except ValueError:
            check_schema(parse_json(content), path)  # a newer version may have checksums of another kind
            raise
        check_schema(value, path)
        return value

    return read_json(path, parsed)
