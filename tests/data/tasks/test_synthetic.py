from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example, Task
from headtohead.data.tasks.registry import prepare_task
from headtohead.data.tasks.synthetic import SYNTHETIC, Grammar, Toy


def task(name: str) -> Task:
    return prepare_task(f"{name}{',' if ':' in name else ':'}train=300", context=128)


def answers(example: Example) -> list[int]:
    assert example.targets is not None
    return example.targets[example.targets >= 0].tolist()


def relevant(example: Example) -> list[list[int]]:
    return [row.nonzero()[0].tolist() for row in example.relevant]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_every_task_is_deterministic_with_disjoint_splits(name: str) -> None:
    one, again = task(name), task(name)
    assert {split: len(rows) for split, rows in one.splits.items()} == {"train": 300, "valid": 30, "test": 30}
    keys = [example.tokens.tobytes() for rows in one.splits.values() for example in rows]
    assert keys == [example.tokens.tobytes() for rows in again.splits.values() for example in rows]
    assert len(keys) == len(set(keys))
    assert one.content == again.content
    for example in one.splits["train"]:
        assert example.relevant.any(axis=1).all(), "every answer has relevant tokens"
        assert 0 <= example.tokens.min() <= example.tokens.max() < one.vocabulary
        assert all(0 <= answer < one.vocabulary for answer in (answers(example) if example.label < 0 else []))
    other = task(f"{name}:seed=1")
    assert other.content != one.content
    assert other.splits["train"][0].tokens.tolist() != one.splits["train"][0].tokens.tolist()


@pytest.mark.parametrize("form", ["write", "place"])
@pytest.mark.parametrize("name", ["copy", "reverse", "sort", "swap", "subtraction"])
def test_lists_have_the_right_answers(name: str, form: str) -> None:
    for example in task(f"{name}:length=8,form={form}").splits["test"]:
        values = example.tokens[:8].tolist()
        wanted = {
            "copy": values,
            "reverse": list(reversed(values)),
            "sort": sorted(values),
            "swap": values[4:] + values[:4],
            "subtraction": [(values[i] - values[i + 4]) % 10 for i in range(4)],
        }[name]
        assert answers(example) == wanted
        if form == "write":
            assert example.tokens[8] == 10
            assert example.prompt == 9
            assert example.tokens[9:].tolist() == wanted[:-1], (
                "earlier symbols of the answer are part of the input"
            )
            assert example.targets is not None
            assert example.targets[8] == wanted[0]
        else:
            assert len(example.tokens) == 8
        for answer, marked in zip(wanted, relevant(example), strict=True):
            assert max(marked) < 8
            if name == "subtraction":
                assert (values[marked[0]] - values[marked[1]]) % 10 == answer
            else:
                assert {values[index] for index in marked} == {answer}


def test_recall_targets_are_the_values_of_the_queried_keys() -> None:
    for example in task("recall:pairs=6,queries=3").splits["test"]:
        known = dict(zip(example.tokens[0:12:2].tolist(), example.tokens[1:12:2].tolist(), strict=True))
        queries = example.tokens[12:].tolist()
        assert answers(example) == [known[key] for key in queries]
        for key, marked in zip(queries, relevant(example), strict=True):
            assert example.tokens[marked].tolist() == [key, known[key]]


def test_induction_has_one_earlier_occurrence() -> None:
    for example in task("induction").splits["test"]:
        tokens = example.tokens.tolist()
        (index,) = [at for at, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        assert answers(example) == [tokens[index + 1]]
        assert relevant(example) == [[index, index + 1]]


@pytest.mark.parametrize("hops", [1, 3])
def test_pointers_are_followed(hops: int) -> None:
    for example in task(f"pointers:nodes=9,hops={hops}").splits["test"]:
        tokens = example.tokens.tolist()
        points = dict(zip(tokens[0:18:2], tokens[1:18:2], strict=True))
        node, used = tokens[-1], []
        for _ in range(hops):
            used += [index for index in range(0, 18, 2) if tokens[index] == node]
            node = points[node]
        assert answers(example) == [node]
        assert relevant(example) == [sorted(index + more for index in used for more in (0, 1))]


def test_the_toy_has_the_published_shares() -> None:
    random = np.random.default_rng(0)
    examples = [Toy().draw(random) for _ in range(3000)]
    assert {len(example.tokens) for example in examples} == {63}
    mass = np.mean([example.relevant.mean() for example in examples])
    assert mass == pytest.approx(0.349, abs=0.003), "uniform attention"
    for example in examples[:200]:
        kind = int(example.tokens[-1]) - 5
        assert answers(example) == [1 + kind]
        marked = example.tokens[example.relevant[0]]
        assert set(marked // 10) == {kind + 1}
    own = np.concatenate([example.tokens[example.relevant[0]] % 10 for example in examples])
    shares = np.bincount(own) / len(own)
    wanted = np.arange(1, 11) / 55
    assert (np.abs(shares - wanted) < 5 * np.sqrt(wanted / len(own))).all(), "within five standard errors"


def test_the_grammar_counts_attractors() -> None:
    found: Counter[str] = Counter()
    for example in task("grammar:phrases=3").splits["train"]:
        words = [Grammar.words[token] for token in example.tokens]
        subject = words[relevant(example)[0][0]]
        plural = {word for word in words if word.endswith("s") or word == "children"}
        assert (subject in plural) == bool(example.label)
        nouns = [word for word in words if word in Grammar.words[2:26]]
        assert nouns[0] == subject
        attractors = sum((noun in plural) != bool(example.label) for noun in nouns[1:])
        assert example.group.startswith(f"{attractors} attractor")
        found[example.group] += 1
    assert len(found) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("recal", "unknown task 'recal'; did you mean 'recall'"),
        ("recall:pairs", "takes options such as recall:seed=1, got 'pairs'"),
        ("recall:pear=3", "unknown option of recall 'pear'; did you mean 'pairs'"),
        ("recall:pairs=some", "option pairs takes a int, got 'some'"),
        ("recall:pairs=99", "queries=4, pairs=99, keys=32: queries <= pairs <= keys is required"),
        ("swap:length=5", "length=5 is odd"),
        ("pointers:hops=8", "hops=8 is too large"),
        ("copy:length=100", "has examples of 200 tokens; the context is 128"),
        ("copy:length=3,symbols=2", "has fewer than 24,000 distinct examples"),
    ],
)
def test_bad_names_and_options_are_rejected(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_task(name, context=128)
