"""The trained tasks that are read from files: HateXplain, subject-verb agreement, SQuAD, GLUE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from headtohead.data.tasks.base import Text, joined
from headtohead.data.tasks.readers import Kind, Row
from headtohead.data.text import hashed_split

Found = tuple[str, Text] | str
"""(split, example), or the reason to skip a row or a part of it, which is counted."""
Read = Callable[[str, Row], Iterator[Found]]
_LABELS = {"VBZ": 0, "VBP": 1}
_HATEXPLAIN_SPLITS = {"train": "train", "val": "valid", "test": "test"}
_CLASSES, _HUB_CLASSES = ("normal", "offensive", "hatespeech"), ("hatespeech", "normal", "offensive")


def _hatexplain(key: str, row: Row) -> Iterator[Found]:
    """Posts on whose class at least two annotators agree; the words that each annotator marked are relevant."""
    if "labels" not in row:  # from the hub
        labels = [_HUB_CLASSES[label] for label in row["annotators"]["label"]]
        row = {**row, "labels": labels, "tokens": row["post_tokens"]}
    counts: Counter[str] = Counter(row["labels"])
    label, votes = counts.most_common(1)[0]
    if votes < 2 or row["split"] not in _HATEXPLAIN_SPLITS:
        yield "skipped: annotators disagree"
        return
    masks = []
    for mask in row["rationales"]:
        if len(mask) == len(row["tokens"]):
            masks.append([bool(mark) for mark in mask])
        else:
            yield "skipped: rationale masks whose length differs from the text"
    text, relevant = joined(row["tokens"], masks)
    yield _HATEXPLAIN_SPLITS[row["split"]], Text(text, _CLASSES.index(label), relevant=relevant, group=label)


def _number(key: str, row: Row) -> Iterator[Found]:
    """Linzen's number prediction: the words before a verb, split 80/10/10; those with 4 and 5 attractors only in test.

    The source does not say which word is the subject, so no token is marked relevant.
    """
    group = "any number of attractors" if key == "val" else f"{key} attractor{'s' * (key != '1')}"
    split = "test" if key in ("4", "5") else hashed_split(row["text"], 0.1, 0.1)
    yield split, Text(row["text"], _LABELS[row["label"]], group=group)


def _sentences(verb: bool) -> Read:
    """Linzen's sentences, split 80/10/10: whole, or only the words before the verb; subject and verb are relevant."""

    def read(key: str, row: Row) -> Iterator[Found]:
        words, subject, index = row["sentence"].split(" "), int(row["subj_idx"]), int(row["verb_idx"])
        # A rare word is replaced by its part of speech.
        forms = (row["verb"], row["verb_pos"])
        if not 0 <= subject < index < len(words) or words[index] not in forms:
            yield "skipped: subject not before the verb, or verb not at its index"
            return
        shown = words if verb else words[:index]
        text, relevant = joined(shown, [[at in (subject, index) for at in range(len(shown))]])
        label = _LABELS[row["verb_pos"]]
        split = hashed_split(row["sentence"], 0.1, 0.1)
        yield split, Text(text, label, relevant=relevant, group=_NUMBERS[label])

    return read


def _pairs(key: str, row: Row) -> Iterator[Found]:
    """Marvin and Linzen's minimal pairs, split 80/10/10 by pair; the words in which the two differ are relevant."""
    good, bad = row["grammatical"].split(" "), row["ungrammatical"].split(" ")
    if len(good) != len(bad) or good == bad:
        yield "skipped: pairs of different length or without a difference"
        return
    mask = [one != other for one, other in zip(good, bad, strict=True)]
    split = hashed_split(row["grammatical"], 0.1, 0.1)
    for label, words in enumerate((bad, good)):
        text, relevant = joined(words, [mask])
        yield split, Text(text, label, relevant=relevant, group=row["construction"])


def _published(key: str, text: str) -> str:
    """Return the split of a text: test is the published dev set, valid a tenth of train by hash."""
    return "test" if key == "dev" else hashed_split(text, 0.1, 0.0)


_AROUND = 200
"""Characters of the paragraph kept on either side of the answer, as in the paper; cut between words."""


