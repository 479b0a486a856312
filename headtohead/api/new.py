"""Write a new mechanism's file from the template."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from headtohead.common.errors import UserError
from headtohead.mechanisms.contract.registry import builtin_mechanisms

TEMPLATE = Path(__file__).parent / "mechanism.template"
_SEPARATES = re.compile(r"[\s*+()=:]")
"""Characters that end a path in an arm."""


def new_mechanism(name: str, out: str | Path = ".") -> Path:
    """Write `out`/NAME.py, a small working mechanism with comments, and return its path; an existing file is kept."""
    _check_name(name)
    folder = Path(out).expanduser()
    if found := _SEPARATES.search(str(folder)):
        raise UserError(
            f"'{folder}' contains '{found[0]}', so no arm can name a file in it; give another --out"
        )
    if not folder.is_dir():
        raise UserError(f"no such directory: {folder} (given as --out)")
    path = folder / f"{name}.py"
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    text = TEMPLATE.read_text(encoding="utf-8").replace("CLASS", title).replace("NAME", name)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists and is not overwritten; give another name or --out") from None
    return path


def _check_name(name: str) -> None:
    """Raise unless a file and a class can have this name, and no mechanism or loaded module has it."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"'{name}' cannot name a mechanism; give a Python name such as my_mixer")
    if name in builtin_mechanisms():
        raise UserError(f"'{name}' is a built-in mechanism; give another name")
    if name in sys.stdlib_module_names or name in sys.modules:
        raise UserError(f"'{name}' is a Python module that {name}.py would hide; give another name")
