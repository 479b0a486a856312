"""Four tasks of GLUE: test is the published dev set, whose labels are known; valid is a tenth of train by hash."""

from __future__ import annotations

from collections.abc import Callable

from headtohead.data.tasks.base import Material, Text, hashed_split
from headtohead.data.tasks.readers import Rows


def reader(texts: tuple[str, ...], label: str, values: tuple[str, ...]) -> Callable[[Rows], Material]:
    """Return the reader of tables with those columns; `values` are the stored labels in the order of the classes."""

    def read(rows: Rows) -> Material:
        material = Material()
        for key in ("train", "dev"):
            for row in rows[key]:
                text = "\n".join(row[column].strip() for column in texts)
                if str(row[label]) not in values:
                    raise ValueError(f"label '{row[label]}' is not one of {', '.join(values)}")
                split = "test" if key == "dev" else hashed_split(text, 0.1, 0.0)
                material.splits[split].append(Text(text, values.index(str(row[label]))))
        return material

    return read
