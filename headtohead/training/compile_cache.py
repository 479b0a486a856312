"""The directory in which compiled graphs are kept: a graph is compiled once for each arm, shape and device.

Inductor names its entries by the graph, the shapes, the device and its own version, and so do the studies and processes
that share them. They are executed when they are loaded, so a directory that others can write to is not used, and
imports never write to it.
"""

from __future__ import annotations

import os
import platform
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headtohead.data.shards import cache_dir

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_compile_cache(warn: Callable[[str], None] = lambda message: None) -> Path:
    """Let Inductor keep its graphs in H2H_CACHE, unless TORCHINDUCTOR_CACHE_DIR is set; return the directory."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second to import

    given = os.environ.get(_VARIABLE)
    if given and given != default_cache_dir():  # to which importing Inductor sets the variable
        return Path(given)
    folder = cache_dir() / "compiled"
    version = f"torch-{torch.__version__}-python-{platform.python_version()}".replace("/", "_")
    found = folder / version
    try:
        for one in (folder, found):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
            if problem := _foreign(one):
                raise PermissionError(0, problem, str(one))
    except OSError as error:
        warn(f"compiled graphs are not kept: {error.filename}: {error.strerror}")
        found = Path(tempfile.mkdtemp(prefix="h2h-compiled-"))
    os.environ[_VARIABLE] = str(found)
    return found


@contextmanager
def empty_cache() -> Iterator[None]:
    """Let Inductor use an empty directory within the block, which is deleted at its end."""
    before = os.environ[_VARIABLE]
    with tempfile.TemporaryDirectory(prefix="h2h-compiled-") as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield
        finally:
            os.environ[_VARIABLE] = before


def set_damaged_aside(warn: Callable[[str], None]) -> Path:
    """Rename the directory of compiled graphs after an entry of it failed, and use an empty one."""
    damaged = Path(os.environ.pop(_VARIABLE))
    kept = Path(tempfile.mkdtemp(prefix=f"{damaged.name}.damaged-", dir=damaged.parent))
    damaged.rename(kept)  # replaces the empty directory
    warn(f"the compiled graphs in {damaged} are damaged and not used; kept as {kept.name}")
    return use_compile_cache(warn)


def _foreign(folder: Path) -> str:
    """Return why a directory may contain entries of other users, or an empty string."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "not a directory"
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if found.st_mode & 0o077:
        return f"others can use it (mode {stat.S_IMODE(found.st_mode):o}, not 700)"
    return ""
