"""The command `h2h`."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence

import headtohead
from headtohead.cli.shared.exit_codes import ExitCode
from headtohead.common.errors import UserError, unknown
from headtohead.common.terminal import close_streams, open_streams, say
from headtohead.common.text import check_unicode

COMMANDS: dict[str, str] = {
    "race": "run a study: train every arm on every seed, judge, report",
    "forecast": "estimate time, FLOPs, disk and detectable differences of a study",
    "reproduce": "run the studies of a paper and decide its claims",
    "report": "judge a study again and rebuild its report",
    "site": "make a static page of several studies with their reports",
    "verdict": "judge runs that were trained elsewhere, from a CSV file",
    "watch": "serve a live page about a running study",
    "runs": "list the runs of a study; export and import finished runs",
    "doctor": "check a study directory for damage and repair what is safe",
    "settings": "list the settings of a study with type, default and one line each",
    "list": "show mechanisms and their options, sizes, corpora, layouts, probes",
    "cost": "show parameters, FLOPs and cache bytes of arms",
    "check": "run the conformance suite on mechanisms",
    "new mechanism": "write a mechanism's file to start from",
    "data get": "download corpora and tasks",
    "data list": "list corpora and tasks and whether each is available",
    "data prepare": "tokenize a corpus into shards",
    "data stats": "show statistics of corpora: entropy, repetition, coherence",
    "generate": "generate text with a trained run",
    "evaluate": "score a trained run on a corpus or on tasks",
    "look": "write a page that shows what a run attends to in a text",
    "explain": "measure what runs attend to on a task, and whether it explains their answers",
    "bench train": "time the training step next to other libraries",
    "bench growth": "measure how time and memory of a step grow",
    "bench population": "time a population of seeds next to separate runs",
    "bench study": "time a whole study by phase",
    "bench kernels": "measure the fused kernels and their errors",
    "bench decode": "measure decoding from a K=V cache",
    "bench generate": "time generation from a long prompt next to transformers",
}
"""Command and its line in the overview. `bench train` is `command` in `cli/bench/train.py`, imported when it is used."""

GROUPS = {name.split()[0] for name in COMMANDS if " " in name}

# Spellings until version 0.1; accepted, not shown.
OLD_COMMANDS = {"bench stack": "bench population"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. A user error prints one line and exits with code 2; `--debug` shows the traceback.

    A reader that closes the output early, such as `head`, ends the command without a message.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_streams()
    try:
        code = _exit_code(words)
    except BrokenPipeError:
        code = 0
    finally:
        close_streams()
    sys.exit(code)


def _exit_code(words: list[str]) -> int:
    debug = "--debug" in words
    try:
        code = dispatch([word for word in words if word != "--debug"])
        sys.stdout.flush()  # the disk may be full, or the reader gone
        return code
    except KeyboardInterrupt:
        say(f"\nh2h: interrupted; {_kept(words)}", file=sys.stderr)
        return ExitCode.UNFINISHED if words[:1] in (["race"], ["reproduce"]) else ExitCode.INTERRUPTED
    except BrokenPipeError:
        raise
    except SystemExit as error:  # raised by code of a user
        if debug:
            raise
        from headtohead.mechanisms.contract.user_code import describe_error

        say(f"h2h: a mechanism ended the command: {describe_error(error)}", file=sys.stderr)
        return ExitCode.USAGE
    except (UserError, UnicodeEncodeError, OSError) as error:
        if debug:
            raise
        say(f"h2h: {' '.join(_message(error).split())}", file=sys.stderr)
        return ExitCode.USAGE


def _message(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object!r} cannot be a file name: {error.reason}"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}; nothing finished is lost"
    return str(error)


def _kept(words: Sequence[str]) -> str:
    """Return what is kept after an interruption."""
    if words[:2] == ["data", "get"]:
        return "what is downloaded is kept, and the same command continues"
    if words[:1] != ["bench"]:
        return "finished runs are kept, and the same command continues"
    if any(word.partition("=")[0] == "--out" for word in words):
        return "rows measured so far are kept, and the same command continues"
    return "nothing is kept; --out FILE keeps every row as soon as it is measured"


def dispatch(words: list[str]) -> int:
    """Run a command and return its exit code."""
    for word in words:
        check_unicode(word, "an argument")
    if words in (["--version"], ["-V"]):
        say(f"headtohead {headtohead.__version__}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        say(overview())
        return 0
    name, rest = words[0], words[1:]
    if name in GROUPS:
        if not rest or rest[0] in ("-h", "--help"):
            say(overview(name))
            return 0
        name, rest = f"{name} {rest[0]}", rest[1:]
    name = OLD_COMMANDS.get(name, name)
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    from headtohead.cli.shared.arguments import parse_command
    from headtohead.cli.shared.help import help_page

    command = importlib.import_module(f"headtohead.cli.{name.replace(' ', '.')}").command
    if "-h" in rest or "--help" in rest:
        say(help_page(name, command))
        return 0
    gc.freeze()  # torch's objects stay: collecting them over and over costs a tenth of a long listing
    return int(parse_command(name, command, rest)() or 0)


def overview(group: str = "") -> str:
    """Return the commands with one line about each."""
    rows = [f"  h2h {name:<17} {line}" for name, line in COMMANDS.items() if name.startswith(group)]
    head = "headtohead: fair contests between attention mechanisms\n"
    explained = "\n  h2h COMMAND --help explains a command; --debug shows tracebacks; --version\n"
    codes = (
        "Exit codes: 0 done; 1 something needs attention; 2 wrong input; 3 a race stopped with work left\n"
        "            by --time-limit or Ctrl-C, the same command continues; 130 another command interrupted\n"
    )
    start = "Start with: h2h race quick, or h2h race --arms standard sharing:tie=kv --tokens 500k --seeds 3"
    return "\n".join([head, *rows, explained, codes, start])
