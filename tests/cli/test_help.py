"""Help pages: one screen each, every option described with its default; old spellings are accepted and not shown."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from headtohead import cli
from headtohead.cli.main import COMMANDS, main, overview
from headtohead.cli.shared.arguments import OLD_FLAGS, parse_command, read_words
from headtohead.cli.shared.help import WIDTH, flags_of, help_page
from headtohead.common.errors import UserError
from headtohead.study.store.run_store import Store

SCREEN = 58


def command_of(name: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"headtohead.cli.{name.replace(' ', '.')}").command


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_and_shows_every_default(name: str) -> None:
    page = help_page(name, command_of(name))
    lines = page.splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= WIDTH
    for one in flags_of(command_of(name)):
        assert one.about, one.name
        assert one.spelling in page
        required = one.default is inspect.Parameter.empty
        assert one.line.endswith("]") or one.boolean or required or one.positional, one.name
        assert "None" not in one.line


def test_the_overview_fits_a_screen() -> None:
    lines = overview().splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= WIDTH


def test_every_command_is_one_file_of_its_name() -> None:
    root = Path(cli.__path__[0])
    found = {
        info.name.removeprefix("headtohead.cli.").replace(".", " ")
        for info in pkgutil.walk_packages([str(root)], "headtohead.cli.")
        if not info.ispkg
        and ".shared." not in info.name
        and info.name.rpartition(".")[2] not in ("main", "output")
    }
    assert found == set(COMMANDS)


def test_old_spellings_are_accepted_and_not_shown() -> None:
    page = help_page("race", command_of("race"))
    for old, new in OLD_FLAGS.items():
        assert f"{old} " not in page
        assert new.replace("--no-", "--[no-]") in page or f"{new} " in page or f"--[no-]{new[2:]}" in page
    flags = flags_of(command_of("race"))
    given = ["--for", "8m", "--from=a/b", "--stack", "--no-compile", "--no-quiet", "--keep-weights"]
    assert read_words(given, flags) == {
        "time-limit": ["8m"],
        "init-from": ["a/b"],
        "population": ["on"],
        "compile": ["off"],
        "quiet": ["off"],
        "keep-weights": ["on"],
    }
    found = read_words(["--no-stack", "--data_dir", "x"], flags)
    assert found == {"population": ["off"], "data-dir": ["x"]}


def test_values_that_look_like_options_and_arguments_after_options() -> None:
    flags = flags_of(command_of("generate"))
    found = read_words(["--prompt=--x", "--trust-files", "run"], flags)
    assert found == {"run": ["run"], "prompt": ["--x"], "trust-files": ["on"]}
    assert read_words(["--prompt", "-5", "--", "-run"], flags) == {"run": ["-run"], "prompt": ["-5"]}
    flags = flags_of(command_of("race"))
    given = ["--seeds", "2", "mine.toml", "--arms=a", "b", "--no-keep-weights", "--quiet"]
    options = {"seeds": ["2"], "arms": ["a", "b"], "keep-weights": ["off"], "quiet": ["on"]}
    assert read_words(given, flags) == {"study": ["mine.toml"]} | options


def test_words_become_typed_arguments_and_defaults_stay() -> None:
    words = ["mine.toml", "--arms", "a", "b", "--lr", "1e-3", "--workers=2", "--no-compile", "--quiet"]
    call = parse_command("race", command_of("race"), words)
    assert isinstance(call, functools.partial)
    assert call.args == ("mine.toml",)
    assert call.keywords.keys() == {"settings", "run"}
    assert (call.keywords["settings"].arms, call.keywords["settings"].lr) == (("a", "b"), 1e-3)
    how = call.keywords["run"]
    assert (how.workers, how.compile, how.quiet, how.threads, how.device) == (2, "off", True, 1, "auto")
    call = parse_command("look", command_of("look"), ["run", "--trust-files"])
    assert isinstance(call, functools.partial)
    assert (call.keywords["model"].device, call.keywords["model"].trust_files) == ("cpu", True)


def test_ratios_of_circuits_are_settings_and_lists_are_joined() -> None:
    flags = flags_of(command_of("race"))
    given = ["mine.toml", "--lr.qk", "30x", "--set", "a=1", "--arms", "x", "--set", "b=2", "--lr.ov=2x"]
    options = {"set": ["a=1", "b=2", "lr.qk=30x", "lr.ov=2x"], "arms": ["x"]}
    assert read_words(given, flags) == {"study": ["mine.toml"]} | options
    with pytest.raises(UserError, match=r"--lr\.qk takes a ratio"):
        read_words(["--lr.qk"], flags)
    with pytest.raises(UserError, match="--tokens is given twice"):
        read_words(["--tokens", "1", "--tokens", "2"], flags)


def test_a_race_takes_old_and_new_spellings(story: Path, tmp_path: Path) -> None:
    common = ["race", "--arms", "standard", "diagonal", "--corpus", f"file:{story}", "--tokens", "1024"]
    common += ["--batch", "256", "--seeds", "1", "--workers", "1", "--quiet", "--out", str(tmp_path / "out")]
    for limit in ("--for", "--time-limit"):
        with pytest.raises(SystemExit) as ended:
            main([*common, limit, "1h", "--no-stack"])
        assert ended.value.code == 0
    assert all(run.finished() for run in Store(tmp_path / "out").runs())
