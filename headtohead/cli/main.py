"""The command `h2h`."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import headtohead
from headtohead.common.errors import UserError, unknown
from headtohead.common.terminal import close_streams, open_streams, say

if TYPE_CHECKING:
    from headtohead.cli.shared.help import Flag

COMMANDS: dict[str, str] = {
    "race": "run a study: train every arm on every seed, judge, report",
    "forecast": "estimate time, FLOPs, disk and detectable differences of a study",
    "reproduce": "run the studies of a paper and decide its claims",
    "report": "judge a study again and rebuild its report",
    "verdict": "judge runs that were trained elsewhere, from a CSV file",
    "watch": "serve a live page about a running study",
    "runs": "list the runs of a study; export and import finished runs",
    "doctor": "check a study directory for damage and repair what is safe",
    "list": "show mechanisms and their options, sizes, corpora, layouts, probes",
    "cost": "show parameters, FLOPs and cache bytes of arms",
    "check": "run the conformance suite on mechanisms",
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
    "bench kernels": "measure the fused kernels and their errors",
    "bench decode": "measure decoding from a K=V cache",
    "bench generate": "time generation from a long prompt next to transformers",
}
"""Command and its line in the overview. `bench train` is `command` in `cli/bench/train.py`, imported when it is used."""

GROUPS = {name.split()[0] for name in COMMANDS if " " in name}

# Spellings until version 0.1; accepted, not shown.
OLD_COMMANDS = {"bench stack": "bench population"}
OLD_FLAGS = {
    "--for": "--time-limit",
    "--from": "--init-from",
    "--stack": "--population",
    "--no-stack": "--no-population",
}


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
    except UserError as error:
        if debug:
            raise
        _say_error(str(error))
        return 2
    except UnicodeEncodeError as error:
        if debug:
            raise
        _say_error(f"{error.object!r} cannot be a file name: {error.reason}")
        return 2
    except KeyboardInterrupt:
        say(f"\nh2h: interrupted; {_kept(words)}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:
        if debug:
            raise
        place = f"{error.filename}: " if error.filename else ""
        _say_error(f"{place}{error.strerror or error}; nothing finished is lost")
        return 2


def _say_error(message: str) -> None:
    """Print an error as one line."""
    say(f"h2h: {' '.join(message.split())}", file=sys.stderr)


def _kept(words: Sequence[str]) -> str:
    """Return what is kept after an interruption."""
    if words[:1] != ["bench"]:
        return "finished runs are kept, and the same command continues"
    if any(word.partition("=")[0] == "--out" for word in words):
        return "rows measured so far are kept, and the same command continues"
    return "nothing is kept; --out FILE keeps every row as soon as it is measured"


def dispatch(words: list[str]) -> int:
    """Run a command and return its exit code."""
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
    import tyro

    from headtohead.cli.shared.help import flags_of, help_page

    command = importlib.import_module(f"headtohead.cli.{name.replace(' ', '.')}").command
    if "-h" in rest or "--help" in rest:
        say(help_page(name, command))
        return 0
    gc.freeze()  # torch's objects stay: collecting them over and over costs a tenth of a long listing
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    arguments = _arguments(rest, flags_of(command))
    return int(tyro.cli(command, prog=f"h2h {name}", args=arguments, config=config) or 0)


def _arguments(words: list[str], flags: Sequence[Flag]) -> list[str]:
    """Return the command line in the form that tyro parses.

    Old spellings become new ones; `--no-compile` becomes `--compile off`; `--lr.qk 30x` becomes `--set lr.qk=30x`;
    `--set a --set b` becomes `--set a b`, and an option that takes one value and is given twice is rejected.
    """
    known = {f"--{one.name}": one for one in flags if not one.positional}
    groups: dict[str, list[str]] = {}
    current = ""
    ratios: list[str] = []
    for word in words:
        name, sign, value = word.partition("=") if word.startswith("--") and len(word) > 2 else ("", "", "")
        name = OLD_FLAGS.get(name, name).replace("_", "-")
        positive = f"--{name.removeprefix('--no-')}"
        if not name:
            groups.setdefault(current, []).append(word)
            continue
        if name.startswith("--lr.") and "--set" in known:
            ratios.append(name)
            name = current = f"--set {name}"
        elif name in known and known[name].switch:
            name, sign, value = name, "=", value or "on"
        elif name not in known and positive in known and known[positive].switch:
            name, sign, value = positive, "=", "off"
        elif name not in known and positive in known and known[positive].default is False:
            continue  # off already
        elif name in known and known[name].default is True and known[name].boolean:
            continue  # on already
        else:
            current = name
        if name in groups and groups[name] and not (name in known and known[name].several):
            raise UserError(f"{name.removeprefix('--set ')} is given twice; it takes one value")
        groups.setdefault(name, []).extend([value] if sign else [])
    for name in ratios:
        value = " ".join(groups.pop(f"--set {name}", []))
        if not value:
            raise UserError(f"{name} takes a ratio such as 30x")
        groups.setdefault("--set", []).append(f"{name.removeprefix('--')}={value}")
    return [part for name, values in groups.items() for part in ([name] if name else []) + values]


def overview(group: str = "") -> str:
    """Return the commands with one line about each."""
    rows = [f"  h2h {name:<17} {line}" for name, line in COMMANDS.items() if name.startswith(group)]
    return "\n".join(
        [
            "headtohead: fair contests between attention mechanisms",
            "",
            *rows,
            "",
            "  h2h COMMAND --help explains a command; --debug shows tracebacks; --version",
            "",
            "Start with: h2h race --arms standard sharing:tie=kv --tokens 500k --seeds 3",
        ]
    )
