"""Zero-shot tasks by name: labeled examples read from the files of known evaluation sets."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headtohead.common.errors import DamagedFile, UserError, unknown
from headtohead.data.corpora import data_root
from headtohead.data.text import read_bytes, read_json_lines

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
        count = len(self.examples)
        if not 0 < limit < count:
            return self
        chosen = tuple(self.examples[index * count // limit] for index in range(limit))
        return Task(self.name, self.exact, chosen)


@dataclass(frozen=True)
class Kind:
    """A named task: a one-line description, its file, and the reader."""

    about: str
    file: str
    read: Callable[[Path], Iterator[Example]]
    exact: bool = False


def task_names() -> dict[str, str]:
    """Return the tasks with a one-line description of each."""
    return {name: kind.about for name, kind in _KINDS.items()}


def chosen_tasks(given: str | Sequence[str]) -> list[str]:
    """Return the names of the given tasks, each once; `all` selects every task."""
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        if name not in _KINDS and name != ALL:
            raise unknown("task", name, [*_KINDS, ALL])
    return list(_KINDS) if ALL in names else list(dict.fromkeys(names))


def task_file(name: str, data_dir: str | Path | None = None) -> Path:
    """Return the file of a task; raise if it is missing."""
    if name not in _KINDS:
        raise unknown("task", name, _KINDS)
    root = data_root(data_dir)
    path = root / _KINDS[name].file if root else None
    if path is None or not path.is_file():
        where = f"{path} is missing" if path else "no data directory is given (H2H_DATA or --data-dir)"
        raise UserError(f"task '{name}' not found: {where}")
    return path


def find_task(name: str, data_dir: str | Path | None = None) -> Task:
    """Return the examples of the task of that name, from the data directory."""
    path = task_file(name, data_dir)
    kind = _KINDS[name]
    examples: list[Example] = []
    try:
        examples.extend(kind.read(path))
    except (KeyError, TypeError, ValueError) as error:
        message = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}, example {len(examples) + 1}: {message}") from None
    except (lzma.LZMAError, EOFError) as error:
        raise DamagedFile(f"damaged file {path}: {error}") from None
    if not examples:
        raise UserError(f"{path} contains no examples")
    return Task(name, kind.exact, tuple(examples))


# --- readers -------------------------------------------------------------------------------------------------------


def _choice(context: object, joint: str, text: object) -> Choice:
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


def _written(path: Path) -> Iterator[Example]:
    for row in read_json_lines(path):
        yield Example((_choice(row["context"], "", row["continuation"]),))


def _chosen(joint: str) -> Callable[[Path], Iterator[Example]]:
    def read(path: Path) -> Iterator[Example]:
        for row in read_json_lines(path):
            choices = tuple(_choice(row["query"], joint, text) for text in _list(row["choices"]))
            yield Example(choices, _number(row["gold"]))

    return read


def _fitted(path: Path) -> Iterator[Example]:
    """The contexts differ and the continuation is the same: which context makes it likelier."""
    for row in read_json_lines(path):
        contexts = _list(row["context_options"])
        choices = tuple(_choice(context, "", row["continuation"]) for context in contexts)
        yield Example(choices, _number(row["gold"]))


def _table(path: Path) -> Iterator[dict[str, str]]:
    header, *lines = read_bytes(path).decode("utf-8").rstrip("\n").split("\n")
    columns = header.split("\t")
    for line in lines:
        yield dict(zip(columns, line.split("\t"), strict=True))


def _paired(path: Path) -> Iterator[Example]:
    """Two sentences of which one is right: the context is their common prefix, the choices are the remainders."""
    for row in _table(path):
        pair = [row[name].split(" ") for name in ("grammatical", "ungrammatical")]
        same = 0
        for one, other in zip(*pair, strict=False):
            if one != other:
                break
            same += 1
        shared = " ".join(pair[0][:same])
        yield Example(tuple(_choice(shared, "", " ".join(words[same:])) for words in pair))


def _inflected(path: Path) -> Iterator[Example]:
    """The context is the words before a verb, the choices are its two forms."""
    for row in _table(path):
        before = row["sentence"].split(" ")[: int(row["verb_idx"])]
        yield Example(tuple(_choice(" ".join(before), "", row[form]) for form in ("correct", "wrong")))


def _entailed(path: Path) -> Iterator[Example]:
    for row in _table(path):
        context = f"{row['sentence1'].rstrip()}\nQuestion: {row['sentence2'].strip()} True or False?"
        choices = tuple(_choice(context, _ANSWER, text) for text in ("True", "False"))
        yield Example(choices, ("entailment", "not_entailment").index(row["label"]))


_ANSWER = "\nAnswer:"
_KINDS: dict[str, Kind] = {
    "lambada": Kind(
        "generate the last word of a passage (OpenAI's version, test)",
        "zeroshot/lambada_openai.jsonl.xz",
        _written,
        exact=True,
    ),
    "arc_easy": Kind("science questions, test", "zeroshot/arc_easy.jsonl.xz", _chosen(_ANSWER)),
    "arc_challenge": Kind(
        "harder science questions, test", "zeroshot/arc_challenge.jsonl.xz", _chosen(_ANSWER)
    ),
    "boolq": Kind("yes or no after a passage, validation", "zeroshot/boolq.jsonl.xz", _chosen(_ANSWER)),
    "copa": Kind("the cause or effect of an event, validation", "zeroshot/copa.jsonl.xz", _chosen("")),
    "piqa": Kind("how to do everyday things, validation", "zeroshot/piqa.jsonl.xz", _chosen(_ANSWER)),
    "winogrande": Kind("pronoun resolution, validation", "zeroshot/winogrande.jsonl.xz", _fitted),
    "rte": Kind("whether one sentence follows from another (GLUE, dev)", "glue/RTE.dev.tsv.xz", _entailed),
    "marvin_linzen": Kind(
        "which of two sentences that differ in agreement or a reflexive is likelier (Marvin and Linzen's templates)",
        "sva/marvin_linzen.tsv.xz",
        _paired,
    ),
    "gulordava": Kind(
        "a verb's number in natural sentences, with and without attractors (Gulordava's subset of Linzen's)",
        "sva/linzen_gulordava_filtered.tsv.xz",
        _inflected,
    ),
    "arithmetic": Kind(
        "generate the sum of small numbers",
        "zeroshot/simple_arithmetic_withspaces.jsonl.xz",
        _written,
        exact=True,
    ),
}
