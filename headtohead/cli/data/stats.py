"""h2h data stats."""

from __future__ import annotations

from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import DataDirectory, Json, flag
from headtohead.cli.shared.tables import print_table
from headtohead.common.errors import UserError
from headtohead.common.numbers import parse_count
from headtohead.common.terminal import say_json
from headtohead.evaluation.corpus_stats import statistics_head, statistics_row


def command(
    names: Annotated[tuple[str, ...], flag("CORPUS")],
    *,
    window: Annotated[str, flag("BYTES")] = "1024",
    data_dir: DataDirectory = None,
    json_: Json = False,
) -> None:
    """Show statistics of corpora: size, entropy, xz ratio, repetition within a window, coherence.

    Example: h2h data stats "coherence:0(stdlib)" "coherence:1(stdlib)" --window 256

    Args:
        names: stdlib, a path, coherence:DIAL(CORPUS,...), or a named corpus, see h2h data list
        window: bytes per window: the context of the model times the bytes per token
        data_dir: directory of the named corpora and tasks (default: $H2H_DATA)
        json_: print one JSON document
    """
    if not names:
        raise UserError("h2h data stats needs a corpus, such as: h2h data stats stdlib")
    found = api.corpus_stats(names, window=parse_count(window, "--window"), data_dir=data_dir)
    if json_:
        say_json(found, indent=1)
        return
    head = statistics_head()
    rows = [(label, *statistics_row(row)) for label, row in found.items()]
    print_table(f"train splits, windows of {window} bytes", ("corpus", *head), rows, right=head)
