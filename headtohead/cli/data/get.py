"""h2h data get."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headtohead.cli.shared.options import DataDirectory, flag
from headtohead.cli.shared.tables import print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_count
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import say
from headtohead.data.available import (
    downloadable,
    is_present,
    named_sets,
    set_files,
    set_sources,
)
from headtohead.data.get.fetch import fetch
from headtohead.data.get.sources import Source, find_source
from headtohead.data.locate import data_folder, present

_SAME = {True: ", the same as in the recorded results", False: ", not as in the recorded results", None: ""}


def command(
    names: Annotated[tuple[str, ...], flag("NAME")] = (),
    *,
    all_: Annotated[bool, flag(name="all")] = False,
    parts: Annotated[str | None, flag("COUNT|all")] = None,
    data_dir: DataDirectory = None,
) -> None:
    """Download corpora and tasks into the data directory. Started again, it continues.

    Without a name it lists what can be downloaded and what is there.

    Example: h2h data get enwik8 hatexplain

    Args:
        names: corpora and tasks (default: none)
        all_: everything that can be downloaded
        parts: parts of a large corpus: openwebtext, pubmed, code, c4 (default: a few)
        data_dir: directory of the named corpora and tasks (default: $H2H_DATA)
    """
    folder = data_folder(data_dir)
    wanted = dict.fromkeys(part for name in names for part in named_sets(name))
    if all_:
        wanted |= dict.fromkeys(downloadable())
    for name in wanted:
        if not set_sources(name):
            files = ", ".join(set_files(name).values())
            raise UserError(f"h2h data get has no source for {name}; put its files into {folder}: {files}")
    for name in wanted:
        _get(name, folder, parts)
    if names and not wanted:
        say(f"{', '.join(names)}: nothing to download")
    if not names and not all_:
        _list(folder)


def _get(name: str, folder: Path, parts: str | None) -> None:
    if is_present(name, folder):
        if parts is not None:
            raise UserError(f"{name} is already in {folder}; remove its files to download other parts")
        say(f"{name}: already in {folder}")
        return
    lacking = [file for file in set_files(name).values() if present(file, folder) is None]
    for source in set_sources(name):
        if not any(find_source(file) is source for file in lacking):
            continue
        count = _count(name, source, parts)
        of = f", {count} of {len(source.parts)} parts" if source.default_parts else ""
        say(f"{name}: from {source.parts[0].urls[0]}{of}; license: {source.license}", flush=True)
        with progress_bar(f"downloading {name}") as progress:
            found = fetch(source, folder, count, progress)
        for one in found:
            say(f"  {one.path}: {one.size:,} bytes, sha256 {one.sha256[:12]}...{_SAME[one.same]}")


def _count(name: str, source: Source, parts: str | None) -> int:
    """Return the number of parts to download."""
    most = len(source.parts)
    if parts is None:
        return source.default_parts or most
    if not source.default_parts:
        raise UserError(f"--parts {parts}: {name} is always downloaded whole")
    count = most if parts == "all" else parse_count(parts, "--parts")
    if not 1 <= count <= most:
        raise UserError(f"--parts {parts}: {name} has 1 to {most} parts")
    return count


def _list(folder: Path) -> None:
    rows = []
    for name in downloadable():
        sources = set_sources(name)
        license = "; ".join(dict.fromkeys(source.license for source in sources))
        rows.append((name, "present" if is_present(name, folder) else f"h2h data get {name}", license))
    print_table(f"data sets in {folder}", ("name", "state", "license"), rows)
