"""Studies of tasks: verdicts by a task's metric, exact resume, run ids that cover every setting, clear errors."""

from __future__ import annotations

import itertools
import json
import lzma
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import headtohead as h2h
from headtohead import Study
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.common.stop import Stop
from headtohead.data.shards import prepare
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.study.plan.execution import ExecutionSettings
from headtohead.study.plan.plan import Plan
from headtohead.study.plan.planner import plan_study
from headtohead.study.run.training import TrainingPass
from headtohead.study.store.manifest import read_manifest
from headtohead.study.store.result import read_result
from headtohead.study.store.run_store import Store, find_run

TINY = {"tokens": 1500, "batch": 300, "seeds": 2, "lr": 5e-3}
MINE = f"{Path(__file__).parents[3] / 'examples' / 'prefix_mean.py'}:PrefixMean"
RECALL, GRAMMAR = "recall:train=60,pairs=3,queries=2", "grammar:train=60"


def study(*tasks: str, **values: Any) -> Study:
    return Study(**({"arms": ["standard", "sharing:tie=kv"], "tasks": list(tasks)} | TINY | values))


def plan(*tasks: str, data_dir: Path | None = None, **values: Any) -> Plan:
    return plan_study(study(*tasks, **values).spec, data_dir=data_dir)


def results(folder: Path) -> dict[str, str]:
    return {run.id: (run.path / "result.json").read_text() for run in Store(folder).runs()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    study(RECALL, GRAMMAR, evaluations=2).run(folder, workers=1, quiet=True)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences in the format of CoLA, every other one acceptable."""
    folder = tmp_path_factory.mktemp("data")
    words = ("crimson", "ancient", "modern", "gigantic", "doleful", "peculiar", "bashful", "soaking")

    def rows(numbers: range) -> str:
        found = []
        for number in numbers:
            text = " ".join(words[number >> 3 * index & 7] for index in range(3))
            found.append(f"src\t{number % 2}\t\t{text}" + " man" * (number % 4))
        return "\n".join(found) + "\n"

    (folder / "glue").mkdir()
    for key, numbers in (("train", range(80)), ("dev", range(100, 120))):
        (folder / f"glue/CoLA.{key}.tsv.xz").write_bytes(lzma.compress(rows(numbers).encode()))
    return folder


@pytest.fixture(scope="module")
def pretrained(story: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pretrained")
    Study("standard", corpus=f"file:{story}", tokens=512, batch=256, seeds=1).run(
        folder, workers=1, quiet=True
    )
    (run,) = Store(folder).runs()
    return str(run.path)


def test_every_task_is_a_contest_judged_by_its_own_metric(finished: Path) -> None:
    recall, grammar = json.loads((finished / "verdicts.json").read_text())
    assert (recall["corpus"], grammar["corpus"]) == (RECALL, GRAMMAR)
    for row in (recall, grammar):
        assert (row["metric"], row["better"], row["margin"]) == ("accuracy", "higher", 0.01)
        assert row["n"] == 2
    assert recall["primary"]
    manifest, _ = read_manifest(finished / "study.json")
    assert manifest.references[GRAMMAR]["chance"] == 0.5
    for run in Store(finished).runs():
        result = run.result()
        assert result is not None
        test = result.test.values
        if "macro_f1" in test:
            assert -1 <= test["matthews"] <= 1
            assert run.spec().as_dict()["task"] == {"model": "classifier", "classes": 2, "causal": True}
        else:
            assert test["exact_match"] <= test["accuracy"]
        assert result.tokens == run.logged_rows()[-1].tokens <= 1500
    rows = (finished / "runs.csv").read_text().splitlines()
    assert "test_matthews" in rows[0]
    assert "bits_per_byte" not in rows[0]


def test_the_page_names_the_metric_and_shows_which_arm_wins_each_task(finished: Path) -> None:
    if not find_spec("altair"):
        pytest.skip("the page needs altair")
    page = (finished / "report.html").read_text()
    head = page[: page.index('<script type="module">')]
    assert "bits per byte" not in head
    assert "Verdicts by task." in head
    assert "Higher accuracy is better" in head
    assert "majority class" in head


def test_a_run_of_a_task_stopped_anywhere_resumes_exactly(finished: Path, tmp_path: Path) -> None:
    whole = results(finished)
    for planned in plan(RECALL, GRAMMAR, evaluations=2).compared()[::3]:
        reached = []
        # `stop` is called between steps and during evaluation and scoring.
        for patience in itertools.count():
            store = Store(tmp_path / f"{planned.id}, {patience}")
            store.make()
            run = store.run(planned.id)
            run.open(planned)
            stop = partial(next, itertools.chain([False] * patience, itertools.repeat(True)))
            if TrainingPass(store, [planned], ExecutionSettings(), stop=Stop(stop)).run() != ["stopped"]:
                break
            reached.append(int(max(run.checkpoints.iterdir()).name.removeprefix("step-")))
            assert TrainingPass(store, [planned], ExecutionSettings()).run() == ["done"]
            assert (run.path / "result.json").read_text() == whole[run.id]
            rows = [replace(row, seconds=0.0) for row in run.logged_rows()]
            assert rows == [replace(row, seconds=0.0) for row in Store(finished).run(run.id).logged_rows()]
        evaluated = planned.steps // 2
        steps = [*range(1, planned.steps), *2 * [evaluated], *2 * [planned.steps]]  # valid and test each time
        assert reached == sorted(steps)


def test_a_run_id_covers_task_options_and_model(data: Path) -> None:
    ids = [
        plan(RECALL).compared()[0].id,
        plan(RECALL).compared()[0].id,
        plan("recall:train=60,pairs=3,queries=2,seed=1").compared()[0].id,
        plan("copy:train=60,length=4,form=place").compared()[0].id,
        plan("copy:train=60,length=4,form=place", causal=False).compared()[0].id,
        plan("glue-cola", data_dir=data).compared()[0].id,
        plan("glue-cola", data_dir=data, context=64).compared()[0].id,
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == len(ids) - 1
    # The metric of the verdict is not part of the id.
    assert plan(RECALL, metric="exact_match").compared()[0].id == ids[0]
    assert plan(RECALL, metric="exact_match").manifest.measures[RECALL].name == "exact_match"
    assert plan("glue-cola", data_dir=data).manifest.measures["glue-cola"].name == "matthews"


@pytest.mark.page
def test_examples_that_are_left_out_are_counted_and_reported(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = study("glue-cola", context=28, seeds=1, arms=["standard"], tokens=300)
    short.run(tmp_path, data_dir=data, workers=1)
    (note,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "train: skipped, longer than 28 tokens" in line
    ]
    assert "task glue-cola" in note
    manifest, _ = read_manifest(tmp_path / "study.json")
    assert any("skipped, longer than 28 tokens" in text for text in manifest.notes)
    if find_spec("altair"):
        assert "skipped, longer than 28 tokens" in (tmp_path / "report.html").read_text()


def test_a_run_with_evaluations_has_a_best_step(finished: Path) -> None:
    for run in Store(finished).runs():
        result = run.result()
        assert result is not None
        metric = result.valid.metric
        rows = [row for row in run.logged_rows() if row.valid is not None]
        assert rows
        rows.append(LoggedRow(result.step, valid=result.valid.values, test=result.test.values))
        best = max(rows, key=lambda row: row.valid[metric])
        assert result.best.step == best.step
        assert result.best.test[metric] == best.test[metric]


def test_shape_and_length_rules_apply_to_tasks() -> None:
    matched = plan(RECALL, shape="params", length="flops")
    standard, tied = (run for run in matched.compared() if run.seed == 1)
    assert tied.size.ffn > standard.size.ffn
    assert tied.parameters == pytest.approx(standard.parameters, rel=0.005)
    spent = [run.flops_per_token * matched.tokens(run) for run in (standard, tied)]
    assert spent[1] == pytest.approx(spent[0], rel=0.25)  # a step is a fifth of such a short run
    assert plan(GRAMMAR, shape="params").compared()[0].parameters != matched.compared()[0].parameters


def test_bidirectional_attention_counts_the_full_map() -> None:
    task = "sort:train=60,length=8,form=place"
    arms = ["standard", "sharing:tie=qk,pos2d=true"]
    one, both = plan(task, arms=arms), plan(task, arms=arms, causal=False)
    assert both.compared()[0].flops_per_token > one.compared()[0].flops_per_token


def test_tuning_selects_the_rate_with_the_highest_score(tmp_path: Path) -> None:
    rates = {"tokens": 1500, "batch": 300, "seeds": 1, "tune": {"lr": [1e-5, 3e-3, 30.0]}}
    result = Study("standard", tasks=GRAMMAR, **rates).run(tmp_path, workers=1, quiet=True)
    rows = result.manifest.tuning
    best = max(row.score for row in rows if row.score is not None)
    assert [row.score for row in rows if row.chosen] == [best]


def test_a_task_starts_from_a_trained_run(data: Path, pretrained: str, tmp_path: Path) -> None:
    source = find_run(pretrained)
    given = {"arms": ["standard"], "seeds": 1, "from": pretrained, "tokens": 300}
    run = plan("glue-cola", data_dir=data, **given).compared()[0]
    assert run.as_dict()["start"] == source.id
    assert run.id != plan("glue-cola", data_dir=data, **(given | {"from": ""})).compared()[0].id
    assert Study(tasks="glue-cola", from_=pretrained, arms=["standard"]).spec.start == pretrained
    Study(tasks="glue-cola", **(TINY | given | {"lr": 1e-30, "weight_decay": 0.0})).run(
        tmp_path, data_dir=data, workers=1, quiet=True
    )
    from headtohead.training.checkpoint import read_tensors

    (done,) = Store(tmp_path).runs()
    before, after = read_tensors(source.weights), read_tensors(done.weights)
    assert all(before[name].equal(after[name]) for name in before)
    assert {name for name in after if name not in before} == {"head.weight", "head.bias"}


def test_a_start_that_does_not_fit_is_a_one_line_error(data: Path, pretrained: str, finished: Path) -> None:
    def rejected(message: str, *tasks: str, **values: Any) -> None:
        with pytest.raises(UserError, match=message) as caught:
            plan(*tasks, data_dir=data, **({"from": pretrained, "arms": ["standard"]} | values))
        assert "\n" not in str(caught.value)

    rejected("its width is 64, the study's is 128", "glue-cola", size="1m")
    rejected("tokens of its own", RECALL)
    rejected("another tokenizer", "glue-cola", tokenizer="bpe:300")
    rejected("model.norm is rms, the study's is layer", "glue-cola", model={"norm": "layer"})
    rejected("arm 'sharing:tie=kv'.*blocks.0.mechanism", "glue-cola", arms=["standard", "sharing:tie=kv"])
    rejected("no run", "glue-cola", **{"from": "races/nowhere/0123"})
    (trained, *_) = Store(finished).runs()
    with pytest.raises(UserError, match="was trained on the task"):
        h2h.evaluate(trained.path, "stdlib", quiet=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ["recal"]}, "unknown task 'recal'; did you mean 'recall'"),
        ({"tasks": ["recall:pears=3"]}, "unknown option of recall 'pears'; did you mean 'pairs'"),
        ({"tasks": ["recall"], "corpus": "stdlib"}, "corpus applies to corpora only"),
        ({"tasks": ["recall"], "branches": ["1k", "2k"]}, "branches applies to corpora only"),
        (
            {"tasks": ["recall"], "probes": ["maps"]},
            "probe 'maps' applies to studies of corpora.*takes explain$",
        ),
        ({"probes": ["explain"]}, "probe 'explain' applies to studies of tasks.*takes positions, "),
        ({"tasks": ["recall"], "probes": ["explain:many"]}, "the number of examples, 1 to"),
        ({"causal": False}, "causal applies to tasks only"),
        ({"tasks": ["recall"], "causal": "no"}, "causal takes true or false"),
        ({"tasks": ["recall"], "answer": "guess"}, "unknown value for answer 'guess'"),
        ({"tasks": []}, "tasks takes a string or a list of strings"),
    ],
)
def test_invalid_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Study(arms=["standard"], **values)


@pytest.mark.parametrize(
    ("tasks", "values", "message"),
    [
        (["copy:train=60"], {"causal": False}, "would see it; form=place"),
        (["recall:train=60"], {"answer": "point"}, "does not have an answer to point at"),
        (["recall:train=60"], {"metric": "f1"}, "unknown metric of task"),
        (["recall:train=60"], {"context": 16}, "has examples of 20 tokens; the context is 16"),
        (["glue-cola"], {}, "not found"),
        ([GRAMMAR], {"arms": ["standard", MINE]}, "PrefixMean': .*padded"),
        ([RECALL], {"arms": ["standard", MINE], "causal": False}, "PrefixMean': .*bidirectional"),
        ([RECALL], {"tokens": 100}, "do not fill one step"),
    ],
)
def test_tasks_that_cannot_be_trained_are_rejected(
    tasks: list[str], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan(*tasks, **values)
    assert "\n" not in str(caught.value)


def test_a_damaged_score_is_detected(finished: Path) -> None:
    (run, *_) = Store(finished).runs()
    record = json.loads((run.path / "result.json").read_text())
    assert read_result(record) == run.result()
    for change in (
        {"accuracy": "high"},
        {"blocks": {"accuracy": [[1, 0]]}},
        {"blocks": [[1]]},
        {"tokens": 0},
    ):
        with pytest.raises(ValueError, match="the test split"):
            read_result({**record, "test": record["test"] | change})


def test_evaluate_and_forecast_work_for_tasks(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Store(finished).runs()[0]
    with pytest.raises(SystemExit, match="0"):
        main(["evaluate", str(run.path), "--json"])
    found = json.loads(capsys.readouterr().out)
    known = run.result()
    assert known is not None
    assert found["accuracy"] == known.test.values["accuracy"]
    assert found["without_a_model"].keys() == {"chance", "majority class"}
    assert (
        h2h.evaluate_task(run.path, split="valid", quiet=True)["accuracy"] == known.valid.values["accuracy"]
    )
    with pytest.raises(UserError, match="unknown split"):
        h2h.evaluate_task(run.path, split="tset", quiet=True)
    found = h2h.forecast(study(RECALL), quiet=True)
    assert found.metric == "accuracy"
    planned = plan(RECALL)
    assert found.tokens == sum(map(planned.tokens, planned.compared()))


def test_requested_compilation_that_does_not_apply_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study(RECALL).run(tmp_path, workers=1, seconds=0.0, compile=True)
    assert "steps are not compiled" in capsys.readouterr().out
    study(RECALL).run(tmp_path, workers=1, seconds=0.0)
    assert "compiled" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few questions in the format of SQuAD, each answered by the word after `the`."""
    folder = tmp_path_factory.mktemp("questions")

    def article(title: str, words: str) -> dict[str, Any]:
        paragraphs = []
        for word in words.split():
            asked = {
                "id": title + word,
                "question": f"who in {title}?",
                "answers": [{"text": word, "answer_start": 4}],
            }
            paragraphs.append({"context": f"the {word} did it", "qas": [asked]})
        return {"title": title, "paragraphs": paragraphs}

    for name, titles in (("train-subset", "abcdefghijklmnop"), ("dev", "xy")):
        data = [article(title, f"cat{title} dog{title} hen{title}") for title in titles]
        path = folder / f"squad/{name}-v1.1.json.xz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lzma.compress(json.dumps({"data": data}).encode()))
    return folder


def test_a_study_of_squad_runs_once_and_is_explained(questions: Path, tmp_path: Path) -> None:
    def done() -> h2h.StudyResult:
        chosen = study("squad", seeds=1, probes=["explain:2"], tokens=600)
        return chosen.run(tmp_path, data_dir=questions, workers=1, quiet=True)

    first = done()
    assert first.summary.done == 2
    for run in Store(tmp_path).runs():
        assert run.spec().task.answers == "likeliest"
        again = h2h.evaluate_task(run.path, data_dir=questions, quiet=True)
        assert again["f1"] == first.results[run.id].test.values["f1"]
    again = done()
    assert again.summary.done == 0
    assert again.results == first.results
    assert not list(tmp_path.rglob("*.damaged*"))


def test_a_run_uses_its_stored_tokenizer_if_the_original_file_is_gone(
    data: Path, story: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(prepare(f"file:{story}", "bpe:300").tokenizer.content)  # type: ignore[attr-defined]
    given = {"arms": ["standard"], "seeds": 1, "tokenizer": f"file:{file}", "tokens": 300}
    study("glue-cola", **given).run(tmp_path / "o", data_dir=data, workers=1, quiet=True)
    file.unlink()
    (run,) = Store(tmp_path / "o").runs()
    assert h2h.evaluate_task(run.path, data_dir=data, quiet=True)["metric"] == "matthews"


def test_a_pointer_head_is_not_reused_for_two_classes(data: Path, questions: Path, tmp_path: Path) -> None:
    point = {"arms": ["standard"], "seeds": 1, "answer": "point", "tokens": 300}
    study("squad", **point).run(tmp_path / "p", data_dir=questions, workers=1, quiet=True)
    (pointer,) = Store(tmp_path / "p").runs()
    still = {"arms": ["standard"], "seeds": 1, "tokens": 300, "lr": 1e-30, "weight_decay": 0.0}
    study("glue-cola", **(still | {"from": str(pointer.path)})).run(
        tmp_path / "c", data_dir=data, workers=1, quiet=True
    )
    from headtohead.training.checkpoint import read_tensors

    (done,) = Store(tmp_path / "c").runs()
    before, after = read_tensors(pointer.weights), read_tensors(done.weights)
    assert before["head.weight"].shape == after["head.weight"].shape
    assert {name for name in after if not before[name].equal(after[name])} == {"head.weight", "head.bias"}
