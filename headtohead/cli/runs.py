"""h2h runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headtohead.cli.shared.options import flag
from headtohead.cli.shared.tables import print_table
from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.files import output_target
from headtohead.common.numbers import exact_count, number
from headtohead.common.terminal import say
from headtohead.study.numerics import NUMERICS
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.manifest import METRIC, metric_label
from headtohead.study.store.run_store import Store


def command(
    folder: Annotated[str, flag("DIR")],
    *,
    export: Annotated[str | None, flag("FILE")] = None,
    import_: Annotated[str | None, flag(name="import", metavar="FILE")] = None,
) -> None:
    """List the runs of a study with their states, or move finished runs between machines.

    Args:
        folder: study directory
        export: write the finished runs, without weights, to this .tar.gz or .tar.xz file (default: none)
        import_: add the finished runs of such a file (default: none)
    """
    store = Store(Path(folder))
    if import_ is not None:
        new, known = import_runs(store, Path(import_))
        say(f"{new} runs added, {known} already present")
    if not store.path.is_dir():
        raise UserError(f"no study in {folder}: there is no such directory")
    if export is not None:
        count = export_runs(store, Path(export))
        if output_target(Path(export)) is not None:  # nothing follows an archive on standard output
            say(f"{count} finished runs written to {export}")
        return
    rows = []
    damage = []
    units = dict[str, None]()
    for run in store.runs():
        try:
            spec, result = run.spec(), run.result()
        except UnreadableFile as error:
            damage.append(str(error))
            rows.append((run.id, "?", 0, "?", "?", "?", "damaged", "–"))
            continue
        tokens = exact_count(spec.training.tokens)
        place = (spec.label, spec.seed, spec.corpus.label, spec.size.name, tokens)
        test = None if result is None else result.tested
        metric = METRIC if test is None else test.metric
        units[metric_label(metric)] = None
        numerics = spec.numerics
        mark = "" if numerics == str(NUMERICS) else f", computed with numerics {numerics}"
        rows.append(
            (
                run.id,
                *place,
                f"{run.state(result)}{mark}",
                number(None if test is None else test.values[metric], ".4f"),
            )
        )
    rows.sort(key=lambda row: (row[3], row[4], row[1], row[2]))
    score = next(iter(units)) if len(units) == 1 else "score"
    columns = ("run", "arm", "seed", "corpus", "size", "tokens", "state", score)
    print_table(f"{len(rows)} runs in {folder}", columns, rows, right=("seed", "tokens", score))
    for words in damage:
        say(words)
    if damage:
        say(f"h2h doctor {folder} lists what can be repaired")
