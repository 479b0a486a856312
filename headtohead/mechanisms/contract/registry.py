"""Find mechanisms by name or by file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import nn

from headtohead.common.errors import UserError, unknown
from headtohead.common.files import digest_file
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.projected import Stage
from headtohead.mechanisms.contract.score import Score
from headtohead.mechanisms.contract.scored import scored_mechanism
from headtohead.mechanisms.contract.user_code import class_line, user_frame

Kind = type[Mechanism] | type[Stage]


@cache
def builtin_mechanisms() -> dict[str, Kind]:
    """Return every mechanism of this package: each file contains the class whose `name` is the file's."""
    package = importlib.import_module("headtohead.mechanisms")
    found: dict[str, Kind] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.ispkg):
        values = vars(importlib.import_module(f"headtohead.mechanisms.{name}")).values()
        kinds = [value for value in values if inspect.isclass(value) and issubclass(value, Mechanism | Stage)]
        found |= {kind.name: kind for kind in kinds if kind.name == name}
    return found


def find_mechanism(name: str) -> Kind:
    """Return the built-in mechanism of that name."""
    if name not in builtin_mechanisms():
        raise unknown("mechanism", name, builtin_mechanisms())
    return builtin_mechanisms()[name]


def load_mechanism(path: str, class_name: str = "") -> Kind:
    """Return a user's mechanism from a Python file, by default its only one: a class, or the class of a score function.

    Errors are reported in one line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"no such file: {path} (given as a mechanism's file)")
    module = _load_module(file.resolve(), digest_file(file, links=True))
    class_name = class_name or _only_mechanism(module, path)
    if not hasattr(module, class_name):
        found = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
        scores = {name: value for name, value in vars(module).items() if isinstance(value, Score)}
        kind = "class or score function" if scores else "class"
        raise unknown(f"{kind} in {path}", class_name, {**found, **scores})
    return adopt(getattr(module, class_name), class_name, path)


def _only_mechanism(module: ModuleType, path: str) -> str:
    """Return the name of the one mechanism that a file defines; raise if it has none or several."""
    names = [
        name
        for name, value in vars(module).items()
        if (
            inspect.isclass(value)
            and issubclass(value, Mechanism | Stage)
            and value.__module__ == module.__name__
        )
        or (isinstance(value, Score) and value.function.__module__ == module.__name__)
    ]
    if len(names) == 1:
        return names[0]
    if names:
        raise UserError(
            f"{path} has {len(names)} mechanisms; write {' or '.join(f'{path}:{name}' for name in names)}"
        )
    raise UserError(
        f"{path} has no class derived from headtohead.Mechanism and no score function; name a class: {path}:ClassName"
    )


def adopt(value: object, name: str, where: str) -> Kind:
    """Return `value` as a mechanism class; a plain nn.Module class gets the defaults of the contract."""
    if isinstance(value, Score):
        return scored_mechanism(value)
    if inspect.isfunction(value):
        raise UserError(
            f"{where}{class_line(value)}: {name} is a function; race it with @headtohead.score above it"
        )
    if not inspect.isclass(value) or not issubclass(value, nn.Module):
        raise UserError(
            f"{where}{class_line(value)}: {name} is not a mechanism; derive the class from headtohead.Mechanism"
        )
    kind: Kind = value if issubclass(value, Mechanism | Stage) else type(name, (value, Mechanism), {})
    if not vars(kind).get("name"):  # an inherited name belongs to another mechanism
        kind.name = name
    if "recordable" in vars(kind) and "graph_safe" not in vars(kind):  # the name until version 0.2
        setattr(kind, "graph_safe", vars(kind)["recordable"])  # noqa: B010  a property of the class
    return kind


@cache
def _load_module(file: Path, source: str) -> ModuleType:
    name = f"headtohead_user_{source[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file; a mechanism's file must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError:  # a wrong declaration, with its file and line
        raise
    except SyntaxError as error:
        raise UserError(f"{file}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        frame = user_frame(error)
        line = f", line {frame.lineno}:" if frame else ""
        raise UserError(
            f"{frame.filename if frame else file}{line} failed on import: {type(error).__name__}: {error}"
        ) from error
    return module
