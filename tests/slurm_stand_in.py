"""A stand-in for SLURM: `sbatch`, `scontrol` and `squeue` on PATH, and array tasks as processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes

JOB = "4242"
_COMMANDS = {
    "sbatch": """
        if [ -f "$spool/refusal" ]; then cat "$spool/refusal" >&2; exit 1; fi
        [ "$1" = --parsable ] || exit 9
        cp "$2" "$spool/job.sh" && echo "{job};cluster" """,
    "scontrol": '[ "$1" = requeue ] && echo "$2" >> "$spool/requeued"',
    "squeue": 'cat "$spool/queue" 2>/dev/null; exit 0',
}


class Slurm:
    """A cluster of one machine. Commands on PATH record what they are asked for in `spool`; `run` starts the tasks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spool = folder / "spool"
        commands = folder / "bin"
        self.spool.mkdir(parents=True)
        commands.mkdir()
        for name, body in _COMMANDS.items():
            text = f"#!/bin/bash\nspool={self.spool}\n{body.replace('{job}', JOB)}\n"
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
        monkeypatch.setenv("H2H_SHARED_DIR", "1")
        self.tasks: dict[int, subprocess.Popen[bytes]] = {}
        self.restarts: dict[int, int] = {}
        self.codes: list[int] = []
        """Exit codes of all tasks in the order in which they ended."""

    @property
    def requeued(self) -> list[str]:
        """The tasks that were requeued, in order."""
        path = self.spool / "requeued"
        return path.read_text().split() if path.exists() else []

    @property
    def script(self) -> str:
        """The submitted script."""
        return (self.spool / "job.sh").read_text()

    def directive(self, name: str) -> str:
        """Return the value of a directive of the submitted script."""
        (found,) = re.findall(rf"^#SBATCH --{name}=(.*)$", self.script, re.MULTILINE)
        return str(found)

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Start a task of the array, or start it again."""
        log = Path(self.directive("output").replace("%A", JOB).replace("%a", str(index)))
        number = str(int(JOB) + 1 + index)
        environment = os.environ | {"SLURM_ARRAY_JOB_ID": JOB, "SLURM_ARRAY_TASK_ID": str(index)}
        with open(log, "ab") as stream:
            self.tasks[index] = subprocess.Popen(
                ["bash", str(self.spool / "job.sh")],
                env=environment | {"SLURM_JOB_ID": number, "PYTHONUNBUFFERED": "1"},
                cwd=self.directive("chdir"),
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        return self.tasks[index]

    def start_all(self) -> None:
        """Start every task of the array."""
        for index in range(int(self.directive("array").removeprefix("0-")) + 1):
            self.start(index)

    def run(self) -> None:
        """Wait until every task has ended; start those again that are requeued."""
        processes.until(self._all_ended)

    def _all_ended(self) -> bool:
        for index, task in [*self.tasks.items()]:
            if (code := task.poll()) is None:
                continue
            del self.tasks[index]
            self.codes.append(code)
            if self.requeued.count(f"{JOB}_{index}") > self.restarts.get(index, 0):
                self.restarts[index] = self.restarts.get(index, 0) + 1
                self.start(index)
        return not self.tasks

    def race_of(self, index: int) -> int:
        """Return the process of `h2h race` that a task has started, or 0."""
        found = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.tasks[index].pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        rows = [line.split() for line in found.stdout.splitlines()]
        return next((int(row[0]) for row in rows if row[1] == sys.executable), 0)

    def lose_node(self, index: int) -> None:
        """Kill all processes of a task and start it again, as SLURM does with the jobs of a node that has failed."""
        task = self.tasks.pop(index)
        os.killpg(task.pid, signal.SIGKILL)
        task.wait()
        self.start(index)

    def kill_all(self) -> None:
        """Kill what is left of every task."""
        for task in self.tasks.values():
            os.killpg(task.pid, signal.SIGKILL)
            task.wait()
