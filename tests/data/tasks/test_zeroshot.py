from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from headtohead.common.errors import UserError
from headtohead.data.tasks.zeroshot import KINDS, Choice, Example, Task, chosen_tasks, find_task

CHOSEN = {"query": "Question: which?\n", "choices": ["this one", "that"], "gold": 1}
FILES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "lambada": ("zeroshot/lambada_openai", [{"context": "She said his ", "continuation": "name"}]),
    "arithmetic": (
        "zeroshot/simple_arithmetic_withspaces",
        [{"context": "2 + 2 =", "continuation": " 4"}],
    ),
    "winogrande": (
        "zeroshot/winogrande",
        [{"context_options": ["So Ann", "So Eve"], "continuation": "won.", "gold": 0}],
    ),
    **{
        name: (f"zeroshot/{name}", [CHOSEN])
        for name in ("arc_easy", "arc_challenge", "boolq", "piqa", "copa")
    },
}


def packed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode()))


def made(folder: Path) -> Path:
    """Return a data directory with one example of every task."""
    for file, rows in FILES.values():
        packed(folder / f"{file}.jsonl.xz", "".join(json.dumps(row) + "\n" for row in rows))
    header = "index\tsentence1\tsentence2\tlabel\n"
    packed(
        folder / "glue/RTE.dev.tsv.xz",
        header + '0\tA "cat sat.\tA cat.\tentailment\n1\tB\u2028b\tC\tnot_entailment\n',
    )
    packed(
        folder / "sva/marvin_linzen.tsv.xz",
        "construction\tcondition\tgrammatical\tungrammatical\n"
        "subj_rel\tx\tthe cats that see the dog smile now\tthe cats that see the dog smiles now\n",
    )
    packed(
        folder / "sva/linzen_gulordava_filtered.tsv.xz",
        "verb_idx\tcorrect\twrong\tn_attractors\tsentence\n3\thave\thas\t1\tsongs of him have ends . <eos>\n",
    )
    return folder


def test_every_task_is_read_and_the_answer_starts_with_a_space(tmp_path: Path) -> None:
    data = made(tmp_path)
    tasks = {name: find_task(name, data) for name in KINDS}
    assert tasks["lambada"].examples == (Example((Choice("She said his", " name"),)),)
    assert tasks["arithmetic"].examples == (Example((Choice("2 + 2 =", " 4"),)),)
    assert {name for name, task in tasks.items() if task.exact} == {"lambada", "arithmetic"}
    question = "Question: which?"
    both = (" this one", " that")
    for name in ("arc_easy", "arc_challenge", "boolq", "piqa"):
        assert tasks[name].examples == (
            Example(tuple(Choice(f"{question}\nAnswer:", text) for text in both), 1),
        )
    assert tasks["copa"].examples[0].choices[0] == Choice(question, " this one")
    assert tasks["winogrande"].examples == (
        Example((Choice("So Ann", " won."), Choice("So Eve", " won.")), 0),
    )
    shared = "the cats that see the dog"
    pair = (Choice(shared, " smile now"), Choice(shared, " smiles now"))
    assert tasks["marvin_linzen"].examples == (Example(pair, 0),)
    verb = (Choice("songs of him", " have"), Choice("songs of him", " has"))
    assert tasks["gulordava"].examples == (Example(verb, 0),)
    first, second = tasks["rte"].examples
    assert first.choices[0] == Choice('A "cat sat.\nQuestion: A cat. True or False?\nAnswer:', " True")
    assert (first.answer, second.answer) == (0, 1)


def test_the_data_directory_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"task 'copa' not found; download it with: h2h data get copa$"):
        find_task("copa")
    monkeypatch.setenv("H2H_DATA", str(made(tmp_path)))
    assert len(find_task("copa").examples) == 1
    (tmp_path / "zeroshot/copa.jsonl.xz").unlink()
    with pytest.raises(UserError, match=r"task 'copa' not found; download it with: h2h data get copa$"):
        find_task("copa")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"query": "a", "choices": ["b"]}', "row 1: no field 'gold'"),
        (
            '{"query": "a", "choices": ["b"], "gold": 0}\n{"query": 1, "choices": ["b"], "gold": 0}',
            "row 2",
        ),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "answer 2 is not one of 2 choices"),
        ('{"query": "a", "choices": ["b", "c"], "gold": "b"}', "not the index of a choice"),
        ('{"query": "a", "choices": "bc", "gold": 0}', "expected a list of choices, got str"),
        ('{"query": "a", "choices": ["b", " "], "gold": 0}', "an answer is empty"),
        ("{", "line 1: not JSON"),
        ("", "contains no examples"),
    ],
)
def test_errors_name_the_damaged_file_and_example(tmp_path: Path, text: str, message: str) -> None:
    packed(tmp_path / "zeroshot/copa.jsonl.xz", text)
    with pytest.raises(UserError, match=message) as raised:
        find_task("copa", tmp_path)
    assert "copa.jsonl.xz" in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a\tb\tthe cat is\tthe cat is", "row 1: an answer is empty"),
        ("a\tb\tthe cat is", "line 2: 3 columns, expected 4"),
    ],
)
def test_a_bad_pair_is_rejected(tmp_path: Path, row: str, message: str) -> None:
    header = "construction\tcondition\tgrammatical\tungrammatical\n"
    packed(tmp_path / "sva/marvin_linzen.tsv.xz", f"{header}{row}\n")
    with pytest.raises(UserError, match=message):
        find_task("marvin_linzen", tmp_path)


def test_a_truncated_archive_is_rejected(tmp_path: Path) -> None:
    path = made(tmp_path) / "zeroshot/copa.jsonl.xz"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="damaged file"):
        find_task("copa", tmp_path)


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    first = find_task("copa", made(tmp_path))
    assert find_task("copa", tmp_path) is first
    packed(tmp_path / "zeroshot/copa.jsonl.xz", json.dumps(CHOSEN | {"gold": 0, "query": "a longer one"}))
    assert [example.answer for example in find_task("copa", tmp_path).examples] == [0]


def test_names_are_checked_and_all_selects_every_task() -> None:
    assert chosen_tasks("all") == chosen_tasks(["copa", "all"]) == list(KINDS)
    assert chosen_tasks(["rte", "copa", "rte"]) == ["rte", "copa"]
    with pytest.raises(UserError, match="unknown task 'lambda'; did you mean 'lambada'"):
        chosen_tasks("lambda")


def test_a_part_is_spread_over_the_file() -> None:
    task = Task("x", True, tuple(Example((Choice("", f" {index}"),)) for index in range(10)))
    assert [example.choices[0].text for example in task.part(4).examples] == [" 0", " 2", " 5", " 7"]
    assert task.part(0) == task.part(10) == task.part(99) == task
    with pytest.raises(UserError, match="limit=-1 is negative"):
        task.part(-1)


@pytest.mark.slow
def test_the_shared_tasks_have_the_published_sizes(shared_data: Path) -> None:
    counts = {name: len(find_task(name, shared_data).examples) for name in KINDS}
    assert counts == {
        "lambada": 5153,
        "arc_easy": 2376,
        "arc_challenge": 1172,
        "boolq": 3270,
        "copa": 100,
        "piqa": 1838,
        "winogrande": 1267,
        "rte": 277,
        "marvin_linzen": 152300,
        "gulordava": 7489,
        "arithmetic": 1000,
    }
