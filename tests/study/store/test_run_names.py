"""Runs are found by the names that `h2h runs` shows; an ambiguous name lists the choices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.study.store.manifest import Contest, Entry, Manifest
from headtohead.study.store.programs import _digests
from headtohead.study.store.run_names import names_of_study
from headtohead.study.store.run_store import Store, find_run, run_names

IDS = [f"{index:016x}" for index in range(1, 20)]
ARMS = (("standard", "standard"), ("sharing:tie=kv", "(Q, K=V)"), ("./mine.py:Mine", "a / b"))


def manifest(*contests: Contest, arms: tuple[tuple[str, str], ...] = ARMS) -> Manifest:
    ids = iter(IDS)
    entries = tuple(
        Entry(next(ids), label, seed, contest) for contest in contests for _, label in arms for seed in (1, 2)
    )
    return Manifest("s", arms, arms[0][1], None, 0.005, (1, 2), entries)


def contest(corpus: str = "stdlib", size: str = "nano") -> Contest:
    return Contest(corpus, f"{corpus}@3", size, "as_is", "tokens", numerics="9")


def test_a_name_is_arm_and_seed_where_one_contest_has_it() -> None:
    names = names_of_study(manifest(contest()))
    assert names.names[IDS[0]] == "standard/1"
    assert names.names[IDS[3]] == "sharing:tie=kv/2", "the text is easier to type than (Q, K=V)"
    assert names.find("standard/2", "s") == IDS[1]
    assert names.find("(Q, K=V)/2", "s") == names.find("sharing:tie=kv/2", "s") == IDS[3]
    assert names.find("a / b/1", "s") == names.find("./mine.py:Mine/1", "s") == IDS[4]
    assert all(names.find(name, "s") == run for run, name in names.names.items())


def test_a_label_comes_before_the_text_of_other_arms() -> None:
    arms = (("standard", "standard"), ("standard", "standard, QK faster"), ("coupled", "a"), ("coupled", "b"))
    names = names_of_study(manifest(contest(), arms=arms))
    assert names.find("standard/1", "s") == IDS[0]
    assert names.find("standard, QK faster/1", "s") == IDS[2]
    with pytest.raises(UserError, match="is the name of 2 runs; give one of s/a/1, s/b/1"):
        names.find("coupled/1", "s")


def test_the_contest_tells_runs_apart() -> None:
    names = names_of_study(
        manifest(contest(), contest(size="1m"), contest("coherence:0/64(stdlib)"), arms=ARMS[:2])
    )
    with pytest.raises(UserError) as error:
        names.find("standard/1", "races/s")
    assert str(error.value) == (
        "'races/s/standard/1' is the name of 3 runs; give one of races/s/standard/stdlib@3/nano/1, "
        "races/s/standard/stdlib@3/1m/1, races/s/standard/coherence:0/64(stdlib)@3/nano/1"
    )
    assert names.find("standard/1m/1", "s") == IDS[4]
    assert names.find("standard/stdlib/nano/1", "s") == names.find("standard/nano/stdlib@3/1", "s") == IDS[0]
    assert names.find("standard/coherence:0/64(stdlib)/1", "s") == IDS[8]
    assert all(names.find(name, "s") == run for run, name in names.names.items())


@pytest.mark.parametrize("name", ["standard/3", "standart/1", "standard", "standard/5m/1", "1", "/1"])
def test_an_unknown_name_is_an_error_that_lists_the_runs(name: str) -> None:
    with pytest.raises(UserError, match=r"no run '.*' in s.*\(runs: standard/1, standard/2, "):
        names_of_study(manifest(contest())).find(name, "s")


@pytest.fixture(scope="module")
def raced(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    mine = folder / "mine.py"
    mine.write_text(Path("examples/prefix_mean.py").read_text())
    arms = ["standard", f"{mine}:PrefixMean"]
    settings = {"corpus": f"file:{story}", "tokens": 512, "batch": 256, "seeds": 1}
    h2h.Study(arms, **settings).run(folder / "out", workers=1, quiet=True)
    return folder / "out"


def run(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code


def test_commands_and_the_api_take_names(
    raced: Path, story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{raced}/standard/1"
    assert find_run(name).id == next(run.id for run in Store(raced).runs() if run.spec().label == "standard")
    assert h2h.load_model(name).parameter_count() > 0
    run("generate", name, "--prompt", "the", "--tokens", "2")
    run("evaluate", name, "--corpus", f"file:{story}", "--json")
    run("look", name, "--text", "the cat", "--out", str(tmp_path / "look.html"))
    run("explain", name, "--task", "nothing", code=2)
    assert "unknown task 'nothing'" in capsys.readouterr().err
    run("runs", name, "--export", str(tmp_path / "one.tar.gz"))
    assert "1 finished run written" in capsys.readouterr().out
    run("generate", f"{raced}/standard/2", "--prompt", "the", code=2)
    assert "no run 'standard/2' in" in capsys.readouterr().err


def test_imported_runs_have_names_without_a_study(
    raced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("runs", str(raced), "--export", str(tmp_path / "x.tar.gz"))
    run("runs", str(tmp_path / "new"), "--import", str(tmp_path / "x.tar.gz"))
    assert not (tmp_path / "new/study.json").exists()
    assert "standard/1" in capsys.readouterr().out
    assert find_run(tmp_path / "new/PrefixMean/1").id in run_names(Store(raced)).names


def test_a_run_that_has_not_started_is_named(raced: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    store.make()
    record = json.loads((raced / "study.json").read_text())
    record.pop("checksum")
    (store.path / "study.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="has not started"):
        find_run(f"{store.path}/standard/1")


def test_runs_of_an_older_file_are_marked(raced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = raced.parent / "mine.py"
    source = mine.read_text()
    for text, mark in (
        (source, ""),
        (source + "# more\n", ""),
        (source + "MORE = 1\n", "done, older source"),
        (None, "done, source is gone"),
    ):
        if text is None:
            mine.unlink()
        else:
            mine.write_text(text)
        _digests.cache_clear()
        run("runs", str(raced))
        lines = capsys.readouterr().out.splitlines()
        marked = [line for line in lines if "source" in line]
        assert len(marked) == bool(mark)
        assert all("PrefixMean/1" in line and mark in line for line in marked)
    mine.write_text(source)
    _digests.cache_clear()
