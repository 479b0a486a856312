"""h2h new mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import flag
from headtohead.common.terminal import say


def command(name: Annotated[str, flag("NAME")], *, out: Annotated[Path, flag("DIR")] = Path()) -> None:
    """Write NAME.py, a small working mechanism with options, a window and comments, to start from.

    Args:
        name: name of the mechanism and its file, such as my_mixer
        out: existing directory to write to (default: this one)
    """
    path = api.new_mechanism(name, out)
    arm = path if path.is_absolute() or path.parts[0] == ".." else f"./{path}"
    say(f"{path} written; next:")
    say(f"  h2h check {arm}")
    say(f"  h2h race --arms standard {arm} --tokens 200k --seeds 3")
