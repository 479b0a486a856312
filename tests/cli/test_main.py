from __future__ import annotations

import io
import json
import lzma
import math
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from safetensors.torch import save

import headtohead as h2h
from headtohead.cli.main import COMMANDS, main
from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.mechanisms.families.scores import SCORES as BUILTIN_SCORES
from headtohead.model.layout import parse_layout
from headtohead.study.store.run_store import Store
from headtohead.training.checkpoint import read_tensors


def run(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code


SMALL = ("--tokens", "2560", "--batch", "256", "--seeds", "2", "--workers", "1")


@pytest.fixture(scope="module")
def raced(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "out"
    run(
        "race",
        "--arms",
        "standard",
        "sharing:tie=kv",
        "--corpus",
        f"file:{story}",
        *SMALL,
        "--out",
        str(folder),
    )
    return folder


def test_a_race_prints_its_verdicts_and_where_the_rest_is(
    raced: Path, capsys: pytest.CaptureFixture[str], story: Path
) -> None:
    run(
        "race",
        "--arms",
        "standard",
        "sharing:tie=kv",
        "--corpus",
        f"file:{story}",
        *SMALL,
        "--out",
        str(raced),
    )
    out = capsys.readouterr().out
    assert "0 of 4 runs to do" in out
    assert "story.txt: 1 document, cut in order: 90% train, 5% valid, 5% test" in out
    assert "(Q, K=V)" in out
    assert "baseline" in out
    assert "verdicts.json" in out
    assert "report.html" in out


def test_a_study_file_and_flags_that_override_it(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        f'arms = ["standard", "diagonal"]\ncorpus = "file:{story}"\ntokens = "1024"\nbatch = 256\nseeds = 1\n[model]\ndropout = 0.1\n'
    )
    run(
        "race",
        str(file),
        "--workers",
        "1",
        "--seeds",
        "2",
        "--set",
        "warmup=0.5",
        "--set",
        "model.init_std=0.05",
        "--lr.qk",
        "30x",
        "--lr.ffn=1x..4x",
        "--out",
        str(tmp_path / "out"),
        "--quiet",
    )
    specs = [run_.spec() for run_ in Store(tmp_path / "out").runs()]
    assert len(specs) == 4
    assert {spec.training.warmup for spec in specs} == {0.5}
    assert {spec.size.settings.init_std for spec in specs} == {0.05}
    assert {spec.size.settings.dropout for spec in specs} == {0.1}
    for spec in specs:
        qk, ffn = spec.training.as_dict()["circuit_lr"]
        assert (qk["tag"], qk["factor"]) == ("qk", 30)
        assert (ffn["tag"], ffn["start"], ffn["end"]) == ("ffn", 1, 4)
    assert "learning rate x decay is equal" in (tmp_path / "out/report.html").read_text()
    capsys.readouterr()


def test_runs_report_generate_and_evaluate(
    raced: Path, story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("runs", str(raced))
    out = capsys.readouterr().out
    assert out.count("done") == 4
    run_id = Store(raced).runs()[0].id
    run("report", str(raced), "--charts")
    assert f"files in {raced / 'charts'}" in capsys.readouterr().out
    assert (raced / "charts" / "forest.svg").is_file()
    run("generate", f"{raced}/{run_id[:10]}", "--prompt", "the cat", "--tokens", "12", "--temperature", "0")
    found = capsys.readouterr()
    assert "the cat" in found.out
    assert "tokens/s" in found.err
    run("evaluate", f"{raced}/{run_id}", "--corpus", f"file:{story}", "--split", "valid", "--json")
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 0
    run("runs", str(raced), "--export", str(tmp_path / "x.tar.gz"))
    run("runs", str(tmp_path / "new"), "--import", str(tmp_path / "x.tar.gz"))
    assert "4 runs added" in capsys.readouterr().out
    assert h2h.import_runs(h2h.Store(tmp_path / "again"), tmp_path / "x.tar.gz") == (4, 0)


def test_a_run_is_scored_on_tasks(raced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"query": "the cat", "choices": ["sat on a mat", "flew"], "gold": 0}
    sums = {"context": "2 + 2 =", "continuation": " 4"}
    (tmp_path / "zeroshot").mkdir()
    for name, line, count in (("copa", row, 3), ("simple_arithmetic_withspaces", sums, 2)):
        text = (json.dumps(line) + "\n") * count
        (tmp_path / f"zeroshot/{name}.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    place = str(Store(raced).runs()[0].path)
    words = ("evaluate", place, "--data-dir", str(tmp_path), "--device", "cpu")
    run(*words, "--task", "copa", "arithmetic", "--limit", "2", "--json")
    record = json.loads(capsys.readouterr().out)
    copa, arithmetic = record["tasks"]
    assert (copa["task"], copa["n"], copa["chance"]) == ("copa", 2, 0.5)
    assert {"accuracy", "standard_error", "accuracy_by_bytes", "cut"} <= copa.keys()
    assert arithmetic["accuracy_by_bytes"] is None
    score = h2h.score_task(place, "copa", data_dir=tmp_path, device="cpu", limit=2, quiet=True)
    assert score.as_dict() == copa
    with pytest.raises(UserError, match="'all' means"):
        h2h.score_task(place, "all", quiet=True)
    run(*words, "--task", "copa")
    out = capsys.readouterr().out
    for word in ("copa", "accuracy", "standard error", "chance", "0.5000", " 3 "):
        assert word in out


def test_list_shows_everything_a_study_can_name(capsys: pytest.CaptureFixture[str]) -> None:
    run("list")
    out = capsys.readouterr().out
    for word in ("standard", "sharing", "diagonal", "nano 117k", "enwik8", "even(x)", "indicators"):
        assert word in out
    assert "kv_heads" not in out
    run("list", "--json")
    everything = json.loads(capsys.readouterr().out)
    assert everything == json.loads(json.dumps(h2h.catalog()))
    assert {row["name"] for row in everything["mechanisms"]} >= {"standard", "sharing", "diagonal"}
    options = next(row["options"] for row in everything["mechanisms"] if row["name"] == "sharing")
    assert {"name", "default", "choices", "help"} <= set(options[0])
    assert next(row for row in everything["sizes"] if row["name"] == "nano")["parameters"] == 117_056
    assert {"name": "stdlib"}.items() <= everything["corpora"][0].items()
    assert {row["name"] for row in everything["probes"]} >= {"positions", "indicators", "tasks"}
    run("list", "--probes")
    out = capsys.readouterr().out
    assert "indicators" in out
    assert "diagonal" not in out


def test_the_list_is_one_screen_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headtohead.cli.list.width", lambda: 80)
    run("list")
    lines = capsys.readouterr().out.splitlines()
    assert 24 <= len(lines) <= 45
    assert max(map(len, lines)) <= 80
    for name in builtin_mechanisms():
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1


def test_the_list_shows_one_mechanism_or_one_section(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run("list", "standard")
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("Softmax attention", "kv_heads", "qk_norm", "docs/mechanisms/standard.md")
    )
    assert "diagonal" not in out
    run("list", "sizes")
    out = capsys.readouterr().out
    assert "117,056" in out
    assert "enwik8" not in out
    run("list", "layouts")
    assert re.search(r"even\(x\) +1, 3, 5, 7", capsys.readouterr().out)
    run("list", "tasks")
    assert {"recall", "copa"} <= set(capsys.readouterr().out.split())
    run("list", "quick")
    assert 'name = "The quick race"' in capsys.readouterr().out.splitlines()
    run("list", "corpora", "--json")
    assert list(json.loads(capsys.readouterr().out)) == ["corpora"]
    run("list", "standard", "--json")
    assert json.loads(capsys.readouterr().out)["name"] == "standard"
    run("list", "examples/prefix_mean.py:PrefixMean")
    assert "The mean of all values so far" in capsys.readouterr().out
    run("list", "standart", code=2)
    assert "did you mean 'standard'?" in capsys.readouterr().err
    run("list", "sharing:tie=kv", code=2)
    assert "h2h list sharing shows all it takes" in capsys.readouterr().err


SCORES = """\
import headtohead as h2h


@h2h.score
def decay(s, head, i, j, rate: float = h2h.option(1.0, "scale", low=0)):
    '''A linear penalty.'''
    return s - rate * (i - j)


@h2h.score
def half(s, head, i, j):
    return s / 2
"""


def test_the_list_shows_what_a_file_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SCORES)
    run("list", str(file))
    out = capsys.readouterr().out
    assert re.search(rf"{re.escape(str(file))}:decay +A linear penalty\.", out)
    assert f"{file}:half" in out
    run("list", str(file), "--json")
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["decay", "half"]
    run("list", f"{file}:decay")
    out = capsys.readouterr().out
    assert f"{file}:decay: A linear penalty." in out
    file.write_text(SCORES.partition("@h2h.score\ndef half")[0])
    run("list", str(file))
    assert capsys.readouterr().out == out
    file.write_text("x = 1\n")
    run("list", str(file), code=2)
    assert "has no class derived from headtohead.Mechanism and no score function" in capsys.readouterr().err


def test_the_list_shows_one_score_function_with_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    run("list", "flex:alibi")
    out = capsys.readouterr().out
    assert "flex:alibi: A penalty linear in the distance" in out
    assert out.endswith("as an arm: flex:alibi\n")
    run("list", "flex:softcap")
    out = capsys.readouterr().out
    assert "bound of the scores" in out
    assert "dilation" not in out
    run("list", "alibi", code=2)
    assert "did you mean 'flex:alibi'?" in capsys.readouterr().err
    run("list", "flex:softcap=3", code=2)
    assert "h2h list flex shows all it takes" in capsys.readouterr().err


def test_the_arm_in_the_list_can_be_pasted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SCORES)
    written = {}
    for name in (
        *builtin_mechanisms(),
        *(f"flex:{one}" for one in BUILTIN_SCORES),
        f"{file}:decay",
        f"{file}:half",
    ):
        run("list", name)
        if "as an arm: " in (out := capsys.readouterr().out):
            written[name] = out.partition("as an arm: ")[2].partition("\n")[0]
            parse_layout(written[name])
    assert written["flex:softcap"] == "flex:softcap,cap=30"
    assert written[f"{file}:decay"] == f"{file}:decay,rate=1"
    assert written[f"{file}:half"] == f"{file}:half"


def test_probes_of_a_race_are_named_by_a_flag(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "race",
        "--arms",
        "standard",
        "--corpus",
        f"file:{story}",
        "--tokens",
        "1k",
        "--batch",
        "256",
        "--seeds",
        "1",
    ]
    run(*words, "--out", str(tmp_path), "--probes", "positions", "skip:256", "--quiet")
    assert len(list(tmp_path.glob("runs/*/probes/*.json"))) == 2
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--probes", "tasks:copy"])
    assert stopped.value.code == 2
    assert "did you mean 'copa'" in capsys.readouterr().err


def test_cost_is_shown_and_given_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run("cost", "standard", "sharing:tie=kv", "--size", "350m", "--context", "8k")
    assert "359,794,688" in capsys.readouterr().out
    run("cost", "standard", "sharing:tie=kv", "--size", "350m", "--context", "8192", "--json")
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["parameters"] == 359_794_688
    assert rows[0]["cache_bytes_per_token"] == 2 * rows[1]["cache_bytes_per_token"]
    assert rows[0]["context"] == 8192


def test_check_says_the_level_and_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("check", "diagonal")
    assert "diagonal: accounted (2 settings" in capsys.readouterr().out
    run("check", "examples/prefix_mean.py:PrefixMean")
    out = capsys.readouterr().out
    assert "raceable (1 setting" in out
    assert "declares no cache" in out
    assert "fix these to be decodable" in out
    leaky = tmp_path / "leaky.py"
    leaky.write_text(
        Path("examples/prefix_mean.py").read_text().replace("cumsum(1)", "mean(1, keepdim=True)")
    )
    run("check", f"{leaky}:PrefixMean", code=1)
    out = capsys.readouterr().out
    assert "not raceable" in out
    assert "it sees the future" in out


def test_data_list_and_prepare(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "list")
    out = capsys.readouterr().out
    assert "stdlib" in out
    assert "missing: h2h data get enwik8" in out
    for word in ("hatexplain", "agreement-pairs", "recall", "zero-shot tasks"):
        assert word in out
    run("data", "prepare", "grammar:train=100,phrases=2")
    out = capsys.readouterr().out
    for word in ("an agreement grammar", "100.0%", "singular", "plural", " 100 "):
        assert word in out
    run("data", "prepare", f"file:{story}", "--tokenizer", "bpe:300")
    out = capsys.readouterr().out
    assert "vocabulary 300" in out
    assert "unigram" in out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["data"], ["--version"]):
        run(*words)
    out = capsys.readouterr().out
    assert all(f"h2h {name}" in out for name in COMMANDS)
    for name in COMMANDS:
        run(*name.split(), "--help")
        assert "usage: h2h" in capsys.readouterr().out


MISTAKES = [
    (["rase"], "unknown command 'rase'; did you mean 'race'"),
    (["data", "prepare", "hatexplane"], "unknown corpus or task 'hatexplane'; did you mean 'hatexplain'"),
    (["data", "prepare", "recall:pears=1"], "unknown option of recall 'pears'; did you mean 'pairs'"),
    (["data", "prepair"], "did you mean 'data prepare'"),
    (["race"], "h2h race quick"),
    (["race", "--arms", "standrd"], "did you mean 'standard'"),
    (["race", "--arms", "sharing:tie=kw"], "unknown value for tie 'kw'"),
    (["race", "--arms", "even(standard"], "is missing"),
    (["race", "--arms", "evn(standard)"], "unknown layout 'evn'; did you mean 'even'"),
    (["race", "--arms", "standard:windw=4"], "did you mean 'window'"),
    (["race", "--arms", "standard:window=-4"], "window"),
    (["race", "--arms", "standard:window=wide"], "window"),
    (["race", "--arms", "standard", "standard:kv_heads=3"], "4 heads cannot share kv_heads=3 evenly"),
    (["race", "--arms", "standard*7"], "has 7 layers; this size has 2"),
    (["race", "--arms", "standard", "--size", "nanno"], "did you mean 'nano'"),
    (["race", "--arms", "standard", "--corpus", "stdlb"], "did you mean 'stdlib'"),
    (["race", "--arms", "standard", "--tokens", "-5"], "expected a count"),
    (["race", "--arms", "standard", "--tokens", "1M", "--batch", "100"], "not a multiple"),
    (["race", "--arms", "standard", "--seeds", "0"], "seeds=0"),
    (["race", "--arms", "standard", "--set", "warmup"], "KEY=VALUE"),
    (["race", "--arms", "standard", "--set", "modl.x=1"], "unknown table"),
    (["race", "--arms", "standard", "--set", "tune.lr=1e-3,2e-3"], "takes three rates"),
    (["race", "--arms", "standard", "--set", "wormup=1"], "did you mean 'warmup'"),
    (
        ["race", "--arms", "standard", "--lr.qq", "30x"],
        "unknown circuit in circuit_lr 'qq'; did you mean 'qk'",
    ),
    (["race", "--arms", "standard", "--lr.qk"], "--lr.qk takes a ratio such as 30x"),
    (["race", "--arms", "standard", "--lr.qk", "fast"], "takes a ratio such as 30x"),
    (
        ["race", "--arms", "standard", "--lr.both", "2x"],
        "arm 'standard': the rule 'both x2' matches no parameter",
    ),
    (["race", "--arms", "standard", "--for", "soon"], "expected a duration"),
    (["race", "--arms", "standard", "--device", "tpu"], "unknown device 'tpu'"),
    (["race", "--arms", "standard", "--device", "cuda:7"], "cuda"),
    (["race", "nowhere.toml"], "no such study file"),
    (
        ["race", "--arms", "standard", "--tokens", "20k", "--seeds", "2", "--tokens", "4k"],
        "--tokens is given twice",
    ),
    (["race", "--arms", "./nowhere.py:Mine"], "no such file"),
    (["check"], "needs a name"),
    (["check", "standart"], "did you mean 'standard'"),
    (["cost", "standard", "--size", "1t"], "unknown size '1t'"),
    (["cost", "standard", "--batch", "0"], "batch=0 must be at least 1"),
    (["cost", "standard", "--context", "2B"], "context=2000000000 is not between 0"),
    (["generate", "nowhere", "--prompt", "x"], "no run at 'nowhere'"),
    (["evaluate", "nowhere", "--corpus", "stdlib"], "no run at"),
    (["evaluate", "nowhere"], "give either --corpus or --task"),
    (["evaluate", "nowhere", "--corpus", "stdlib", "--task", "copa"], "give either --corpus or --task"),
    (["evaluate", "nowhere", "--task", "copper"], "did you mean 'copa'"),
    (["evaluate", "nowhere", "--task", "copa"], "task 'copa' not found"),
    (["evaluate", "nowhere", "--task", "copa", "--split", "valid"], "--split valid applies to a corpus"),
    (["evaluate", "nowhere", "--task", "copa", "--limit", "0"], "--limit 0 is too small"),
    (["evaluate", "nowhere", "--corpus", "stdlib", "--limit", "5"], "a corpus is always scored whole"),
    (["report", "nowhere"], "no study in nowhere"),
    (["site", "nowhere"], "no study in nowhere"),
    (["site"], "a site needs a study"),
    (["watch", "nowhere", "--port", "70000"], "port 70000 is out of range"),
    (["runs", "nowhere"], "no study in nowhere"),
    (["race", "--arms", "standard", "--threads", "100000"], "threads=100000 is not between 1 and"),
    (["forecast", "--arms", "standard", "--threads", "100000"], "threads=100000 is not between 1 and"),
    (["race", "--arms", "standard", "--seeds", "1,9223372036854775808"], "expected a whole number"),
    (["race", "--arms", "standard", "--seeds", f"1,{2**60}"], "seed 1152921504606846976 is too large"),
    (["race", "--arms", "standard", "--seeds", "1,-1"], "expected a count"),
    (["race", "--arms", "standard", "--lr", "0"], "lr=0 trains nothing"),
    (["race", "--arms", "standard", "--batch", "0"], "batch=0 is too small"),
    (["race", "--arms", "standard", "--tokens", "9" * 5000], "--tokens: expected a whole number"),
    (["race", "--arms", "standard", "--set", f"tokens={'9' * 5000}"], "tokens: expected a whole number"),
    (["race", "--arms", "(" * 2000 + "standard" + ")" * 2000], "parentheses nest too deep"),
    (["race", "--arms", "standard", "--corpus", "file:\udcff"], "an argument is not valid UTF-8"),
    (["report", "caf\udce9"], "an argument is not valid UTF-8: 'caf\\udce9'"),
    (["generate", "nowhere", "--prompt", "\udcff"], "an argument is not valid UTF-8"),
    (["generate", "nowhere", "--prompt", "x", "--tokens", "99999999999"], "at most 1,000,000"),
    (["race", "--arms", "standard", "--probes", f"skip:{'9' * 5000}"], "probe skip takes the number of"),
    (["race", "--arms", "standard", "--corpus", f"coherence:1/{'9' * 5000}(stdlib)"], "is not of the form"),
    (["race", "--arms", "standard", "--device", "cpu:\u00b2"], "device cpu:\u00b2"),
    (["data", "prepare", "file:nowhere"], "no such file or directory"),
    (["data", "prepare", "stdlib", "--tokenizer", "bpe"], "unknown tokenizer 'bpe'"),
    # Unknown options.
    (["race", "--tokns", "5"], "unknown option --tokns; did you mean --tokens? (h2h race --help)"),
    (["race", "--tokns=5"], "unknown option --tokns; did you mean --tokens? (h2h race --help)"),
    (["race", "--no-complie"], "unknown option --no-complie; did you mean --no-compile? (h2h race --help)"),
    (["race", "--no-tokens"], "unknown option --no-tokens; did you mean --tokens? (h2h race --help)"),
    (["race", "--qqq"], "unknown option --qqq"),
    (["runs", "x", "-q"], "unknown option -q"),
    (["list", "--lr.qk", "30x"], "unknown option --lr.qk"),
    # Values that are missing or not taken.
    (["race", "--tokens"], "--tokens COUNT needs a value (h2h race --help)"),
    (["race", "--tokens", "--seeds", "2"], "--tokens COUNT needs a value (h2h race --help)"),
    (["race", "--arms"], "--arms ARM ... needs a value (h2h race --help)"),
    *(
        (["race", "--arms", "standard", "diagonal", f"--{name}", *value], f"--{name} {rest} needs a value")
        for name, rest in (
            ("corpus", "NAME ..."),
            ("size", "NAME ..."),
            ("context", "COUNT ..."),
            ("shape", "RULE ..."),
            ("probes", "PROBE ..."),
            ("set", "KEY=VALUE ..."),
            ("tasks", "TASK ..."),
            ("track", "TRACKER ..."),
            ("reuse", "DIR ..."),
            ("out", "DIR"),
        )
        for value in ([], [""])
    ),
    (
        ["verdict", "x.csv", "--arm", "a", "--seed", "b", "--metric", "c", "--out", ""],
        "--out DIR needs a value (h2h verdict --help)",
    ),
    (["report", ""], "DIR needs a value (h2h report --help)"),
    (["runs", "x", ""], "DIR|RUN ... needs a value (h2h runs --help)"),
    (["race", "--quiet=yes"], "--quiet takes no value, got 'yes' (h2h race --help)"),
    (["race", "--no-compile=on"], "--no-compile takes no value, got 'on' (h2h race --help)"),
    # Arguments that are missing or too many.
    (["runs"], "DIR is missing (h2h runs --help)"),
    (["runs", "--export", "x.tar.gz"], "DIR is missing (h2h runs --help)"),
    (["cost"], "needs at least one arm"),
    (["generate", "x"], "--prompt TEXT is missing (h2h generate --help)"),
    (["verdict", "x.csv", "--arm", "a", "--seed", "b"], "--metric COLUMN is missing (h2h verdict --help)"),
    (["watch", "x", "y"], "unexpected argument 'y' (h2h watch --help)"),
    (["race", "--seeds", "2", "mine.toml", "other"], "unexpected argument 'other' (h2h race --help)"),
    # Wrong types.
    (["watch", "x", "--port", "q"], "--port takes a whole number, got 'q' (h2h watch --help)"),
    (["race", "--margin", "1_0"], "--margin takes a number, got '1_0' (h2h race --help)"),
    (["race", "--margin", "１"], "--margin takes a number, got '１' (h2h race --help)"),
    (["watch", "x", "--port", "1.5"], "--port takes a whole number, got '1.5' (h2h watch --help)"),
    (["race", "--lr", "fast"], "--lr takes a number, got 'fast' (h2h race --help)"),
    (["bench", "population", "5", "x"], "COUNT takes a whole number, got 'x' (h2h bench population --help)"),
    # Wrong choices.
    (
        ["race", "--retry", "faild"],
        "unknown value for --retry 'faild'; did you mean 'failed'? (allowed: failed, none) (h2h race --help)",
    ),
    (["race", "--compile=maybe"], "unknown value for --compile 'maybe' (allowed: auto, off, on)"),
    (["race", "--arms", "a", "--set", "a=1", "--set=-b"], "--set takes KEY=VALUE, got '-b'"),
]


@pytest.mark.parametrize(
    ("words", "message"),
    MISTAKES,
    ids=lambda value: ascii(" ".join(value))[1:80] if isinstance(value, list) else "",
)
def test_a_typing_mistake_is_one_clear_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*words, code=2)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("h2h: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


FILES = {
    "malformed.toml": 'arms = ["standard",',
    "unknown.toml": 'arms = ["standard", "diagonal"]\ntokenz = 5\n',
    "type.toml": 'arms = ["standard", "diagonal"]\nlr = "fast"\n',
    "arms.toml": 'arms = "standard"\nseeds = 3.5\n',
    "model.toml": 'arms = ["standard", "diagonal"]\n[model]\npositions = "roppe"\n',
    "number.toml": "arms = 0\n",
    "digits.toml": f'arms = ["standard"]\ntokens = {"9" * 5000}\n',
    "hex.toml": f'arms = ["standard"]\ntokens = 0x{"f" * 5000}\n',
    "deep.toml": f"arms = {'[' * 2000}{']' * 2000}\n",
    "dotted.toml": f'arms = ["standard"]\nmodel{".a" * 2000} = 1\n',
    "nul.toml": 'arms = ["standard"]\nname = "a\\u0000b"\n',
    "bell.toml": 'arms = ["standard"]\ncorpus = "file:\\u0007"\n',
    "label.toml": 'arms = [{arm = "standard", name = "\\u001b[2J"}]\n',
    "unlabelled.toml": 'arms = [{arm = "standard", name = ""}]\n',
    "path.toml": 'arms = [{arm = "a\\u0000.py:Mine"}]\n',
    "unnamed.toml": 'arms = ["standard"]\nname = ""\n',
    "seed.toml": f'arms = ["standard"]\nseeds = [{2**63}]\n',
    "deep.json": "[" * 100_000 + "]" * 100_000,
    "empty.txt": "",
    "short.txt": "a few words, and no more",
    "binary.bin": "\x00\x01\x02\xff" * 4000,
    "bare.py": "x = 1\n",
    "syntax.py": "class Mine(:\n",
    "raising.py": "raise RuntimeError('at import')\n",
    "noclass.py": "Mine = 3\n",
    "noforward.py": "class Mine:\n    pass\n",
}
BAD_FILES = [
    (["race", "malformed.toml"], "malformed.toml"),
    (["race", "unknown.toml"], "unknown study setting 'tokenz'; did you mean 'tokens'"),
    (["race", "type.toml"], "lr takes a number, got 'fast'"),
    (["race", "arms.toml"], "seeds"),
    (["race", "model.toml"], "did you mean 'rope'"),
    (["race", "number.toml"], "a study needs arms"),
    (["race", "digits.toml"], "digits.toml is not TOML"),
    (["race", "hex.toml"], "tokens is an integer of 20,000 bits"),
    (["race", "deep.toml"], "deep.toml is not TOML: it is nested too deep"),
    (["race", "dotted.toml"], "model is nested too deep"),
    (["race", "nul.toml"], "name contains a control character: 'a\\x00b'"),
    (["race", "bell.toml"], "corpus contains a control character"),
    (["race", "label.toml"], "contains a control character"),
    (["race", "unlabelled.toml"], "arm 'standard': its name is empty"),
    (["race", "path.toml"], "contains a control character"),
    (["race", "unnamed.toml"], "name takes a text of 1 to 200 bytes"),
    (["race", "seed.toml"], "seeds: expected a whole number"),
    (["bench", "kernels", "--out", "deep.json"], "damaged file"),
    (["bench", "kernels", "--out", "."], "it is a directory"),
    (["race", "--arms", "standard", "diagonal", "--corpus", "file:empty.txt"], "empty"),
    (["race", "--arms", "standard", "diagonal", "--corpus", "file:short.txt"], "short.txt"),
    (["race", "--arms", "standard", "diagonal", "--corpus", "file:binary.bin"], "binary.bin"),
    (["race", "--arms", "standard", "./bare.py:Mine"], "unknown class in ./bare.py 'Mine'"),
    (["race", "--arms", "standard", "./syntax.py:Mine"], "syntax.py"),
    (["race", "--arms", "standard", "./raising.py:Mine"], "raising.py"),
    (["race", "--arms", "standard", "./noclass.py:Mine"], "noclass.py"),
    (["race", "--arms", "standard", "./noforward.py:Mine"], "noforward.py"),
    (["race", "--arms", "standard", "./bare.py"], "name a class: ./bare.py:ClassName"),
    (["race", "--arms", "standard", "diagonal", "--out", "short.txt/out"], "cannot write to short.txt/out"),
    (["doctor", "nowhere"], "no study in nowhere"),
    (["doctor", "short.txt"], "no study in short.txt"),
    (["report", "short.txt"], "no study in short.txt"),
    (["watch", "short.txt"], "short.txt is a file; a study is a directory"),
    (["runs", ".", "--import", "binary.bin"], "cannot be read as an export of runs"),
    (["generate", ".", "--prompt", "x"], "no run at '.'"),
]


@pytest.mark.parametrize(("words", "message"), BAD_FILES, ids=lambda value: str(value)[:60])
def test_a_bad_file_is_one_clear_line_and_exit_code_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    run(*words, *(["--tokens", "2560", "--batch", "256"] if words[:2] == ["race", "--arms"] else []), code=2)
    error = capsys.readouterr().err
    assert message in error
    assert error.splitlines()[-1].startswith("h2h: ")
    assert "Traceback" not in error


def test_a_long_prompt_is_cut_to_the_context(
    raced: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = []
    monkeypatch.setattr(
        "headtohead.api.loaded.generate",
        lambda model, prompt, *rest, **named: read.append(prompt) or iter(()),
    )
    run("generate", str(Store(raced).runs()[0].path), "--prompt", "x" * 120_000 + "the end")
    assert bytes(read[0][0].tolist()) == b"x" * 121 + b"the end"
    error = capsys.readouterr().err
    assert (
        error.splitlines()[0]
        == "the prompt has 120,007 tokens and the context 128: only the last 128 are read"
    )


def test_layers_to_skip_have_few_digits(raced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("evaluate", str(Store(raced).runs()[0].path), "--corpus", "stdlib", "--skip", "9" * 5000)
    run(*words, code=2)
    assert "skip takes variant, standard or layers" in capsys.readouterr().err


def test_weights_with_nan_are_one_clear_line_and_exit_code_2(
    raced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(raced, tmp_path / "study")
    folder = Store(tmp_path / "study").runs()[0]
    tensors = read_tensors(folder.weights)
    next(iter(tensors.values())).view(-1)[0] = math.nan
    folder.keep_weights(save(tensors))
    for words in (
        ("generate", str(folder.path), "--prompt", "x"),
        ("evaluate", str(folder.path), "--corpus", "stdlib"),
        ("look", str(folder.path), "--text", "x", "--out", str(tmp_path / "x.html")),
    ):
        run(*words, code=2)
        error = capsys.readouterr().err
        assert error.endswith("final.safetensors: the weights contain NaN\n")
        assert error.count("\n") == 1


def test_output_to_a_full_device_or_a_directory_is_one_clear_line_and_exit_code_2(
    raced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    look = ("look", str(Store(raced).runs()[0].path), "--text", "x", "--out")
    for words, message in (
        ((*look, str(full)), f"{full}: No space left on device"),
        ((*look, str(tmp_path)), f"{tmp_path}: give a file in an existing directory"),
        (("runs", str(raced), "--export", str(full)), f"cannot write {full}: No space left on device"),
        (("runs", str(raced), "--export", "."), "it is a directory"),
    ):
        run(*words, code=2)
        error = capsys.readouterr().err
        assert message in error
        assert error.splitlines()[-1].startswith("h2h: ")
        assert "Traceback" not in error
    assert full.is_symlink()


def test_an_archive_on_standard_output_is_nothing_else(
    raced: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run("runs", str(raced), "--export", "/dev/stdout")
    with tarfile.open(fileobj=io.BytesIO(capfdbinary.readouterr().out)) as archive:
        assert sum(name.endswith("result.json") for name in archive.getnames()) == 4


@pytest.mark.parametrize("lines", [2, 6])
def test_a_race_whose_reader_leaves_ends_quietly_and_continues(
    lines: int,
    story: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Reader(io.StringIO):
        def write(self, text: str) -> int:
            if self.getvalue().count("\n") >= lines:
                raise BrokenPipeError
            return super().write(text)

    words = ["race", "--arms", "standard", "--corpus", f"file:{story}", "--tokens", "1024", "--batch", "256"]
    words += ["--seeds", "2", "--workers", "1", "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr("headtohead.common.progress._LINE_EVERY", 0.0)
        patch.setattr(sys, "stdout", Reader())
        run(*words)
    assert capsys.readouterr().err == ""
    assert {found.state() for found in Store(tmp_path / "out").runs()} <= {"done", "stopped", "waiting"}
    run(*words)
    assert {found.state() for found in Store(tmp_path / "out").runs()} == {"done"}


def test_debug_shows_where_it_was_raised() -> None:
    from headtohead.common.errors import UserError

    with pytest.raises(UserError):
        main(["check", "standart", "--debug"])


def test_the_package_runs_as_a_module_and_imports_nothing_slow() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "headtohead", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("headtohead ")
    code = "import sys, torch; from headtohead import Study, load, wrap, Mechanism; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Each of these takes as long to import as the whole package; benchmarks/imports.py measures it.
    slow = {"altair", "vl_convert", "pandas", "torch._inductor", "transformers", "datasets"}
    assert not slow & set(found.stdout.split())


def test_shipped_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run("list", "studies")
    out = capsys.readouterr().out
    assert "The quick race" in out
    assert "h2h reproduce NAME" in out
    run("list", "--json", "studies")
    rows = json.loads(capsys.readouterr().out)["studies"]
    assert {row["name"]: row["claims"] for row in rows}["quick"] == 0
    assert {row["name"]: row["claims"] for row in rows}["sharing"] == 14
