"""h2h data list."""

from __future__ import annotations

from headtohead.cli.shared.options import DataDirectory
from headtohead.cli.shared.tables import print_table
from headtohead.common.errors import UserError
from headtohead.common.terminal import say
from headtohead.data.corpora import corpus_names, find_corpus
from headtohead.data.shards import cache_dir
from headtohead.data.tasks.registry import task_files, task_names, zeroshot_names


def command(*, data_dir: DataDirectory = None) -> None:
    """List corpora and tasks and whether each is available.

    Args:
        data_dir: directory of the named corpora and tasks (default: $H2H_DATA)
    """
    for title, names, find in (
        ("corpora", corpus_names(), lambda name: ":" in name or find_corpus(name, data_dir)),
        ("tasks", task_names(), lambda name: task_files(name, data_dir)),
        ("zero-shot tasks", zeroshot_names(), lambda name: task_files(name, data_dir)),
    ):
        rows = []
        for name, about in names.items():
            try:
                find(name)
                state = "available"
            except UserError as error:
                state = str(error).split(": ", 1)[-1]
            rows.append((name, about, state))
        print_table(title, ("task" if "task" in title else "corpus", "contents", "state"), rows)
    say(f"prepared data is stored in {cache_dir()} (H2H_CACHE)")
