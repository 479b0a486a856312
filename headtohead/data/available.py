"""What a corpus or task needs from the data directory, and whether it is there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headtohead.common.errors import MissingFile, UserError, unknown
from headtohead.data import hub
from headtohead.data.corpora import (
    check_known,
    corpus_files,
    corpus_names,
    find_corpus,
    source_names,
    stable_name,
)
from headtohead.data.get.sources import Source, find_source
from headtohead.data.locate import cache_dir, get_command, spellings
from headtohead.data.tasks.registry import check_task_known, task_kind, task_names, zeroshot_names


def named_sets(name: str) -> list[str]:
    """Return the named sets whose files a corpus or task needs: itself, the corpora it is made of, or none."""
    if sources := source_names(name):
        return [part for source in sources for part in named_sets(source)]
    if corpus_files(name) or task_kind(name) is not None:
        return [name]
    _check_known(name)
    return []


def _check_known(name: str) -> None:
    """Raise if no corpus and no task has that name."""
    if name.partition(":")[0] in task_names():
        return check_task_known(name)
    try:
        check_known(name)
    except UserError:
        known = {**corpus_names(), **task_names(), **zeroshot_names()}
        raise unknown("corpus or task", name, known) from None


def set_files(name: str) -> dict[str, str]:
    """Return the files of a named set by the reader's key, as paths below the data directory."""
    kind = task_kind(name)
    return corpus_files(name) if kind is None else kind.files


def set_sources(name: str) -> list[Source]:
    """Return the sources of a named set's files; empty if a file has none."""
    found = [find_source(file) for file in set_files(name).values()]
    return [] if None in found else list({id(one): one for one in found if one is not None}.values())


def downloadable() -> list[str]:
    """Return the sets that can be downloaded: corpora, tasks, zero-shot tasks."""
    return [
        name
        for name in (*corpus_names(), *task_names(), *zeroshot_names())
        if set_files(name) and set_sources(name)
    ]


def is_present(name: str, data_dir: str | Path | None = None) -> bool:
    """Return whether all files of a named set are there."""
    return _missing(name, data_dir) is None


def check_available(names: Iterable[str], data_dir: str | Path | None = None) -> None:
    """Raise one error that names everything that these corpora and tasks lack, with the command that downloads it."""
    names = list(names)
    errors = lacking(names, data_dir)
    for name in names:
        if stable_name(name).startswith("file:"):
            find_corpus(name)  # raises if the path does not exist
    for name, error in errors.items():
        if len(errors) == 1 or not set_sources(name):
            raise error
    if errors:
        command = get_command(list(errors), data_dir)
        raise MissingFile(f"{', '.join(errors)} not found; download them with: {command}")


def lacking(names: Iterable[str], data_dir: str | Path | None = None) -> dict[str, MissingFile]:
    """Return the named sets that these corpora and tasks need and that are not there, with the error of each."""
    needed = dict.fromkeys(part for name in names for part in named_sets(name))
    return {name: error for name in needed if (error := _missing(name, data_dir)) is not None}


def _missing(name: str, data_dir: str | Path | None) -> MissingFile | None:
    kind = "task" if task_kind(name) is not None else "corpus"
    try:
        hub.find_files(kind, name, set_files(name), data_dir, cache_dir())
    except MissingFile as error:
        return error
    return None


def layout() -> list[tuple[str, str, str, str, str]]:
    """Return a row per set that can be downloaded: name, files, address, license, comparison with recorded results."""
    rows = []
    for name in downloadable():
        sources = set_sources(name)
        files = [f"`{file}`" for one in set_files(name).values() for file in _downloaded(one)]
        addresses = [part.urls[0] for source in sources for part in source.parts[:1]]
        licenses = dict.fromkeys(source.license for source in sources)
        compared = dict.fromkeys(source.compared for source in sources)
        rows.append((name, ", ".join(files), ", ".join(addresses), "; ".join(licenses), "; ".join(compared)))
    return rows


def _downloaded(file: str) -> list[str]:
    """Return the file that its source gives."""
    source = find_source(file)
    return [name for name in spellings(file) if source is not None and name in source.files]
