"""Find the files of named corpora and tasks in the data directory, or say how to download them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from headtohead.common.errors import MissingFile
from headtohead.data.get.sources import find_source


def cache_dir(given: str | Path | None = None) -> Path:
    """Return the directory of prepared data: the argument, H2H_CACHE, or the user's cache directory."""
    if chosen := given or os.environ.get("H2H_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headtohead"


def data_folder(given: str | Path | None = None) -> Path:
    """Return the directory of corpora and tasks: the argument, H2H_DATA, or `data` in the directory of prepared data."""
    chosen = given or os.environ.get("H2H_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir() / "data"


def spellings(file: str) -> list[str]:
    """Return the paths that may hold a file, best first: `a.xz|b` means a.xz, else a, else b."""
    return [name for one in file.split("|") for name in dict.fromkeys((one, one.removesuffix(".xz")))]


def present(file: str, folder: Path) -> Path | None:
    """Return the path of a file in a data directory, or None."""
    return next((folder / name for name in spellings(file) if (folder / name).is_file()), None)


def get_command(names: Sequence[str], data_dir: str | Path | None = None) -> str:
    """Return the command that downloads these sets into the data directory."""
    folder = data_folder(data_dir)
    where = "" if folder.resolve() == data_folder().resolve() else f" --data-dir {shlex.quote(str(folder))}"
    return f"h2h data get {' '.join(names)}{where}"


def locate(kind: str, name: str, files: Mapping[str, str], data_dir: str | Path | None) -> dict[str, Path]:
    """Return the files of a corpus or task in the data directory; raise if one is missing."""
    folder = data_folder(data_dir)
    found = {key: present(file, folder) for key, file in files.items()}
    lacking = [files[key] for key, path in found.items() if path is None]
    if not lacking:
        return {key: path for key, path in found.items() if path is not None}
    if all(find_source(file) for file in lacking):
        raise MissingFile(f"{kind} '{name}' not found; download it with: {get_command([name], data_dir)}")
    place = folder / spellings(lacking[0])[0]
    raise MissingFile(f"{kind} '{name}' not found: {place} is missing, and h2h data get has no source for it")
