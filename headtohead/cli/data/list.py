"""h2h data list."""

from __future__ import annotations

from headtohead.cli.shared.options import DataDirectory
from headtohead.cli.shared.tables import print_table
from headtohead.common.terminal import say
from headtohead.data.available import is_present, set_files, set_sources
from headtohead.data.corpora import corpus_names
from headtohead.data.locate import cache_dir, data_folder, get_command
from headtohead.data.tasks.registry import task_names, zeroshot_names


def command(*, data_dir: DataDirectory = None) -> None:
    """List corpora and tasks and whether each is available.

    Args:
        data_dir: directory of the named corpora and tasks (default: $H2H_DATA)
    """
    for title, names in (
        ("corpora", corpus_names()),
        ("tasks", task_names()),
        ("zero-shot tasks", zeroshot_names()),
    ):
        rows = [(name, about, _state(name, data_dir)) for name, about in names.items()]
        print_table(title, ("task" if "task" in title else "corpus", "contents", "state"), rows)
    say(f"files are in {data_folder(data_dir)} (H2H_DATA)")
    say(f"prepared data is stored in {cache_dir()} (H2H_CACHE)")


def _state(name: str, data_dir: str | None) -> str:
    """Return whether a corpus or task is available, or the command that downloads it."""
    if not set_files(name):
        return "available"
    if is_present(name, data_dir):
        return "present"
    return f"missing: {get_command([name], data_dir)}" if set_sources(name) else "missing: put it in by hand"
