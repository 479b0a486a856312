"""The rows in results/speed in the form that the figures and text of docs/speed.md need, from all benchmarks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headtohead.common.files import read_json

Row = dict[str, Any]
FILES = (
    "train-gpu",
    "mechanisms-gpu",
    "contenders-step",
    "coupled-step",
    "kernels",
    "decode",
    "generate",
    "stack",
    "stack-processes",
    "growth",
    "cpu",
)


class Measured:
    """The measured documents by file name; missing files are skipped."""

    def __init__(self, folder: Path) -> None:
        files = {name: folder / f"{name}.json" for name in FILES}
        self.documents: dict[str, Row] = {
            name: read_json(path) for name, path in files.items() if path.exists()
        }

    def rows(self, name: str, wanted: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        """Return the wanted rows of a file, with the file's facts as defaults; failed rows are left out."""
        document = self.documents.get(name, {})
        shared = {key: value for key, value in document.items() if key not in ("rows", "benchmark")}
        rows = [shared | row for row in document.get("rows", [])]
        return [row for row in rows if "failed" not in row and wanted(row)]

    def timed_kernels(self) -> list[Row]:
        """Return the kernels that were timed."""
        return self.rows("kernels", lambda row: "seconds" in row)

    def training(self, size: str, tokens: int) -> Row | None:
        """Return the training step at a size, with its peers."""
        rows = self.rows("train-gpu", lambda row: (row["size"], row["tokens_per_step"]) == (size, tokens))
        return max(rows, key=lambda row: row["date"], default=None)

    def steps(self) -> list[Row]:
        """Return arm, size, context, memory and time relative to standard of every mechanism measured on a GPU.

        An arm that was measured again at the same size, context and shape has the last row that did not fail.
        """
        found: list[Row] = []
        for name in ("coupled-step", "mechanisms-gpu", "contenders-step"):
            for row in self.rows(name, lambda row: row.get("contenders", ["standard"])[0] == "standard"):
                found += _of_training(row) if "results" in row else _of_slices(row)
        found.sort(key=lambda row: ("over" in row, str(row["date"])))
        return list(
            {tuple(row[key] for key in ("arm", "size", "context", "matched")): row for row in found}.values()
        )

    def over_standard(self, arm: str, size: str, context: int | None = None) -> Row | None:
        """Return the last row of an arm at a size (and context, if given), preferring equal parameters."""
        rows = [
            row
            for row in self.steps()
            if (row["arm"], row["size"]) == (arm, size) and context in (None, row["context"])
        ]
        return max(rows, key=lambda row: (row["matched"], row["date"]), default=None)

    def decoding(self, wanted: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        """Return the rows of decoding, merged with the settings of their case."""
        rows = [row | row["case"] for row in self.rows("decode")]
        return [row for row in rows if wanted(row)]

    def stacked(self) -> list[Row]:
        """Return the populations of standard, the last measurement of each number of seeds.

        Where no separate processes were measured with them, those of an earlier measurement are used.
        """
        apart: dict[tuple[str, int], float] = {}
        found: dict[tuple[str, int], Row] = {}
        rows = self.rows("stack") + self.rows("stack-processes")
        for row in sorted(rows, key=lambda row: row["date"]):
            key = (row["size"], row["seeds"])
            if row["arm"] != "standard" or not row["stacked_tokens_per_second"]:
                continue
            if row["separate_tokens_per_second"]:
                apart[key] = row["separate_tokens_per_second"]
            elif key in apart:
                # Those processes were not compiled, so they are compared with the uncompiled population.
                plain = row["results"]["stacked, eager"]["tokens_per_second"]
                ratio = plain / apart[key]
                row = row | {
                    "separate_tokens_per_second": apart[key],
                    "over_separate": ratio,
                    "earlier": True,
                }
            found[key] = row
        return list(found.values())

    def generation(self) -> list[Row]:
        """Return the contenders that generated text, the last measurement of each."""
        rows = self.rows("generate", lambda row: not row["error"])
        return list({row["contender"]: row for row in sorted(rows, key=lambda row: row["date"])}.values())


def context_of(row: Row) -> int:
    """Return the context of a row of h2h bench train."""
    found = re.search(r"context ([\d,]+)", row["dims"])
    return int(found[1].replace(",", "")) if found else 0


def _of_training(row: Row) -> list[Row]:
    """Return the arms of one row of h2h bench train; a failed one has the reason under `failed`."""
    facts = {
        "size": row["size"],
        "context": context_of(row),
        "matched": row.get("shape") == "params",
        **{key: row[key] for key in ("date", "commit", "device")},
    }
    found = []
    for arm, result in row["results"].items():
        if result.get("first_over_this"):
            numbers = {
                "over": result["first_over_this"],
                "rate": result["tokens_per_second"],
                "memory": result["peak_bytes"],
                "standard_memory": row["results"][row["contenders"][0]].get("peak_bytes"),
            }
        else:
            numbers = {"failed": result.get("error", "standard was not measured")}
        found.append(facts | {"arm": arm} | numbers)
    return found


def _of_slices(row: Row) -> list[Row]:
    """Return one row of benchmarks/mechanisms.py, a two-layer slice."""
    if "ratio" not in row:
        return []
    size = row["size"].split(",")[0]
    facts = {
        "arm": row["arm"],
        "size": f"{size}, two layers",
        "context": row["contexts"][0],
        "matched": False,
    }
    facts |= {"over": 1 / row["ratio"], "rate": row["tokens_per_second"]}
    return [facts | {key: row[key] for key in ("date", "commit", "device")}]
