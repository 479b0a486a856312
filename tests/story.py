"""A small text with structure that a small model can learn."""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

_WORDS = [
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


@cache
def story_file() -> Path:
    """Return the path of a text of about 60 kB, the same in every process."""
    folder = Path(tempfile.mkdtemp(prefix="h2h-story-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    choose = random.Random(7)
    lines = [" ".join(choose.choice(_WORDS) for _ in range(choose.randint(4, 12))) + "." for _ in range(1500)]
    path = folder / "story.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
