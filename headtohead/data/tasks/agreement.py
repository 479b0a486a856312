"""Subject-verb agreement: the verb's number from the words before it or the whole sentence, and minimal pairs."""

from __future__ import annotations

from collections.abc import Callable

from headtohead.data.tasks.base import Material, Text, hashed_split, joined
from headtohead.data.tasks.readers import Rows

NUMBERS = ("singular", "plural")
PAIRS = ("wrong", "right")
_LABELS = {"VBZ": 0, "VBP": 1}
_MIXED, _TEST_ONLY = ("val", "1", "2", "3"), ("4", "5")


def read_prefixes(rows: Rows) -> Material:
    """Return Linzen's number prediction: the words before a verb, and its number.

    val and the items with 1 to 3 attractors are split 80/10/10 by hash; those with 4 and 5 are only in test. The source
    does not say which word is the subject, so no token is marked relevant.
    """
    material = Material()
    for key in (*_MIXED, *_TEST_ONLY):
        group = "any number of attractors" if key == "val" else f"{key} attractor{'s' * (key != '1')}"
        for row in rows[key]:
            split = "test" if key in _TEST_ONLY else hashed_split(row["text"], 0.1, 0.1)
            material.splits[split].append(Text(row["text"], _LABELS[row["label"]], group=group))
    return material


def sentence_reader(verb: bool) -> Callable[[Rows], Material]:
    """Return the reader of Linzen's sentences, split 80/10/10 by hash: whole, or only the words before the verb.

    The subject is relevant, and the verb if it is included.
    """

    def read(rows: Rows) -> Material:
        material = Material()
        for key in ("dev", "test"):
            for row in rows[key]:
                words, subject, index = row["sentence"].split(" "), int(row["subj_idx"]), int(row["verb_idx"])
                # A rare word is replaced by its part of speech.
                if not 0 <= subject < index < len(words) or words[index] not in (
                    row["verb"],
                    row["verb_pos"],
                ):
                    material.notes["skipped: subject not before the verb, or verb not at its index"] += 1
                    continue
                shown = words if verb else words[:index]
                marked = (subject, index)
                text, relevant = joined(shown, [[at in marked for at in range(len(shown))]])
                label = _LABELS[row["verb_pos"]]
                split = hashed_split(row["sentence"], 0.1, 0.1)
                material.splits[split].append(Text(text, label, relevant=relevant, group=NUMBERS[label]))
        return material

    return read


def read_pairs(rows: Rows) -> Material:
    """Return Marvin and Linzen's minimal pairs, each sentence right or wrong, split 80/10/10 by pair.

    The words in which the two differ are relevant.
    """
    material = Material()
    for row in rows["all"]:
        good, bad = row["grammatical"].split(" "), row["ungrammatical"].split(" ")
        if len(good) != len(bad) or good == bad:
            material.notes["skipped: pairs of different length or without a difference"] += 1
            continue
        mask = [one != other for one, other in zip(good, bad, strict=True)]
        split = hashed_split(row["grammatical"], 0.1, 0.1)
        for label, words in enumerate((bad, good)):
            text, relevant = joined(words, [mask])
            material.splits[split].append(Text(text, label, relevant=relevant, group=row["construction"]))
    return material
