"""Exit codes of `h2h`."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What an exit code means; `docs/studies.md` has the same table."""

    DONE = 0
    """Everything asked for is done. Runs that failed or diverged are results, which the verdicts name."""
    PROBLEM = 1
    """Something needs attention: runs without a result, a failed check, damage."""
    USAGE = 2
    """The command line, a file or a mechanism is wrong; one line says what."""
    UNFINISHED = 3
    """`race` and `reproduce` were stopped by --time-limit or Ctrl-C with work left; the same command continues."""
    INTERRUPTED = 130
    """Another command was stopped by Ctrl-C."""
