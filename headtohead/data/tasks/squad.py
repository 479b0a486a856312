"""SQuAD v1.1: questions about a paragraph; the model generates the answer, whose span in the paragraph is relevant."""

from __future__ import annotations

from collections.abc import Callable

from headtohead.data.tasks.base import Material, Text, hashed_split
from headtohead.data.tasks.readers import Row, Rows

AROUND = 200
"""Characters of the paragraph kept on either side of the answer, as in the paper; cut between words."""


def reader(around: int | None) -> Callable[[Rows], Material]:
    """Return the reader of whole paragraphs, or of `around` characters on either side of the answer."""

    def read(rows: Rows) -> Material:
        material = Material()
        for key in ("train", "dev"):
            for row in rows[key]:
                # Split by article, because paragraphs of one article answer each other's questions.
                split = "test" if key == "dev" else hashed_split(row["title"], 0.1, 0.0)
                if (text := _text(row, around)) is None:
                    material.notes["skipped: answer not at its stated offset"] += 1
                else:
                    material.splits[split].append(text)
        return material

    return read


def _text(row: Row, around: int | None) -> Text | None:
    paragraph, answers = row["context"], row["answers"]["text"]
    start = row["answers"]["answer_start"][0]
    stop = start + len(answers[0])
    if start < 0 or not answers[0].strip() or paragraph[start:stop] != answers[0]:
        return None
    low, high = 0, len(paragraph)
    if around is not None:
        low, high = max(0, start - around), min(len(paragraph), stop + around)
        if low:
            low = paragraph.find(" ", low, start) + 1 or start
        if high < len(paragraph):
            cut = paragraph.rfind(" ", stop, high)
            high = cut if cut >= 0 else stop
    head = f"Q: {row['question'].strip()} C: "
    shift = len(head) - low
    return Text(
        f"{head}{paragraph[low:high]} A:",
        answers=tuple(f" {answer.strip()}" for answer in dict.fromkeys(answers)),
        relevant=(((start + shift, stop + shift),),),
        key=f"{row['question'].strip()}\n{paragraph}",
    )
