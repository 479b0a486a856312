"""Zero-shot tasks by name: labeled examples read from the files of known evaluation sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from headtohead.common.errors import UserError, unknown
from headtohead.data.locate import locate
from headtohead.data.tasks.base import spread
from headtohead.data.tasks.readers import Kind, Row

ALL = "all"


@dataclass(frozen=True)
class Choice:
    """A context and a candidate continuation, which starts with a space."""

    context: str
    text: str

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("an answer is empty")


@dataclass(frozen=True)
class Example:
    """Choices and the index of the right one; a single choice must be generated exactly."""

    choices: tuple[Choice, ...]
    answer: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer {self.answer} is not one of {len(self.choices)} choices")


@dataclass(frozen=True)
class Task:
    """A named set of examples."""

    name: str
    exact: bool
    """Whether the answer is generated rather than chosen."""
    examples: tuple[Example, ...]

    def part(self, limit: int) -> Task:
        """Return the task with at most `limit` examples, spread evenly over the file; 0 keeps all."""
        if limit < 0:
            raise UserError(f"limit={limit} is negative; use 0 for every example")
        return replace(self, examples=tuple(spread(self.examples, limit)))


def chosen_tasks(given: str | Sequence[str]) -> list[str]:
    """Return the names of the given tasks, each once; `all` selects every task."""
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        if name not in KINDS and name != ALL:
            raise unknown("task", name, [*KINDS, ALL])
    return list(KINDS) if ALL in names else list(dict.fromkeys(names))


def find_task(name: str, data_dir: str | Path | None = None) -> Task:
    """Return the examples of the task of that name, from the data directory."""
    if name not in KINDS:
        raise unknown("task", name, KINDS)
    kind = KINDS[name]
    paths = locate("task", name, kind.files, data_dir)
    state = tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in paths.values())
    return _read_task(name, tuple(paths.items()), state)


@lru_cache(maxsize=32)
def _read_task(name: str, paths: tuple[tuple[str, Path], ...], state: tuple[tuple[int, int], ...]) -> Task:
    """Return a task from its files; `state` differs once a file was changed."""
    kind = KINDS[name]
    examples = tuple(kind.read_all(dict(paths)))
    if not examples:
        raise UserError(f"{dict(paths)['all']} contains no examples")
    return Task(name, kind.metric == "exact_match", examples)


# --- what is read from a row ---------------------------------------------------------------------------------------


def _choice(context: object, text: object, joint: str = "") -> Choice:
    """Return a choice with the space in the continuation, so that no tokenizer sees a context that ends in a space."""
    if not isinstance(context, str) or not isinstance(text, str):
        raise TypeError("context and answer must be text")
    return Choice(context.rstrip() + joint, f" {text.strip()}")


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"the answer is {value!r}, not the index of a choice")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list of choices, got {type(value).__name__}")
    return value


def _written(_: str, row: Row) -> Iterator[Example]:
    yield Example((_choice(row["context"], row["continuation"]),))


def _chosen(joint: str) -> Callable[[str, Row], Iterator[Example]]:
    def read(_: str, row: Row) -> Iterator[Example]:
        choices = tuple(_choice(row["query"], text, joint) for text in _list(row["choices"]))
        yield Example(choices, _number(row["gold"]))

    return read


def _fitted(_: str, row: Row) -> Iterator[Example]:
    """The contexts differ and the continuation is the same: which context makes it likelier."""
    choices = tuple(_choice(context, row["continuation"]) for context in _list(row["context_options"]))
    yield Example(choices, _number(row["gold"]))


def _paired(_: str, row: Row) -> Iterator[Example]:
    """Two sentences of which one is right: the context is their common prefix, the choices are the remainders."""
    pair = [row[name].split(" ") for name in ("grammatical", "ungrammatical")]
    same = sum(1 for _ in takewhile(lambda words: words[0] == words[1], zip(*pair, strict=False)))
    shared = " ".join(pair[0][:same])
    yield Example(tuple(_choice(shared, " ".join(words[same:])) for words in pair))


def _inflected(_: str, row: Row) -> Iterator[Example]:
    """The context is the words before a verb, the choices are its two forms."""
    before = " ".join(row["sentence"].split(" ")[: int(row["verb_idx"])])
    yield Example(tuple(_choice(before, row[form]) for form in ("correct", "wrong")))


def _entailed(_: str, row: Row) -> Iterator[Example]:
    context = f"{row['sentence1'].rstrip()}\nQuestion: {row['sentence2'].strip()} True or False?"
    choices = tuple(_choice(context, text, _ANSWER) for text in ("True", "False"))
    yield Example(choices, ("entailment", "not_entailment").index(row["label"]))


_ANSWER = "\nAnswer:"
KINDS: dict[str, Kind[Example]] = {
    "lambada": Kind(
        "generate the last word of a passage (OpenAI's version, test)",
        {"all": "zeroshot/lambada_openai.jsonl.xz"},
        _written,
        metric="exact_match",
    ),
    "arc_easy": Kind("science questions, test", {"all": "zeroshot/arc_easy.jsonl.xz"}, _chosen(_ANSWER)),
    "arc_challenge": Kind(
        "harder science questions, test", {"all": "zeroshot/arc_challenge.jsonl.xz"}, _chosen(_ANSWER)
    ),
    "boolq": Kind(
        "yes or no after a passage, validation", {"all": "zeroshot/boolq.jsonl.xz"}, _chosen(_ANSWER)
    ),
    "copa": Kind(
        "the cause or effect of an event, validation", {"all": "zeroshot/copa.jsonl.xz"}, _chosen("")
    ),
    "piqa": Kind(
        "how to do everyday things, validation", {"all": "zeroshot/piqa.jsonl.xz"}, _chosen(_ANSWER)
    ),
    "winogrande": Kind("pronoun resolution, validation", {"all": "zeroshot/winogrande.jsonl.xz"}, _fitted),
    "rte": Kind(
        "whether one sentence follows from another (GLUE, dev)", {"all": "glue/RTE.dev.tsv.xz"}, _entailed
    ),
    "marvin_linzen": Kind(
        "which of two sentences that differ in agreement or a reflexive is likelier (Marvin and Linzen's templates)",
        {"all": "sva/marvin_linzen.tsv.xz"},
        _paired,
    ),
    "gulordava": Kind(
        "a verb's number in natural sentences, with and without attractors (Gulordava's subset of Linzen's)",
        {"all": "sva/linzen_gulordava_filtered.tsv.xz"},
        _inflected,
    ),
    "arithmetic": Kind(
        "generate the sum of small numbers",
        {"all": "zeroshot/simple_arithmetic_withspaces.jsonl.xz"},
        _written,
        metric="exact_match",
    ),
}
