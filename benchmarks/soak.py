"""Run small CPU studies for a given time, kill the parent or a worker at random moments, restart, and compare the results.

    python benchmarks/soak.py [--minutes 60] [--seed 1] [--seeds 24] [--pause 4] [--keep DIR]

One study runs without interruption. Then the same study is started in a fresh directory, again and again: about every `--pause`
seconds `kill -9` hits a worker in the middle of a run, or (one time in eight) the parent, which is then started again. A round ends
when every run is done. Its result files and verdicts must equal those of the uninterrupted study byte for byte, no result may be
written twice, and `h2h doctor` must find nothing. The last line is one JSON document with the number of kills, the open files and the
memory of the parents over time, and what differed; the exit code is 1 if anything did.

A worker is stopped before it is killed, and continues if it holds no run or one that was already hit in this parent's life: a run
whose worker dies twice is recorded as failed, as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headtohead.cli.shared.exit_codes import ExitCode
from headtohead.common.files import canonical_json
from headtohead.study.environment import provenance
from headtohead.study.store import doctor
from headtohead.study.store.run_store import Store

WORKER = b"headtohead.study.run.worker"
STALLED_SECONDS = 300.0
"""A round without a new result for this long counts as hung."""
PARENT_SHARE = 0.125
SAMPLES = 30
"""Samples of the longest-lived parent in the JSON document."""


@dataclass
class Tally:
    """What happened in all rounds."""

    rounds: int = 0
    parent_kills: int = 0
    worker_kills: int = 0
    starts: int = 0
    exits_with_error: int = 0
    runs: int = 0
    problems: list[str] = field(default_factory=list)
    lives: list[list[tuple[float, int, float]]] = field(default_factory=list)
    """For each parent: seconds since its start, open files, MiB of memory."""


class Parent:
    """One `h2h race` process and the samples taken of it."""

    def __init__(self, study: Path, store: Store, tally: Tally, workers: int) -> None:
        command = [
            "race",
            str(study),
            "--out",
            str(store.path),
            "--device",
            "cpu",
            "--workers",
            str(workers),
            "--quiet",
        ]
        store.path.mkdir(parents=True, exist_ok=True)
        with open(store.path.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headtohead", *command], stdout=log, stderr=log
            )
        self.began = time.monotonic()
        self.samples: list[tuple[float, int, float]] = []
        self.hit: set[str] = set()
        """Runs whose worker was killed in this parent's life."""
        tally.starts += 1
        tally.lives.append(self.samples)

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self.process.poll() is None

    def sample(self) -> None:
        """Record the open files and the memory."""
        folder = Path("/proc") / str(self.process.pid)
        try:
            files = len(os.listdir(folder / "fd"))
            pages = int((folder / "statm").read_text().split()[1])
        except (OSError, IndexError):  # it has just ended
            return
        if not pages:  # ended, not waited for yet
            return
        seconds = round(time.monotonic() - self.began, 1)
        self.samples.append((seconds, files, round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)))

    def workers(self) -> list[int]:
        """Return the process ids of its workers."""
        return [pid for pid in _children(self.process.pid) if WORKER in _command_line(pid)]

    def kill(self) -> None:
        """Kill it with signal 9."""
        self.process.kill()
        self.process.wait()


def _children(parent: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and int(_stat(int(entry))[1]) == parent:
                yield int(entry)
        except (OSError, IndexError):
            continue


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_worker(parent: Parent, store: Store, draw: random.Random) -> bool:
    """Kill a worker in the middle of a run that was not hit before; return whether one was found."""
    workers = parent.workers()
    draw.shuffle(workers)
    for pid in workers:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGSTOP)
            held = [
                run for run in store.runs() if not run.finished() and (own := run.owner()) and own.pid == pid
            ]
            if held and held[0].id not in parent.hit:
                parent.hit.add(held[0].id)
                os.kill(pid, signal.SIGKILL)
                return True
            os.kill(pid, signal.SIGCONT)
    return False


def interrupted_round(
    study: Path, store: Store, tally: Tally, draw: random.Random, given: argparse.Namespace, end: float
) -> None:
    """Finish the study in `store` despite kills until `end`, and check that no result is written twice."""
    written: dict[str, tuple[int, int]] = {}
    progressed = time.monotonic()
    parent = Parent(study, store, tally, given.workers)
    strike = time.monotonic() + draw.expovariate(1 / given.pause)
    at_parent = draw.random() < PARENT_SHARE
    try:
        while True:
            time.sleep(0.25)
            parent.sample()
            for run in store.runs():
                path = run.path / "result.json"
                if path.is_file():
                    found = path.stat()
                    mark = (found.st_ino, found.st_mtime_ns)
                    if run.id not in written:
                        progressed = time.monotonic()
                    if written.setdefault(run.id, mark) != mark:
                        tally.problems.append(f"round {tally.rounds}: run {run.id} was written twice")
                        written[run.id] = mark
            if not parent.alive:
                if parent.process.returncode == ExitCode.DONE:
                    return
                tally.exits_with_error += parent.process.returncode != ExitCode.UNFINISHED
                parent = Parent(study, store, tally, given.workers)
            if time.monotonic() - progressed > STALLED_SECONDS:
                tally.problems.append(f"round {tally.rounds}: no new result for {STALLED_SECONDS:.0f} s")
                return
            if not strike < time.monotonic() < end:
                continue
            if at_parent:
                parent.kill()
                tally.parent_kills += 1
                parent = Parent(study, store, tally, given.workers)
            elif kill_worker(parent, store, draw):
                tally.worker_kills += 1
            else:
                continue  # no worker is in the middle of a run: try again
            strike = time.monotonic() + draw.expovariate(1 / given.pause)
            at_parent = draw.random() < PARENT_SHARE
    finally:
        parent.kill()


