"""What identifies an object passed in Python: its code, constants, and all values that the code reads.

Source text does not: a factory gives all of its classes the same text, and code typed into a notebook has none. Values are
taken apart as `pickle` does it. Code of the user is described by its bytecode, installed packages by their names, so another
version of Python may give another digest.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.common.files import digest
from headtohead.mechanisms.contract.score import Score
from headtohead.mechanisms.contract.user_code import is_installed, is_installed_file

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    CodeType: (
        *(
            "co_code",
            "co_consts",
            "co_names",
            "co_varnames",
            "co_freevars",
            "co_cellvars",
            "co_exceptiontable",
        ),
        *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags"),
    ),
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__dict__"),
    functools.cached_property: ("func",),
    type(functools.cache(len)): ("__wrapped__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
}
"""The parts of values that `pickle` cannot take apart."""
_NOT_BEHAVIOR = {
    *("__module__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__", "__static_attributes__"),
    "_abc_impl",
    "_backward_cls",  # numbered by torch in the order of definition
    *("name", "graph_safe"),  # set by `adopt`
}
"""Members of a class that differ between two imports of a file, or appear when they are read."""


def object_digest(value: type | Score) -> str:
    """Return the digest of a class or score function, equal in every process."""
    reader = _Reader(value.__name__ if isinstance(value, type) else value.name)
    reader.add(value)
    return reader.digest


@dataclass
class _Reader:
    """Describes one object; `name` is for errors."""

    name: str
    words: list[str] = field(default_factory=list)
    seen: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """Number of each object by its id; the object is kept, so that no other gets its id."""

    @property
    def digest(self) -> str:
        """The digest of what has been added."""
        return digest("\n".join(self.words))

    def add(self, value: Any) -> None:
        """Describe a value; one that occurs again is described by its number."""
        if type(value) in _PLAIN:
            self.words.append(repr(value))
        elif type(value) is tuple:  # which tuples are one object depends on the compiler
            self.all("tuple", value)
        elif id(value) in self.seen:
            self.words.append(f"#{self.seen[id(value)][0]}")
        else:
            self.seen[id(value)] = len(self.seen), value
            self.parts(value)

    def all(self, kind: str, values: Iterable[Any]) -> None:
        """Describe several values as one."""
        values = list(values)
        self.words.append(f"{kind} of {len(values)}")
        for value in values:
            self.add(value)

    def parts(self, value: Any) -> None:
        """Describe a value by its parts."""
        kind = type(value)
        if name := _installed_name(value):
            self.words.append(name)
        elif isinstance(value, type):
            members = {key: one for key, one in vars(value).items() if key not in _NOT_BEHAVIOR}
            self.all("class", (kind, value.__bases__, members))
        elif isinstance(value, ModuleType):  # what is read from it is described where it is read
            self.words.append("module")
        elif isinstance(value, Tensor):
            self.all("tensor", (kind, str(value.dtype), tuple(value.shape), value.requires_grad))
            self.words.append(self.content(value))
        elif kind in (dict, MappingProxyType):
            self.all("dict", (part for item in value.items() for part in item))
        elif kind is list:
            self.all("list", value)
        elif kind in (set, frozenset):
            self.all("set", sorted(_Reader(self.name, seen=dict(self.seen)).alone(one) for one in value))
        elif kind is FunctionType and hasattr(value, "_torchdynamo_orig_callable"):  # from torch.compile
            self.add(value._torchdynamo_orig_callable)
        elif kind in _ATTRIBUTES:
            self.all(kind.__name__, (getattr(value, name) for name in _ATTRIBUTES[kind]))
            if isinstance(value, FunctionType):
                self.all("variables", _variables(value))
        else:
            self.reduced(value)

    def alone(self, value: Any) -> str:
        """Return the digest of a member of a set."""
        self.add(value)
        return self.digest

    def reduced(self, value: Any) -> None:
        """Describe any other object by what `pickle` would store of it."""
        kind = type(value)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            found = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:
            raise self.error(value) from None
        if isinstance(found, str):
            self.words.append(f"{kind.__module__}.{kind.__qualname__} {found}")
        else:
            items = (list(part) if isinstance(part, Iterator) else part for part in found)
            self.all("object", items)

    def content(self, value: Tensor) -> str:
        """Return the digest of a tensor's bytes."""
        try:
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            return digest(plain.flatten().view(torch.uint8).numpy().tobytes())
        except (RuntimeError, TypeError, ValueError):
            raise self.error(value) from None

    def error(self, value: Any) -> UserError:
        """Return the error for a value that has no parts."""
        return UserError(
            f"{self.name} uses a {type(value).__name__}, which cannot identify a run; "
            "put it into a file and give ./FILE.py:NAME"
        )


def _installed_name(value: Any) -> str:
    """Return the full name of a module, or of a class or function, of an installed package; else nothing."""
    if isinstance(value, ModuleType):
        return value.__name__ if is_installed(value.__name__) else ""
    module, path = (getattr(value, key, None) for key in ("__module__", "__qualname__"))
    if not (isinstance(module, str) and isinstance(path, str) and is_installed(module)):
        return ""
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return f"{module}.{path}" if found is value else ""


def _variables(function: FunctionType) -> Iterator[Any]:
    """Yield name and value of the variables that a function reads: of the functions around it, and global ones.

    Of a module, these are the names that the function reads. What nested functions of installed packages read of their own
    modules belongs to the package.
    """
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from (name, _cell_content(cell))
    if is_installed_file(function.__code__.co_filename):
        return
    read = list(_instructions(function.__code__))
    names = {name for kind, name in read if kind in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = {name for kind, name in read if kind in ("LOAD_ATTR", "LOAD_METHOD")}
    scopes = [(names, function.__globals__)]
    for wanted, scope in scopes:
        for name in sorted(wanted & scope.keys()):
            value = scope[name]
            if name.startswith("__"):  # such as __name__, which an import changes
                continue
            yield from (name, value)
            users = isinstance(value, ModuleType) and not is_installed(value.__name__)
            if users and all(vars(value) is not known for _, known in scopes):
                scopes.append((attributes, vars(value)))


def _cell_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _instructions(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yield operation and argument of the instructions of a function and of those inside it."""
    for instruction in dis.get_instructions(code):
        yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
