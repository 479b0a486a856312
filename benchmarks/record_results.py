"""Copy a finished study, or all studies of a reproduced paper, into a folder of results without weights.

    python benchmarks/record_results.py races/coupled results/coupled

Each study's folder gets runs.tar.xz (every finished run, trials of tuning included), study.json, study.lock.json and
verdicts.json; the first one also claims.json. The table of runs is written between the marks `<!-- runs -->` and `<!-- end -->` of its
README.md, or printed; a run that several studies share counts where it is first. Between `<!-- verdicts -->` and `<!-- end -->`, if the file has
these marks, it writes the verdicts as `h2h report DIR --table markdown` prints them. `make site` restores the folders below build/results
and rebuilds their pages.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from headtohead.api.study import open_study
from headtohead.common.files import write_atomic
from headtohead.study.claims.recorded import CLAIMS
from headtohead.study.store.archive import export_runs
from headtohead.study.store.run_store import Store

DOCUMENTS = ("study.json", "study.lock.json", "verdicts.json", CLAIMS)
ARCHIVE = "runs.tar.xz"


def studies(folder: Path) -> dict[str, Path]:
    """Return the studies in a folder by name: itself, named `study`, and the folders in it that hold one."""
    found = {path.parent.name: path.parent for path in sorted(folder.glob("*/study.json"))}
    return ({"study": folder} if (folder / "study.json").is_file() else {}) | found


def record(source: Path, target: Path) -> None:
    """Write one study in place of what was recorded of it before."""
    target.mkdir(parents=True, exist_ok=True)
    export_runs(Store(source), target / ARCHIVE)
    for name in (*DOCUMENTS, "runs.tar.gz"):
        (target / name).unlink(missing_ok=True)
    for name in DOCUMENTS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def cells(source: Path, counted: set[str]) -> list[str]:
    """Return a study's cells of the table; runs in `counted` were counted before, and its runs are added there."""
    finished = [run for run in Store(source).runs() if run.finished()]
    own = [run for run in finished if run.id not in counted]
    counted |= {run.id for run in own}
    results = Store(source).results([run.id for run in finished])
    states = Counter(result.status for result in results.values())
    shared = [f"{len(finished) - len(own)} of another study"] if len(own) < len(finished) else []
    costs = [run.costs() for run in own]
    starts = [start for run in own for start in run.environments()]
    dates = sorted({start.date[:10] for start in starts}) or ["unknown"]
    return [
        f"{len(finished)} ({', '.join([*(f'{number} {state}' for state, number in states.items()), *shared])})",
        _listed(start.commit for start in starts),
        _listed(start.device for start in starts),
        _listed(f"torch {start.torch}, Python {start.python}" for start in starts),
        dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        f"{sum(cost.train_seconds or 0 for cost in costs):,.0f}",
        f"{sum(cost.score_seconds or 0 for cost in costs):,.0f}",
    ]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def table(rows: dict[str, Sequence[str]]) -> str:
    """Return the table of studies in Markdown."""
    head = ("study", "runs", "commit", "device", "versions", "date", "seconds of training", "of scoring")
    lines = [head, ["---"] * len(head), *([f"`{name}`", *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(found: dict[str, Path]) -> str:
    """Return the verdict tables of all studies in Markdown."""
    texts = {name: open_study(path).table("markdown").strip() for name, path in found.items()}
    return "\n\n".join(f"### `{name}`\n\n{text}" for name, text in texts.items())


def replaced(text: str, mark: str, content: str) -> str:
    """Return `text` with this content between the marks `<!-- mark -->` and `<!-- end -->`, or unchanged without them."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def main() -> None:
    """Record the studies of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="directory of the finished study or paper")
    parser.add_argument("target", type=Path, help="folder of results")
    given = parser.parse_args()
    found = studies(given.source)
    if given.target.resolve() == given.source.resolve():
        parser.error(f"{given.target} is the study itself; give another folder for its results")
    if not found:
        parser.error(f"{given.source}: no study.json found")
    if empty := [
        name for name, path in found.items() if not any(run.finished() for run in Store(path).runs())
    ]:
        parser.error(f"{given.source}: no finished runs in {', '.join(empty)}; remove them or run them first")
    if unjudged := [name for name, path in found.items() if not (path / "verdicts.json").is_file()]:
        parser.error(f"{given.source}: no verdicts.json in {', '.join(unjudged)}; run h2h report there first")
    counted: set[str] = set()
    rows = {name: cells(path, counted) for name, path in found.items()}
    for name, path in found.items():
        record(path, given.target if name == "study" else given.target / name)
    readme, runs = given.target / "README.md", table(rows)
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    filled = replaced(text, "runs", runs)
    if "<!-- verdicts -->" in text:
        filled = replaced(filled, "verdicts", verdicts(found))
    if filled != text:
        write_atomic(readme, filled)
    if runs not in filled:
        print(runs)


if __name__ == "__main__":
    main()
