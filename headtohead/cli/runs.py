"""h2h runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from headtohead.cli.shared.options import flag
from headtohead.cli.shared.tables import print_table
from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.files import output_target
from headtohead.common.numbers import exact_count, number
from headtohead.common.terminal import say
from headtohead.common.text import counted
from headtohead.study.numerics import NUMERICS
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.manifest import METRIC, metric_label
from headtohead.study.store.programs import source_changes
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import RunDirectory, Store, find_run, run_names


def command(
    places: Annotated[tuple[str, ...], flag("DIR|RUN")],
    *,
    export: Annotated[str | None, flag("FILE")] = None,
    import_: Annotated[str | None, flag(name="import", metavar="FILE")] = None,
) -> None:
    """List the runs of a study with their names and states, or move finished runs between machines.

    A run is named STUDY/ARM/SEED, such as races/quick/standard/1, wherever a command takes one.

    Args:
        places: study directory, or some of its runs: STUDY/ARM/SEED, STUDY/ID or run directories
        export: write the finished runs, without weights, to this .tar.gz or .tar.xz file (default: none)
        import_: add the finished runs of such a file (default: none)
    """
    if not places:
        raise UserError("DIR is missing (h2h runs --help)")
    if import_ is not None:
        if len(places) > 1:
            raise UserError("--import takes one study directory")
        new, known = import_runs(Store(Path(places[0])), Path(import_))
        say(f"{new} runs added, {known} already present")
    store, runs = _chosen(places)
    if export is None:
        _show(store, runs)
        return
    count = export_runs(store, Path(export), runs)
    if output_target(Path(export)) is not None:  # nothing follows an archive on standard output
        say(f"{counted(count, 'finished run')} written to {export}")


def _chosen(places: Sequence[str]) -> tuple[Store, list[RunDirectory]]:
    """Return a study and its runs, or the runs that were given."""
    if len(places) == 1 and Path(places[0]).is_dir() and not (Path(places[0]) / "spec.json").is_file():
        store = Store(Path(places[0]))
        return store, store.runs()
    if len(places) == 1 and "/" not in places[0]:
        raise UserError(f"no study in {places[0]}: there is no such directory")
    runs = [find_run(place) for place in places]
    folders = {run.path.parent.parent.resolve(): run.path.parent.parent for run in runs}
    if len(folders) > 1:
        raise UserError(f"these runs are of {len(folders)} studies; give runs of one study at a time")
    return Store(next(iter(folders.values()))), list({run.id: run for run in runs}.values())


def _show(store: Store, runs: Sequence[RunDirectory]) -> None:
    rows: dict[tuple[str, str, str, int, str], tuple[object, ...]] = {}
    damage = []
    units = dict[str, None]()
    names = run_names(store).names
    for run in runs:
        try:
            spec, result = run.spec(), run.result()
        except UnreadableFile as error:
            damage.append(str(error))
            cells = (names.get(run.id, "?"), run.id, "?", "?", "?", "damaged", "–")
            rows["?", "?", "?", 0, run.id] = cells
            continue
        test = None if result is None else result.tested
        metric = METRIC if test is None else test.metric
        units[metric_label(metric)] = None
        rows[spec.corpus.label, spec.size.name, spec.label, spec.seed, run.id] = (
            names.get(run.id, f"{spec.label}/{spec.seed}"),
            run.id,
            spec.corpus.label,
            spec.size.name,
            exact_count(spec.training.tokens),
            ", ".join([run.state(result), *_marks(spec, run.id in names)]),
            number(None if test is None else test.values[metric], ".4f"),
        )
    score = next(iter(units)) if len(units) == 1 else "score"
    columns = ("run", "id", "corpus", "size", "tokens", "state", score)
    print_table(
        f"{counted(len(rows), 'run')} in {store.path}",
        columns,
        [rows[key] for key in sorted(rows)],
        right=("id", "tokens", score),
    )
    for words in damage:
        say(words)
    if damage:
        say(f"h2h doctor {store.path} lists what can be repaired")


def _marks(spec: RunSpec, planned: bool) -> list[str]:
    """Return how a run differs from what the study would train now."""
    marks = []
    if spec.numerics != str(NUMERICS):
        marks.append(f"computed with numerics {spec.numerics}")
    if change := source_changes(spec):
        marks.append(change)
    if not marks and not planned:
        marks.append("not compared")  # a trial of a tuning, or of earlier settings
    return marks