def differences(reference: Store, store: Store) -> list[str]:
    """Return what differs between an uninterrupted study and one that was killed."""
    found = []
    expected, got = ({run.id: run for run in place.runs()} for place in (reference, store))
    if expected.keys() != got.keys():
        found.append(
            f"{len(expected)} runs expected, {len(got)} found, {len(expected.keys() & got.keys())} in common"
        )
    for name in expected.keys() & got.keys():
        mine, theirs = (run[name].path / "result.json" for run in (got, expected))
        if not mine.is_file():
            found.append(f"run {name} has no result")
        elif mine.read_bytes() != theirs.read_bytes():
            found.append(f"run {name} has another result")
    if not (store.path / "verdicts.json").is_file():
        found.append("it ended without verdicts.json")
    elif (store.path / "verdicts.json").read_bytes() != (reference.path / "verdicts.json").read_bytes():
        found.append("the verdicts differ")
    return [*found, *(f"doctor: {finding}" for finding in doctor.examine(store.path))]


def main() -> int:
    """Run rounds until the time is over and print the result as one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments and victims")
    parser.add_argument("--seeds", type=int, default=24, help="seeds of the study, which has two arms")
    parser.add_argument("--tokens", type=int, default=40_960, help="tokens of a run")
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between kills")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", help="create the studies in this directory and keep them")
    given = parser.parse_args()
    draw, tally, began = random.Random(given.seed), Tally(), time.monotonic()
    end = began + 60 * given.minutes
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text.txt"
        words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "kings"]
        lines = (" ".join(random.Random(line).choices(words, k=9)) for line in range(4000))
        text.write_text("\n".join(lines), encoding="utf-8")
        settings = {
            "arms": ["standard", "sharing:tie=kv"],
            "corpus": f"file:{text}",
            "size": "nano",
            "tokens": given.tokens,
            "batch": 1024,
            "seeds": given.seeds,
        }
        study = folder / "study.toml"
        study.write_text("".join(f"{key} = {canonical_json(value)}\n" for key, value in settings.items()))
        reference = Store(folder / "uninterrupted")
        whole = Parent(study, reference, Tally(), given.workers)
        if whole.process.wait():
            print(reference.path.with_suffix(".log").read_text(errors="replace")[-2000:])
            return 1
        alone = time.monotonic() - began
        while time.monotonic() < end and not tally.problems:
            tally.rounds += 1
            store = Store(folder / f"round-{tally.rounds}")
            interrupted_round(study, store, tally, draw, given, end)
            tally.problems += [f"round {tally.rounds}: {words}" for words in differences(reference, store)]
            tally.runs += len(store.runs())
            kills = tally.parent_kills + tally.worker_kills
            print(
                f"round {tally.rounds}: {tally.runs} runs, {kills} kills, {len(tally.problems)} problems",
                flush=True,
            )
        print(json.dumps(_document(given, tally, alone, time.monotonic() - began)))
    return 1 if tally.problems else 0


def _document(given: argparse.Namespace, tally: Tally, alone: float, seconds: float) -> dict[str, object]:
    longest = max(tally.lives, key=lambda life: life[-1][0] if life else 0.0, default=[])
    step = max(1, -(-len(longest) // SAMPLES))
    return {
        "benchmark": "soak",
        **provenance(),
        "seed": given.seed,
        "seconds": round(seconds, 1),
        "seconds_uninterrupted": round(alone, 1),
        "rounds": tally.rounds,
        "runs": tally.runs,
        "parent_kills": tally.parent_kills,
        "worker_kills": tally.worker_kills,
        "starts": tally.starts,
        "exits_with_error": tally.exits_with_error,
        "parent": {
            "columns": ["seconds", "open_files", "mib"],
            "longest": longest[::step],
            "most_open_files": max((row[1] for life in tally.lives for row in life), default=0),
            "most_mib": max((row[2] for life in tally.lives for row in life), default=0.0),
        },
        "done_once_and_equal": not tally.problems,
        "problems": tally.problems[:20],
    }


if __name__ == "__main__":
    sys.exit(main())
