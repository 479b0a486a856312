"""The studies that come with the package."""

from __future__ import annotations

import pytest

from headtohead import Study, UserError
from headtohead.study.claims.paper import find_paper
from headtohead.study.config.shipped import QUICK, find_study, shipped_studies


def test_a_shipped_study_is_found_by_name() -> None:
    assert find_study(QUICK) == shipped_studies()[QUICK]
    assert Study.from_file(QUICK, seeds=2).spec.seeds == (1, 2)
    assert find_paper("sharing") == shipped_studies()["sharing"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quik", "did you mean 'quick'"),
        ("studies/quick.toml", "the shipped study is named quick"),
        ("mine.toml", "no such study file: mine.toml"),
        ("papers/mine", "no such study file: papers/mine"),
    ],
)
def test_a_study_that_does_not_exist_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(UserError) as found:
        Study.from_file(name)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_an_unknown_paper_lists_the_studies_with_claims() -> None:
    with pytest.raises(UserError, match=r"unknown paper 'quick2'.*sharing") as found:
        find_paper("quick2")
    assert "coherence" not in str(found.value)