def _squad(around: int | None) -> Read:
    """Questions about whole paragraphs, or about `around` characters on either side of the answer, which is relevant."""

    def read(key: str, row: Row) -> Iterator[Found]:
        paragraph, answers = row["context"], row["answers"]["text"]
        start = row["answers"]["answer_start"][0]
        stop = start + len(answers[0])
        if start < 0 or not answers[0].strip() or paragraph[start:stop] != answers[0]:
            yield "skipped: answer not at its stated offset"
            return
        low, high = 0, len(paragraph)
        if around is not None:
            low, high = max(0, start - around), min(len(paragraph), stop + around)
            if low:
                low = paragraph.find(" ", low, start) + 1 or start
            if high < len(paragraph):
                cut = paragraph.rfind(" ", stop, high)
                high = cut if cut >= 0 else stop
        question = row["question"].strip()
        head = f"Q: {question} C: "
        shift = len(head) - low
        # Split by article, because paragraphs of one article answer each other's questions.
        yield (
            _published(key, row["title"]),
            Text(
                f"{head}{paragraph[low:high]} A:",
                answers=tuple(f" {answer.strip()}" for answer in dict.fromkeys(answers)),
                relevant=(((start + shift, stop + shift),),),
                key=f"{question}\n{paragraph}",
            ),
        )

    return read


def _glue(
    name: str,
    about: str,
    texts: tuple[str, ...],
    classes: dict[str, str],
    label: str = "label",
    columns: tuple[str, ...] = (),
) -> Kind[Found]:
    """Return a task of GLUE, from the columns with its texts and label; `classes` has stored labels and class names."""
    values = list(classes)

    def read(key: str, row: Row) -> Iterator[Found]:
        text = "\n".join(row[column].strip() for column in texts)
        if str(row[label]) not in values:
            raise ValueError(f"label '{row[label]}' is not one of {', '.join(values)}")
        yield _published(key, text), Text(text, values.index(str(row[label])))

    files = {key: f"glue/{name}.{key}.tsv.xz" for key in ("train", "dev")}
    about = f"{about} (GLUE); test is the published dev"
    metric = "matthews" if name == "CoLA" else "accuracy"
    return Kind(about, files, read, tuple(classes.values()), metric, columns)


_NUMBERS = ("singular", "plural")
_PREFIXES = {"val": "val", **{str(count): f"test.{count}" for count in range(1, 6)}}
_SENTENCES = {key: f"sva/linzen_sentences.{key}.tsv.xz" for key in ("dev", "test")}
_SQUAD = {"train": "squad/train-subset-v1.1.json.xz|squad/train-v1.1.json", "dev": "squad/dev-v1.1.json.xz"}
KINDS: dict[str, Kind[Found]] = {
    "hatexplain": Kind(
        "posts that are normal, offensive or hateful, with annotators' rationales (offensive language)",
        {"all": "hatexplain/hatexplain.jsonl.xz"},
        _hatexplain,
        _CLASSES,
    ),
    "agreement": Kind(
        "a verb's number from the words before it, by number of attractors (Linzen); no relevant tokens marked",
        {key: f"sva/linzen_numpred.{part}.tsv.xz" for key, part in _PREFIXES.items()},
        _number,
        _NUMBERS,
        columns=("label", "text"),
    ),
    "agreement-sentences": Kind(
        "a verb's number from the whole sentence (Linzen); subject and verb are relevant",
        _SENTENCES,
        _sentences(verb=True),
        _NUMBERS,
    ),
    "agreement-subject": Kind(
        "a verb's number from the words before it (Linzen's sentences); the subject is relevant",
        _SENTENCES,
        _sentences(verb=False),
        _NUMBERS,
    ),
    "agreement-pairs": Kind(
        "right or wrong sentences of minimal pairs (Marvin and Linzen); the words that differ are relevant",
        {"all": "sva/marvin_linzen.tsv.xz"},
        _pairs,
        ("wrong", "right"),
    ),
    "squad": Kind(
        f"SQuAD v1.1: generate the answer from {_AROUND} characters on either side of it",
        _SQUAD,
        _squad(_AROUND),
        metric="f1",
    ),
    "squad-whole": Kind(
        "SQuAD v1.1: generate the answer from the whole paragraph",
        _SQUAD,
        _squad(None),
        metric="f1",
    ),
    "glue-cola": _glue(
        "CoLA",
        "whether a sentence is acceptable English",
        ("sentence",),
        {"0": "unacceptable", "1": "acceptable"},
        columns=("source", "label", "mark", "sentence"),
    ),
    "glue-mrpc": _glue(
        "MRPC",
        "whether two sentences have the same meaning",
        ("#1 String", "#2 String"),
        {"0": "different", "1": "same"},
        label="Quality",
    ),
    "glue-rte": _glue(
        "RTE",
        "whether one sentence follows from another",
        ("sentence1", "sentence2"),
        {"entailment": "follows", "not_entailment": "does not follow"},
    ),
    "glue-sst2": _glue(
        "SST-2",
        "whether a phrase of a movie review is positive",
        ("sentence",),
        {"0": "negative", "1": "positive"},
    ),
}
