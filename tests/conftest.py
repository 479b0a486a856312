"""Fixtures: a cache of its own for every session, small text, and the shared data sets where they are at hand."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keep prepared data out of the user's cache, and the user's data out of the tests."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["H2H_CACHE"] = str(folder)
    os.environ.pop("H2H_DATA", None)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The shared data sets, or a skip that says so."""
    for place in (os.environ.get("H2H_TEST_DATA"), Path(__file__).parents[2] / "shared" / "data"):
        if place and (Path(place) / "README.md").is_file():
            return Path(place)
    pytest.skip("the shared data sets are not at hand (H2H_TEST_DATA, or ../shared/data)")


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some 60 kB that a small model can learn something of."""
    path = tmp_path_factory.mktemp("story") / "story.txt"
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "and",
        "saw",
        "the",
        "dog",
        "run",
        "to",
        "a",
        "house",
        "where",
        "old",
        "men",
        "told",
        "tales",
        "of",
        "kings",
    ]
    choose = random.Random(7)
    lines = [" ".join(choose.choice(words) for _ in range(choose.randint(4, 12))) + "." for _ in range(1500)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
