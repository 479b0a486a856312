"""Find mechanisms by name or by file."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from headtohead.common.errors import UserError, closest, unknown
from headtohead.common.files import digest_file
from headtohead.common.stop import STOPS
from headtohead.mechanisms.contract.base import Mechanism
from headtohead.mechanisms.contract.options import Options
from headtohead.mechanisms.contract.projected import Stage
from headtohead.mechanisms.contract.score import ARGUMENTS, Score
from headtohead.mechanisms.contract.scored import scored_mechanism
from headtohead.mechanisms.contract.user_code import class_line, error_text, user_frame

Kind = type[Mechanism] | type[Stage]
_importing: list[Path] = []
"""Files of users that are being executed."""


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


OTHER_NAMES = {
    "deltanet": "gated_delta:decay=none",
    "fox": "forgetting",
    "gatedattention": "gated",
    "gateddeltanet": "gated_delta",
    "gla": "gated_linear",
    "kda": "gated_delta:decay=channel",
    "mamba2": "selective_state",
    "mla": "latent",
    "mqa": "standard:kv_heads=1",
    "xsa": "exclusive",
}
"""What papers call a mechanism of this package, in lower case without `-` and `_`."""


def find_mechanism(name: str, rest: str = "") -> Kind:
    """Return the built-in mechanism of that name; `rest`, such as `=30`, follows it in the arm."""
    if name not in builtin_mechanisms():
        close, allowed = did_you_mean(name, rest), ", ".join(builtin_mechanisms())
        raise UserError(f"unknown mechanism '{name}'{close} (allowed: {allowed}, or FILE.py)")
    return builtin_mechanisms()[name]


def did_you_mean(name: str, rest: str = "", others: Iterable[str] = ()) -> str:
    """Return `; did you mean 'flex:softcap=30'?` for the mechanism, variant or name in `others` that is closest, if any."""
    variants = {
        variant: f"{kind.name}:{variant}"
        for kind in builtin_mechanisms().values()
        if issubclass(kind.Options, Options)
        for variant in kind.Options.variants()
    }
    known = variants | {one: one for one in (*builtin_mechanisms(), *others)}
    match = OTHER_NAMES.get(re.sub("[-_]", "", name.lower())) or known.get(closest(name, known), "")
    rest = rest if match in variants.values() else ""
    return f"; did you mean '{match}{rest}'?" if match else ""


def load_mechanism(path: str, name: str = "") -> Kind:
    """Return a user's mechanism from a Python file, by default its only one: a class, or the class of a score function.

    Errors are reported in one line.
    """
    module = _module_of(path)
    name = name or _only_mechanism(module, path)
    if not hasattr(module, name):
        found = {key: value for key, value in vars(module).items() if inspect.isclass(value)}
        scores = {key: value for key, value in vars(module).items() if isinstance(value, Score)}
        kind = "class or score function" if scores else "class"
        raise unknown(f"{kind} in {path}", name, {**found, **scores})
    value = getattr(module, name)
    for other, mechanism in _mechanisms_of(module).items():
        if mechanism is not value and _name_of(mechanism, other) == _name_of(value, name):
            raise UserError(
                f"{path}: {name} and {other} are both named '{_name_of(value, name)}'; give each a name of its own"
            )
    return adopt(value, name, path)


def file_mechanisms(path: str) -> dict[str, Kind]:
    """Return the mechanisms that a user's file defines, by name; raise if it has none."""
    names = _mechanisms_of(_module_of(path)) or [_only_mechanism(_module_of(path), path)]
    return {name: load_mechanism(path, name) for name in names}


def user_value(path: str, name: str) -> Any:
    """Return what a user's file has under a name, or None."""
    return getattr(_module_of(path), name, None)


def _module_of(path: str) -> ModuleType:
    """Return a user's file, imported."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"no such file: {path} (given as a mechanism's file)")
    return _load_module(file.resolve(), digest_file(file, links=True))


def _mechanisms_of(module: ModuleType) -> dict[str, Any]:
    """Return the classes and score functions that a file defines, by name; imported ones are no part of it.

    A base class without `forward` counts only where there is nothing else.
    """
    found = {
        name: value
        for name, value in vars(module).items()
        if (
            inspect.isclass(value)
            and issubclass(value, Mechanism | Stage)
            and value.__module__ == module.__name__
        )
        or (isinstance(value, Score) and value.function.__module__ == module.__name__)
    }
    whole = {
        name: value for name, value in found.items() if isinstance(value, Score) or not _missing_method(value)
    }
    return whole or found


def _name_of(value: Any, name: str) -> str:
    """Return the name that identifies the runs of what a file has as `name`: the class's own, if it is there as itself."""
    own = inspect.isclass(value) and value.__name__ == name and vars(value).get("name")
    return str(own or name)


