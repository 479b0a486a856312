"""HateXplain: posts in three classes, with the words that each annotator marked as decisive."""

from __future__ import annotations

from collections import Counter

from headtohead.data.tasks.base import Material, Text, joined
from headtohead.data.tasks.readers import Row, Rows

CLASSES = ("normal", "offensive", "hatespeech")
_HUB_CLASSES = ("hatespeech", "normal", "offensive")
_SPLITS = {"train": "train", "val": "valid", "test": "test"}


def read(rows: Rows) -> Material:
    """Return the posts on whose class at least two annotators agree, in their published splits."""
    material = Material()
    for row in rows.all():
        row = row if "labels" in row else _from_hub(row)
        counts: Counter[str] = Counter(row["labels"])
        label, votes = counts.most_common(1)[0]
        if votes < 2 or row["split"] not in _SPLITS:
            material.notes["skipped: annotators disagree"] += 1
            continue
        masks = []
        for mask in row["rationales"]:
            if len(mask) == len(row["tokens"]):
                masks.append([bool(mark) for mark in mask])
            else:
                material.notes["skipped: rationale masks whose length differs from the text"] += 1
        text, relevant = joined(row["tokens"], masks)
        material.splits[_SPLITS[row["split"]]].append(
            Text(text, CLASSES.index(label), relevant=relevant, group=label)
        )
    return material


def _from_hub(row: Row) -> Row:
    """Return a row from the hub in the format of the local file."""
    labels = [_HUB_CLASSES[label] for label in row["annotators"]["label"]]
    return {**row, "labels": labels, "tokens": row["post_tokens"]}
