"""Train some recorded runs again and compare the results byte for byte.

    python benchmarks/repeat_recorded.py results/coupled --runs 6 -- reproduce coupled --scale tiny
    python benchmarks/repeat_recorded.py results/contenders/nano --runs 4 -- race contenders-nano

The studies of the folder are restored in a temporary directory without the judged runs that are drawn, and the `h2h` command after `--` is
executed there: it has only these runs left to do. The results must be equal to the last bit but for `late_fall`, the mean of logged
losses: a branch was logged at the steps of its trunk, and is trained without it here. The last line is one JSON document with the
commit that trained them again; the exit code is 1 if a run differs, or none was trained.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from record_results import ARCHIVE, studies

from headtohead.common.schema import read_document
from headtohead.study.environment import provenance
from headtohead.study.store.archive import import_runs
from headtohead.study.store.run_store import RunDirectory, Store

EQUAL, DIFFERENT = "equal", "differs"
LOGGED = ("late_fall", "checksum")
"""Fields of a result that depend on the logged steps."""


def restore(source: Path, target: Path) -> Store:
    """Return a recorded study as a store that the command can continue."""
    store = Store(target)
    store.make()
    import_runs(store, source / ARCHIVE)
    for name in ("study.json", "study.lock.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    return store


def outcome(run: RunDirectory) -> dict[str, Any]:
    """Return what must be equal of a result."""
    return {key: value for key, value in run.document("result.json").items() if key not in LOGGED}


def state(run: RunDirectory, before: dict[str, Any]) -> str:
    """Return whether a run has the recorded result, another one, or none."""
    if not run.finished():
        return "not trained again"
    return EQUAL if outcome(run) == before else DIFFERENT


def main() -> int:
    """Repeat runs and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=4, help="runs drawn from each study of the folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("command", nargs="+", help="h2h command that trained the study, without --out")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        stores = [
            restore(source, out if name == "study" else out / name)
            for name, source in studies(given.folder).items()
        ]
        recorded = {}
        for store in stores:
            judged = [
                entry["run"] for entry in read_document(store.path / "study.json")["outline"]["entries"]
            ]
            finished = [run for run in map(store.run, sorted(set(judged))) if run.finished()]
            for run in draw.sample(finished, min(given.runs, len(finished))):
                recorded[run.path] = outcome(run)
        # Not only from its own study: another one that has the run would pass it on.
        for run_id in {path.name for path in recorded}:
            for store in stores:
                shutil.rmtree(store.run(run_id).path, ignore_errors=True)
        command = [*given.command, "--out", str(out), "--device", "cpu", "--no-keep-weights", "--quiet"]
        code = subprocess.run(
            [sys.executable, "-m", "headtohead", *command], stdout=subprocess.DEVNULL
        ).returncode
        states = {path: state(RunDirectory(path), before) for path, before in recorded.items()}
    for path, word in states.items():
        print(f"{path.relative_to(out)}: {word}")
    count = Counter(states.values())
    repeated = count[EQUAL] + count[DIFFERENT]
    print(json.dumps({"equal": count[EQUAL], "repeated": repeated, "exit_code": code, **provenance()}))
    return int(count[DIFFERENT] > 0 or not repeated)


if __name__ == "__main__":
    sys.exit(main())