def _only_mechanism(module: ModuleType, path: str) -> str:
    """Return the name of the one mechanism that a file defines; raise if it has none or several."""
    names = list(_mechanisms_of(module))
    if len(names) == 1:
        return names[0]
    if names:
        raise UserError(
            f"{path} has {len(names)} mechanisms; write {' or '.join(f'{path}:{name}' for name in names)}"
        )
    for name, value in vars(module).items():
        if inspect.isfunction(value) and tuple(inspect.signature(value).parameters)[:4] == ARGUMENTS:
            return name  # `adopt` says what it lacks
    raise UserError(
        f"{path} has no class derived from headtohead.Mechanism and no score function; name a class: {path}:ClassName"
    )


def adopt(value: object, name: str, where: str) -> Kind:
    """Return `value` as a mechanism class named `name`; a plain nn.Module class gets the defaults of the contract."""
    if isinstance(value, Score):
        return scored_mechanism(value, name)
    if inspect.isfunction(value):
        raise UserError(
            f"{where}{class_line(value)}: {name} is a function; race it with @headtohead.score above it"
        )
    module = inspect.isclass(value) and issubclass(value, nn.Module)
    if not module:
        raise UserError(
            f"{where}{class_line(value)}: {name} is not a mechanism; derive the class from headtohead.Mechanism"
        )
    kind = _named_class(value, name)
    _check_class(kind, f"{where}{class_line(value)}: {name}")
    if not vars(kind).get("name"):  # an inherited name belongs to another mechanism
        kind.name = name
    if "recordable" in vars(kind) and "graph_safe" not in vars(kind):  # the name until version 0.2
        setattr(kind, "graph_safe", vars(kind)["recordable"])  # noqa: B010  a property of the class
    return kind


def _check_class(kind: Kind, where: str) -> None:
    """Raise UserError unless a class has its method and a dataclass of options."""
    if missing := _missing_method(kind):
        raise UserError(f"{where} has no {missing.partition('(')[0]}; write def {missing}")
    if not (inspect.isclass(kind.Options) and dataclasses.is_dataclass(kind.Options)):
        raise UserError(
            f"{where} has Options = {kind.Options!r}; Options must be a dataclass derived from headtohead.Options"
        )


def _missing_method(kind: Kind) -> str:
    """Return the signature of the method that every class must define, if this one does not."""
    if issubclass(kind, Stage):
        return "evolve(self, q, k, frame)" if kind.evolve is Stage.evolve else ""
    return "forward(self, x, frame)" if kind.forward is Mechanism.forward else ""


@cache
def _named_class(value: Any, name: str) -> Kind:
    """Return a class of the contract called `name`: `value`, or one derived from it.

    A factory gives all of its classes one name. A run finds its class again by the name that the file has for it.
    """
    bases = (value,) if issubclass(value, Mechanism | Stage) else (value, Mechanism)
    members = {"__module__": value.__module__, "__qualname__": value.__qualname__, "__doc__": value.__doc__}
    kind: Kind = value if bases == (value,) and value.__name__ == name else type(name, bases, members)
    return kind


@cache
def _load_module(file: Path, source: str) -> ModuleType:
    name = f"headtohead_user_{source[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file; a mechanism's file must end in .py")
    if file in _importing:
        raise UserError(
            f"{file} uses its own mechanisms while it is imported, such as in a study; put that below: "
            "if __name__ == '__main__':"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _importing.append(file)
    try:
        spec.loader.exec_module(module)
    except (UserError, *STOPS):  # a wrong declaration, with its file and line, or no error
        raise
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise UserError(f"{error.filename or file}{line}: {error.msg}") from error
    except BaseException as error:
        frame = user_frame(error)
        line = f", line {frame.lineno}:" if frame else ""
        raise UserError(
            f"{frame.filename if frame else file}{line} failed on import: {error_text(error)}"
        ) from error
    finally:
        _importing.remove(file)
    return module
