"""Subject-verb agreement: the verb's number from the words before it, whole sentences, and minimal pairs."""

from __future__ import annotations

from collections.abc import Callable

from headtohead.data.tasks.base import Material, Text, hashed_split, joined
from headtohead.data.tasks.readers import Places

NUMBERS = ("singular", "plural")
PAIRS = ("wrong", "right")
_LABELS = {"VBZ": 0, "VBP": 1}
_MIXED, _TEST_ONLY = ("val", "1", "2", "3"), ("4", "5")


def read_prefixes(rows: Places) -> Material:
    """Return Linzen's number prediction: words before a verb, and its number.

    val and the items of 1 to 3 attractors are divided 80/10/10 by hash; those of 4 and 5 are for testing alone. The
    source does not say which word is the subject: no token is marked relevant.
    """
    material = Material()
    for key in (*_MIXED, *_TEST_ONLY):
        group = "any number of attractors" if key == "val" else f"{key} attractor{'s' * (key != '1')}"
        for row in rows[key]:
            split = "test" if key in _TEST_ONLY else hashed_split(row["text"], 0.1, 0.1)
            material.splits[split].append(Text(row["text"], _LABELS[row["label"]], group=group))
    return material


def sentence_reader(verb: bool) -> Callable[[Places], Material]:
    """Return the reader of Linzen's sentences, divided 80/10/10 by hash: whole, or the words before the verb alone.

    The subject is relevant, and the verb where it is seen.
    """

    def read(rows: Places) -> Material:
        material = Material()
        for key in ("dev", "test"):
            for row in rows[key]:
                words, subject, place = row["sentence"].split(" "), int(row["subj_idx"]), int(row["verb_idx"])
                # A rare word stands as its part of speech.
                if not 0 <= subject < place < len(words) or words[place] not in (
                    row["verb"],
                    row["verb_pos"],
                ):
                    material.notes["subject not before the verb, or verb not in its place, left out"] += 1
                    continue
                shown = words if verb else words[:place]
                marked = (subject, place)
                text, relevant = joined(shown, [[at in marked for at in range(len(shown))]])
                label = _LABELS[row["verb_pos"]]
                split = hashed_split(row["sentence"], 0.1, 0.1)
                material.splits[split].append(Text(text, label, relevant=relevant, group=NUMBERS[label]))
        return material

    return read


def read_pairs(rows: Places) -> Material:
    """Return Marvin and Linzen's minimal pairs, each sentence right or wrong, divided 80/10/10 by pair.

    The words in which the two differ are relevant.
    """
    material = Material()
    for row in rows["all"]:
        good, bad = row["grammatical"].split(" "), row["ungrammatical"].split(" ")
        if len(good) != len(bad) or good == bad:
            material.notes["pairs that do not differ word for word, left out"] += 1
            continue
        mask = [one != other for one, other in zip(good, bad, strict=True)]
        split = hashed_split(row["grammatical"], 0.1, 0.1)
        for label, words in enumerate((bad, good)):
            text, relevant = joined(words, [mask])
            material.splits[split].append(Text(text, label, relevant=relevant, group=row["construction"]))
    return material
