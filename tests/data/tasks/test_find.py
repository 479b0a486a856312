from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example, Task
from headtohead.data.tasks.registry import KINDS, prepare_task, task_files, task_names

WORDS = ("crimson", "ancient", "modern", "gigantic", "doleful", "peculiar", "bashful", "soaking")


def packed(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode("utf-8")))
    return path


def phrase(number: int) -> str:
    """Return a distinct text for every number below 4096."""
    return " ".join(WORDS[number >> 3 * digit & 7] for digit in range(4))


def post(number: int, split: str, label: str, **changes: Any) -> dict[str, Any]:
    tokens = ["ünder", *phrase(number).split(" ")]
    masks = [] if label == "normal" else [[0, 1, 1, 0, 0], [0, 0, 0, 0, 1]]
    row = {"post_id": str(number), "split": split, "labels": [label, label, "normal"], "tokens": tokens}
    return row | {"rationales": masks} | changes


def posts() -> list[dict[str, Any]]:
    kinds = ("normal", "offensive", "hatespeech")
    return [post(i, ("train", "val", "test")[i // 6 % 3], kinds[i % 3]) for i in range(36)]


def hatexplain(folder: Path, rows: list[dict[str, Any]]) -> Path:
    packed(folder / "hatexplain/hatexplain.jsonl.xz", "".join(json.dumps(row) + "\n" for row in rows))
    return folder


def questions(count: int, title: str, **changes: Any) -> dict[str, Any]:
    paragraphs = []
    for number in range(count):
        context = (
            f"{'far ' * 80}{title} {number} is called Zoë Miller in the {phrase(number)} town {'off ' * 80}."
        )
        start = context.index("Zoë")
        answers = [
            {"text": "Zoë Miller", "answer_start": start},
            {"text": "Miller", "answer_start": start + 4},
        ]
        question = {"question": f"Who is {number} of {title}?", "id": "x", "answers": answers} | changes
        paragraphs.append({"context": context, "qas": [question]})
    return {"title": title, "paragraphs": paragraphs}


def made(folder: Path) -> Path:
    """Return a data directory with small files of every task."""
    hatexplain(folder, posts())
    for key in ("val", *"12345"):
        rows = (
            f"{('VBZ', 'VBP')[i % 2]}\t{phrase(i)} {key}\n" for i in range(100 if key in "val 1 2 3" else 3)
        )
        packed(
            folder / f"sva/linzen_numpred.{'val' if key == 'val' else f'test.{key}'}.tsv.xz", "".join(rows)
        )
    for index, key in enumerate(("dev", "test")):
        rows = (
            f"the {phrase(100 * index + i)} dog runs off\t5\t6\t{('VBZ', 'VBP')[i % 2]}\truns\trun\n"
            for i in range(90)
        )
        head = "sentence\tsubj_idx\tverb_idx\tverb_pos\tverb\tinflected_verb\n"
        packed(folder / f"sva/linzen_sentences.{key}.tsv.xz", head + "".join(rows))
    pairs = (f"simple\tsing\tthe {phrase(i)} dog runs\tthe {phrase(i)} dog run\n" for i in range(100))
    packed(
        folder / "sva/marvin_linzen.tsv.xz",
        "construction\tcondition\tgrammatical\tungrammatical\n" + "".join(pairs),
    )
    for name, data in (
        ("train-subset", [questions(4, f"article {i}") for i in range(20)]),
        ("dev", [questions(5, "Other")]),
    ):
        packed(folder / f"squad/{name}-v1.1.json.xz", json.dumps({"version": "1.1", "data": data}))
    for part, count, first in (("train", 100, 0), ("dev", 10, 200)):
        rows = [(i % 2, phrase(first + i)) for i in range(count)]
        packed(folder / f"glue/CoLA.{part}.tsv.xz", "".join(f'gj04\t{y}\t*\t{x} "said\n' for y, x in rows))
        head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        packed(
            folder / f"glue/MRPC.{part}.tsv.xz", head + "".join(f"{y}\t1\t2\t{x}\t{x}.\n" for y, x in rows)
        )
        names = ("entailment", "not_entailment")
        body = "".join(f"{i}\t{x}\tand {x}\t{names[y]}\n" for i, (y, x) in enumerate(rows))
        packed(folder / f"glue/RTE.{part}.tsv.xz", "index\tsentence1\tsentence2\tlabel\n" + body)
        packed(
            folder / f"glue/SST-2.{part}.tsv.xz",
            "sentence\tlabel\n" + "".join(f"{x} \t{y}\n" for y, x in rows),
        )
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("tasks"))


def text_of(task: Task, example: Example) -> str:
    assert task.tokenizer is not None
    return task.tokenizer.decode(example.tokens.tolist())


def marked(task: Task, example: Example) -> list[str]:
    assert task.tokenizer is not None
    return [task.tokenizer.decode(example.tokens[row].tolist()) for row in example.relevant]


@pytest.mark.parametrize("name", KINDS)
def test_every_task_is_read_with_every_class_in_disjoint_splits(data: Path, name: str) -> None:
    task = prepare_task(name, "bytes", 1200, data_dir=data)
    texts = {split: {text_of(task, example) for example in rows} for split, rows in task.splits.items()}
    assert all(texts.values())
    assert not texts["train"] & texts["valid"]
    assert not texts["test"] & (texts["train"] | texts["valid"])
    assert task.content == prepare_task(name, "bytes", 1200, data_dir=data).content
    assert task.notes == {}


def test_rationales_mark_the_tokens_of_their_words(data: Path) -> None:
    for tokenizer in ("bytes", "bpe:300"):
        task = prepare_task("hatexplain", tokenizer, 64, data_dir=data)
        assert task.classes == ("normal", "offensive", "hatespeech")
        for example in task.splits["test"]:
            words = text_of(task, example).split(" ")
            found = [mark.replace(" ", "") for mark in marked(task, example)]
            wanted = [words[1] + words[2], words[4]] if example.label else [""]
            assert found == wanted


def test_disagreeing_annotators_and_mismatched_masks_are_counted(tmp_path: Path) -> None:
    rows = posts()
    rows[7]["rationales"][1].append(0)
    rows += [post(100, "none", "normal", labels=["normal", "offensive", "hatespeech"])]
    rows += [post(1, "test", "offensive")]  # also in train
    task = prepare_task("hatexplain", "bytes", 64, data_dir=hatexplain(tmp_path, rows))
    assert task.notes == {
        "skipped: annotators disagree": 1,
        "skipped: rationale masks whose length differs from the text": 1,
        "train: skipped, also in a later split": 1,
    }
    assert [len(example.relevant) for example in task.splits["valid"] if example.label].count(1) == 1


def test_agreement_has_the_most_attractors_only_in_test(data: Path) -> None:
    task = prepare_task("agreement", "bytes", 64, data_dir=data)
    groups = {split: {example.group for example in rows} for split, rows in task.splits.items()}
    assert {"4 attractors", "5 attractors"} <= groups["test"]
    assert not {"4 attractors", "5 attractors"} & (groups["train"] | groups["valid"])
    assert {"any number of attractors", "1 attractor", "3 attractors"} <= groups["train"]
    assert len(task.splits["train"]) > 7 * len(task.splits["valid"])
    assert not any(example.relevant.any() for example in task.splits["train"])


def test_subject_and_verb_are_relevant(data: Path) -> None:
    whole = prepare_task("agreement-sentences", "bytes", 64, data_dir=data)
    assert marked(whole, whole.splits["test"][0]) == ["dogruns"]
    before = prepare_task("agreement-subject", "bytes", 64, data_dir=data)
    assert marked(before, before.splits["test"][0]) == ["dog"]
    assert text_of(before, before.splits["test"][0]).endswith(" dog")
    pairs = prepare_task("agreement-pairs", "bytes", 64, data_dir=data)
    assert {tuple(marked(pairs, example)) for example in pairs.splits["train"]} == {("runs",), ("run",)}
    assert {example.label for example in pairs.splits["train"] if marked(pairs, example) == ["run"]} == {0}


def test_an_answer_follows_the_question_and_its_span_is_relevant(data: Path) -> None:
    short, whole = (prepare_task(name, "bytes", 1200, data_dir=data) for name in ("squad", "squad-whole"))
    for task, longest in ((short, 520), (whole, 900)):
        example = task.splits["test"][0]
        assert marked(task, example) == ["Zoë Miller"]
        assert example.span is not None
        assert task.tokenizer is not None
        assert task.tokenizer.decode(example.tokens[slice(*example.span)].tolist()) == "Zoë Miller"
        prompt = task.tokenizer.decode(example.tokens[: example.prompt].tolist())
        assert prompt.startswith("Q: Who is 0 of Other? C: far ")
        assert prompt.endswith(" A:")
        assert len(prompt) < longest
        assert example.targets is not None
        targets = example.targets[example.targets >= 0].tolist()
        assert targets == [*" Zoë Miller".encode(), task.tokenizer.separator]
        assert example.tokens[example.prompt :].tolist() == targets[:-1]
        assert (example.targets[: example.prompt - 1] < 0).all()
        assert example.answers == (" Zoë Miller", " Miller")
    assert len(whole.splits["test"][0].tokens) > len(short.splits["test"][0].tokens)


def test_a_question_with_a_wrong_answer_offset_is_counted(tmp_path: Path) -> None:
    folder = made(tmp_path)
    wrong = questions(2, "Other") | {"title": "wrong"}
    for paragraph in wrong["paragraphs"]:
        paragraph["qas"][0]["answers"][0]["answer_start"] = 3
    packed(folder / "squad/dev-v1.1.json.xz", json.dumps({"data": [wrong, questions(3, "Third")]}))
    task = prepare_task("squad", "bytes", 1200, data_dir=folder)
    assert task.notes == {"skipped: answer not at its stated offset": 2}
    assert len(task.splits["test"]) == 3


def test_glue_is_tested_on_the_published_dev_set(data: Path) -> None:
    for name in ("glue-cola", "glue-mrpc", "glue-rte", "glue-sst2"):
        task = prepare_task(name, "bytes", 128, data_dir=data)
        assert len(task.splits["test"]) == 10
        assert len(task.splits["train"]) + len(task.splits["valid"]) == 100
        assert 3 <= len(task.splits["valid"]) <= 20
    first = task.splits["test"][0]
    assert (text_of(task, first), first.label) == (phrase(200), 0)


def test_long_examples_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = posts()
    rows[0]["tokens"] = [*rows[0]["tokens"], "x" * 60]
    rows[1]["tokens"][0] = "y" * 60
    task = prepare_task("hatexplain", "bytes", 64, data_dir=hatexplain(tmp_path, rows))
    assert task.notes == {"train: skipped, longer than 64 tokens": 2}
    assert task.longest <= 64


def test_a_class_without_examples_is_an_error(tmp_path: Path) -> None:
    rows = [row for row in posts() if (row["split"], row["labels"][0]) != ("val", "offensive")]
    with pytest.raises(UserError, match="the valid split has no example of class 'offensive'"):
        prepare_task("hatexplain", "bytes", 64, data_dir=hatexplain(tmp_path, rows))
    with pytest.raises(
        UserError, match="the train split has no examples; train: skipped, longer than 4 tokens: 12"
    ):
        prepare_task("hatexplain", "bytes", 4, data_dir=hatexplain(tmp_path, posts()))


@pytest.mark.parametrize(
    ("name", "file", "text", "message"),
    [
        ("hatexplain", "hatexplain/hatexplain.jsonl.xz", "{", "line 1: not JSON"),
        (
            "hatexplain",
            "hatexplain/hatexplain.jsonl.xz",
            '{"labels": ["normal", "normal"]}',
            "row 1: no field 'split'",
        ),
        ("hatexplain", "hatexplain/hatexplain.jsonl.xz", '{"labels": 3}', "row 1"),
        ("agreement", "sva/linzen_numpred.val.tsv.xz", "VBZ\ta b\nVBZ\n", "line 2: 1 columns, expected 2"),
        ("agreement", "sva/linzen_numpred.val.tsv.xz", "NN\ta b\n", "row 1: no field 'NN'"),
        ("agreement-pairs", "sva/marvin_linzen.tsv.xz", "one\ttwo\na\tb\n", "row 1: no field 'grammatical'"),
        ("glue-cola", "glue/CoLA.train.tsv.xz", "gj04\t7\t\ta b\n", "row 1: label '7' is not one of 0, 1"),
        ("squad", "squad/dev-v1.1.json.xz", "[", "damaged file .*dev-v1.1"),
        ("squad", "squad/dev-v1.1.json.xz", "{}", "dev-v1.1.json.xz: no field 'data'"),
    ],
)
def test_errors_name_the_damaged_file_and_row(
    tmp_path: Path, name: str, file: str, text: str, message: str
) -> None:
    packed(made(tmp_path) / file, text)
    with pytest.raises(UserError, match=message) as raised:
        prepare_task(name, data_dir=tmp_path)
    assert file.split("/")[1] in str(raised.value)


def test_errors_name_a_truncated_or_missing_file(tmp_path: Path) -> None:
    path = made(tmp_path) / "hatexplain/hatexplain.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"damaged file .*hatexplain.jsonl.xz"):
        prepare_task("hatexplain", data_dir=tmp_path)
    (tmp_path / "sva/linzen_numpred.test.4.tsv.xz").unlink()
    with pytest.raises(UserError, match=r"task 'agreement' not found; download it with: h2h data get agr"):
        task_files("agreement", tmp_path)
    (tmp_path / "sva/marvin_linzen.tsv.xz").unlink()
    with pytest.raises(UserError, match=r"marvin_linzen.tsv.xz is missing, and h2h data get has no source"):
        task_files("agreement-pairs", tmp_path)
    with pytest.raises(UserError, match="unknown task 'hatexplane'; did you mean 'hatexplain'"):
        prepare_task("hatexplane", data_dir=tmp_path)


def test_what_an_earlier_version_stored_from_the_hub_is_still_read(tmp_path: Path) -> None:
    names = ("hatespeech", "normal", "offensive")
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "val": [], "test": []}
    for row in posts():
        labels = {"label": [names.index(label) for label in row["labels"]]}
        kept = {"post_tokens": row["tokens"], "rationales": row["rationales"], "split": row["split"]}
        rows[row["split"]].append(kept | {"annotators": labels})
    folder = tmp_path / "cache/hub/hatexplain"
    folder.mkdir(parents=True)
    for split, found in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    hub = prepare_task("hatexplain", data_dir=tmp_path, cache=tmp_path / "cache")
    mine = prepare_task("hatexplain", data_dir=made(tmp_path / "local"))
    for split, examples in mine.splits.items():
        expected = sorted((text_of(mine, example), example.label) for example in examples)
        assert sorted((text_of(hub, example), example.label) for example in hub.splits[split]) == expected


def test_the_whole_training_file_of_squad_is_read_if_the_subset_is_missing(tmp_path: Path) -> None:
    folder = made(tmp_path)
    before = prepare_task("squad", "bytes", 1200, data_dir=folder)
    subset = folder / "squad/train-subset-v1.1.json.xz"
    (folder / "squad/train-v1.1.json").write_text("{}")
    assert prepare_task("squad", "bytes", 1200, data_dir=folder).content == before.content
    (folder / "squad/train-v1.1.json").write_bytes(lzma.decompress(subset.read_bytes()))
    subset.unlink()
    after = prepare_task("squad", "bytes", 1200, data_dir=folder)
    assert len(after.splits["train"]) == len(before.splits["train"])


@pytest.mark.slow
def test_the_shared_tasks_have_the_published_sizes(shared_data: Path) -> None:
    counts = {}
    for name in ("hatexplain", "agreement", "agreement-sentences", "squad", "glue-rte"):
        task = prepare_task(name, "bytes", 20_000, data_dir=shared_data)
        counts[name] = [len(task.splits[split]) for split in ("train", "valid", "test")]
        if name == "hatexplain":
            assert task.notes["skipped: rationale masks whose length differs from the text"] == 1
            assert task.notes["skipped: annotators disagree"] == 919
    assert counts["hatexplain"] == [15375, 1921, 1924]
    assert sum(counts["agreement"]) == 80522
    assert sum(counts["squad"]) == 10570 + 14348
    assert counts["squad"][2] == 10570
    assert counts["glue-rte"][2] == 277


def test_every_task_has_a_description() -> None:
    assert all(about for about in task_names().values())
