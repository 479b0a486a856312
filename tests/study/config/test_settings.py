"""Every setting is listed with type, default and one line, and `Study` takes the same ones by name."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from pathlib import Path
from typing import Any, Unpack

import msgspec
import pytest

from headtohead.api.study import Study
from headtohead.cli.main import main
from headtohead.cli.shared import tables
from headtohead.cli.shared.options import StudyOptions
from headtohead.cli.shared.pages import settings_page
from headtohead.common.errors import UserError
from headtohead.model.sizes import Settings
from headtohead.study.config.settings import (
    ArmSettings,
    ModelSettings,
    RuleSettings,
    StudySettings,
    TuneSettings,
    find_settings,
    study_settings,
    type_text,
)
from headtohead.study.config.spec import _KNOWN, GivenSettings, Tune, build_study
from headtohead.training.circuit_rates import Rule
from headtohead.training.settings import TrainSettings

DOCS = Path(__file__).parents[3] / "docs"


def own_names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def run(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == code


def test_study_takes_exactly_the_settings_that_are_read() -> None:
    signature = inspect.signature(Study, eval_str=True)
    assert signature.parameters["settings"].annotation == Unpack[StudySettings]
    typed = {"arms", *typing.get_type_hints(StudySettings)}
    assert typed == {"init_from" if name == "from" else name for name in _KNOWN}
    assert {one.name for one in study_settings() if not one.group} == typed


@pytest.mark.parametrize(
    ("typed", "read"),
    [(ModelSettings, Settings), (TuneSettings, Tune), (RuleSettings, Rule)],
)
def test_tables_have_the_names_that_are_read(typed: type, read: type) -> None:
    assert set(typing.get_type_hints(typed)) == own_names(read)


def test_an_arm_has_the_settings_of_training_and_its_own() -> None:
    own = {"arm", "name", "model", "init_from"}
    assert set(typing.get_type_hints(ArmSettings)) == own | own_names(TrainSettings)


@pytest.mark.parametrize("kind", [GivenSettings, TrainSettings, Settings])
def test_the_stated_types_are_those_that_are_read(kind: type) -> None:
    stated = typing.get_type_hints(ModelSettings if kind is Settings else StudySettings, include_extras=True)
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if hint is Any or name in ("arms", "start", "circuit_lr"):
            continue
        words = type_text(stated[name])
        assert words == type_text(hint) or (words == "count" and hint is int), name


def test_every_default_is_a_value_that_the_type_takes() -> None:
    hints = typing.get_type_hints(StudySettings, include_extras=True)
    for field in msgspec.structs.fields(GivenSettings):
        if field.encode_name != "arms" and field.default not in (None, msgspec.NODEFAULT):
            msgspec.convert(field.default, hints[field.encode_name])


def test_every_setting_has_one_line_about_it() -> None:
    for one in study_settings():
        assert 8 < len(one.about) < 120, one.name
        assert "\n" not in one.about
        assert one.type


def test_the_lines_of_common_settings() -> None:
    shown = {one.name: one for one in study_settings()}
    assert (shown["tokens"].type, shown["tokens"].default) == ("count", "by size; nano: 500k")
    assert (shown["schedule"].type, shown["schedule"].default) == ("cosine|wsd|constant", "cosine")
    assert shown["model.dropout"].about == "fraction of each block's output dropped in training"
    assert shown["log_circuits"].default == "false"


def test_flags_of_a_study_are_settings() -> None:
    flags = {field.name for field in dataclasses.fields(StudyOptions)} - {"set"}
    assert flags <= {one.name for one in study_settings()}


def test_one_setting_or_one_table_is_found() -> None:
    assert [one.name for one in find_settings("dropout")] == ["model.dropout"]
    assert [one.name for one in find_settings("lr")] == ["lr"]
    assert [one.name for one in find_settings("tune")] == ["tune", "tune.lr", "tune.tokens", "tune.seeds"]
    with pytest.raises(UserError, match="unknown study setting 'tokns'; did you mean 'tokens'"):
        find_settings("tokns")


def test_the_command_prints_all_or_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "width", lambda: 80)
    monkeypatch.setattr("headtohead.cli.settings.width", lambda: 80)
    run("settings")
    out = capsys.readouterr().out
    assert all(f"  {one.name} " in out for one in study_settings())
    assert max(map(len, out.splitlines())) <= 80
    run("settings", "weight_decay")
    out = capsys.readouterr().out
    assert "default:      0.1" in out
    assert "--set weight_decay=VALUE" in out
    run("settings", "--json")
    assert len(json.loads(capsys.readouterr().out)) == len(study_settings())
    run("settings", "nothing", code=2)


def test_the_committed_page_is_the_generated_one() -> None:
    assert (DOCS / "settings.md").read_text() == settings_page(), "run: h2h settings --page docs/settings.md"


def test_the_run_to_start_from_is_named_as_it_is_given() -> None:
    with pytest.raises(UserError, match="init_from takes a string, got 3"):
        build_study({"arms": ["standard"], "tasks": "recall", "init_from": 3})
