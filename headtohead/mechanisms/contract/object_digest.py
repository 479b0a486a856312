"""What identifies a class or function passed in Python: its source, and the values it takes from the function around it.

Two objects from one factory have the same source: `make(30.0)` and `make(0.001)` differ by the value of its argument.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from headtohead.common.errors import UserError
from headtohead.common.files import digest
from headtohead.mechanisms.contract.score import Score

_LOCAL = "<locals>"
_PLAIN = (bool, int, float, str, bytes, type(None))


def object_digest(value: type | Score) -> str:
    """Return the digest of a class or score function, equal in every process."""
    name = value.__name__ if isinstance(value, type) else value.name
    return digest("\n".join(_Reader(name).parts(value)))


@dataclass
class _Reader:
    """Reads one object; `name` is for errors."""

    name: str
    seen: list[Any] = field(default_factory=list)

    def parts(self, value: Any) -> Iterator[str]:
        """Yield texts that describe a value, without its address or the name of its module."""
        if isinstance(value, _PLAIN):
            yield repr(value)
            return
        if any(value is other for other in self.seen):
            return
        self.seen.append(value)
        if isinstance(value, Score):
            yield from self.parts(value.function)
            yield repr((value.normalize, value.learned))  # a factory may compute them
        elif isinstance(value, type):
            yield from self.of_class(value)
        elif isinstance(value, FunctionType):
            yield _source(value)
            yield from self.variables(value)
        elif isinstance(value, nn.Module):
            yield from self.of_module(value)
        elif isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, Mapping):
            yield from self.all(value.items())
        elif isinstance(value, list | tuple):
            yield from self.all(value)
        elif not isinstance(value, Tensor) and hasattr(value, "__dict__"):
            yield from self.all((type(value), vars(value)))
        else:
            yield self.stored(value)

    def all(self, values: Iterable[Any]) -> Iterator[str]:
        """Yield the parts of several values, and where they end."""
        for value in values:
            yield from self.parts(value)
        yield "."

    def of_class(self, kind: type) -> Iterator[str]:
        """Yield its source, the variables of its methods, and the numbers of a class made by a function."""
        yield _source(kind)
        for base in kind.__mro__[1:]:
            if _LOCAL in base.__qualname__:
                yield from self.parts(base)
        for key, member in vars(kind).items():
            for function in _functions(member):
                yield from self.variables(function)
            plain = isinstance(member, _PLAIN) and key != "name" and not key.startswith("__")
            if _LOCAL in kind.__qualname__ and plain:
                yield f"{key}={member!r}"

    def of_module(self, module: nn.Module) -> Iterator[str]:
        """Yield structure, sources and numbers; the weights are drawn again."""
        yield repr(module)
        for part in module.modules():
            yield from self.parts(type(part))
            yield repr({key: value for key, value in vars(part).items() if isinstance(value, _PLAIN)})

    def variables(self, function: FunctionType) -> Iterator[str]:
        """Yield what a function takes from the functions around it."""
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if variable == "__class__":
                continue
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield f"{variable}:"
            yield from self.parts(content)

    def stored(self, value: Any) -> str:
        """Return a value that has no parts, such as a tensor, as it is stored."""
        try:
            return pickle.dumps(value).hex()
        except Exception:
            raise UserError(
                f"{self.name} uses a {type(value).__name__} of the function around it, which cannot identify a run; "
                "put it into a file and give ./FILE.py:NAME"
            ) from None


def _functions(member: Any) -> list[FunctionType]:
    """Return the functions of a member of a class."""
    found = [getattr(member, key, None) for key in ("__func__", "fget", "fset")]
    return [one for one in (member, *found) if isinstance(one, FunctionType)]


def _source(value: type | Callable[..., Any]) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        code = getattr(value, "__code__", None)
        return repr((code.co_code, code.co_names)) if code else repr(value)
