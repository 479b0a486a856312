"""The command `h2h`."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Sequence

import headtohead
from headtohead.common.errors import UserError, unknown

# Command: module, function, one line for the overview. Modules are imported when their command is used.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "race": ("race", "race", "run a study: train every arm on every seed, judge, report"),
    "forecast": ("judge", "forecast", "say what a study will take, and what it could find, before it runs"),
    "reproduce": (
        "reproduce",
        "reproduce",
        "run the study of a paper and say of each claim what the data bear",
    ),
    "report": ("race", "report", "judge a study again and rebuild its page"),
    "verdict": ("judge", "verdict", "judge runs trained elsewhere, from a CSV file"),
    "watch": ("race", "watch", "follow a running study on a page of this machine"),
    "runs": ("race", "runs", "list a study's runs; export and import finished ones"),
    "doctor": ("race", "doctor", "look through a study's directory for damage and mend what is safe to mend"),
    "list": ("look", "list_all", "show mechanisms and their options, sizes, corpora, layouts"),
    "cost": ("look", "cost", "show parameters, FLOPs and cache bytes of arms"),
    "check": ("look", "check", "run the conformance suite on mechanisms"),
    "data list": ("use", "data_list", "show the corpora and tasks and whether each is at hand"),
    "data prepare": ("use", "data_prepare", "turn a corpus into token shards now"),
    "data stats": ("use", "data_stats", "show what corpora are like: entropy, repetition, coherence"),
    "bench train": ("bench.train", "train", "time the training step beside those of other libraries"),
    "bench growth": (
        "bench.growth",
        "growth",
        "measure how a step's time and memory grow, beside what is declared",
    ),
    "bench stack": (
        "bench.stack",
        "stack",
        "measure stacked seeds beside a single run and separate processes",
    ),
    "bench kernels": (
        "bench.kernels",
        "kernels",
        "measure the fused kernels beside their twins and the byte floor",
    ),
    "bench decode": (
        "bench.kernels",
        "decode",
        "measure decoding from a K=V cache beside the library's attention",
    ),
    "bench generate": (
        "bench.generate",
        "generate",
        "measure a model writing from a long prompt beside transformers",
    ),
    "generate": ("use", "generate", "let a trained run continue a text"),
    "look": ("attention", "look", "show on a page where a trained run looks in a text"),
    "explain": (
        "attention",
        "explain",
        "measure where trained runs look on a task, and whether that explains them",
    ),
    "evaluate": ("use", "evaluate", "score a trained run on any corpus or on tasks"),
}

GROUPS = {name.split()[0] for name in COMMANDS if " " in name}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a user's mistake is one line and exit code 2 (`--debug` shows where it was raised)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        code = dispatch([word for word in words if word != "--debug"])
    except UserError as error:
        if debug:
            raise
        print(f"h2h: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print(f"\nh2h: interrupted; {_kept(words)}", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    except OSError as error:
        if debug:
            raise
        place = f"{error.filename}: " if error.filename else ""
        print(f"h2h: {place}{error.strerror or error}; nothing finished is lost", file=sys.stderr)
        code = 2
    sys.exit(code)


def _kept(words: Sequence[str]) -> str:
    """Return what an interruption leaves."""
    if words[:1] != ["bench"]:
        return "finished runs are kept, and the same command continues"
    if any(word.partition("=")[0] == "--out" for word in words):
        return "rows measured so far are kept, and the same command continues"
    return "nothing is kept; --out FILE keeps every row as soon as it is measured"


def dispatch(words: list[str]) -> int:
    """Run the command that the words name; return its exit code."""
    if words in (["--version"], ["-V"]):
        print(f"headtohead {headtohead.__version__}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, rest = words[0], words[1:]
    if name in GROUPS:
        if not rest or rest[0] in ("-h", "--help"):
            print(overview(name))
            return 0
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    import tyro

    module, function, _ = COMMANDS[name]
    command = getattr(importlib.import_module(f"headtohead.cli.{module}"), function)
    gc.freeze()  # what torch brought in stays: looking through it again and again costs a tenth of a long listing
    parameters = inspect.signature(command).parameters
    if "set" in parameters:
        rest = _ratios_as_settings(rest)
    several = {
        f"--{one.replace('_', '-')}" for one in parameters if "tuple[" in str(parameters[one].annotation)
    }
    code = tyro.cli(command, prog=f"h2h {name}", args=_joined(rest, several))
    return int(code or 0)


def _ratios_as_settings(words: list[str]) -> list[str]:
    """Return the words with `--lr.qk 30x` written as `--set lr.qk=30x`, at the end: circuits are no flags of their own."""
    rest: list[str] = []
    ratios: list[str] = []
    left = iter(words)
    for word in left:
        if not word.startswith("--lr."):
            rest.append(word)
            continue
        name, sign, value = word.removeprefix("--").partition("=")
        value = value if sign else next(left, "")
        if not value or value.startswith("--"):
            raise UserError(f"--{name} takes a ratio such as 30x")
        ratios.append(f"{name}={value}")
    return [*rest, "--set", *ratios] if ratios else rest


def _joined(words: list[str], several: set[str]) -> list[str]:
    """Return the words with `--set a --set b` written as `--set a b`: no value given is dropped in silence.

    A flag that is none of `several` and already has a value is refused.
    """
    groups: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--") and len(word) > 2 and "=" not in word:
            flag = word
            if flag not in several and groups.get(flag):
                raise UserError(f"{flag} is given twice; it takes one value")
            groups.setdefault(flag, [])
        else:
            groups.setdefault(flag, []).append(word)
    return [part for flag, values in groups.items() for part in ([flag] if flag else []) + values]


def overview(group: str = "") -> str:
    """Return the commands with one line about each."""
    rows = [f"  h2h {name:<15} {line}" for name, (_, _, line) in COMMANDS.items() if name.startswith(group)]
    return "\n".join(
        [
            "headtohead: fair contests between attention mechanisms",
            "",
            *rows,
            "",
            "  h2h COMMAND --help explains a command; --debug shows where an error was raised; --version",
            "",
            "Start with: h2h race --arms standard sharing:tie=kv --tokens 500k --seeds 3",
        ]
    )
