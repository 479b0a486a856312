"""Rows of a benchmark, stored as soon as they are measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headtohead.common.errors import DamagedFile, UserError, first_line
from headtohead.common.files import finite, json_text, output_target, read_json, write_output
from headtohead.study.environment import commit, provenance


class Rows:
    """Measured rows, stored in a file if one is given; a row is identified by its facts and its commit."""

    def __init__(self, benchmark: str, out: str | Path | None, facts: Mapping[str, Any]) -> None:
        self.benchmark, self.facts = benchmark, dict(facts)
        self.path = None if out is None else Path(out)
        self.rows: list[dict[str, Any]] = []
        if self.path is None:
            return
        if not self.path.parent.is_dir():
            raise UserError(f"out={out}: no directory {self.path.parent}")
        if (target := output_target(self.path)) is None:  # a device or a pipe has no rows to continue
            return
        if not os.access(target.parent, os.W_OK):
            raise UserError(f"out={out}: directory {target.parent} is not writable")
        if target.exists():
            document = read_json(target, links=True)
            if not isinstance(document, dict) or document.get("benchmark") != benchmark:
                raise UserError(f"out={out} is not a file of the benchmark '{benchmark}'")
            rows = document.get("rows", [])
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise DamagedFile(f"damaged file {self.path}: its rows are not a list of tables")
            self.rows = rows

    def known(self, facts: Mapping[str, Any]) -> bool:
        """Return whether there is a row with these facts from this commit."""
        return any(self._same(row, facts) for row in self.rows)

    def add(self, facts: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
        """Add a row; it replaces one with the same facts."""
        self.rows = [row for row in self.rows if any(row.get(key) != value for key, value in facts.items())]
        self.rows.append({**facts, **provenance(), **measured})
        if self.path is not None:
            write_output(self.path, json_text(self.document()))

    def document(self) -> dict[str, Any]:
        """Return all rows with their shared facts and provenance."""
        document: dict[str, Any] = finite(
            {"benchmark": self.benchmark, **provenance(), **self.facts, "rows": self.rows}
        )
        return document

    def _same(self, row: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
        return row.get("commit") == commit() and all(row.get(key) == value for key, value in facts.items())


def in_a_line(error: Exception) -> str:
    """Return an error as one line: its type and the first line of its message."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    kind, message = type(error).__name__, first_line(error)
    return kind if message == kind else f"{kind}: {message}"[:300]
