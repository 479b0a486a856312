"""Errors inside user code, in one line with the file and line of the user's own code.

`sys.exit` and other classes than `Exception` in user code are errors like others: they must not end the command without a
message. Only `STOPS` are none.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headtohead.common.errors import UserError, first_line
from headtohead.common.stop import STOPS

_PLACES = (
    Path(__file__).parents[2],
    Path(torch.__file__).parents[1],
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
_OTHERS = tuple(f"{place}/" for place in _PLACES)
"""Folders whose code is not the user's."""


def is_installed(module: str) -> bool:
    """Return whether a module belongs to Python, to this package or to an installed one."""
    top = module.partition(".")[0]
    files = (getattr(sys.modules.get(name), "__file__", None) or "" for name in (module, top))
    return top in sys.stdlib_module_names or any(is_installed_file(file) for file in files)


def is_installed_file(file: str) -> bool:
    """Return whether a source file belongs to Python, to this package or to an installed one."""
    return file.startswith(_OTHERS)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of an error that is in neither this package nor an installed one; None without one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_OTHERS, "<"))]
    return own[-1] if own else None


def user_place() -> str:
    """Return file and line of the user's code that is running now."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((*_OTHERS, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def describe_error(error: BaseException) -> str:
    """Return kind, message and place of an error: `ValueError: no (line 3 of mine.py)`."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = user_frame(error) or (frames[-1] if frames else None)
    where = f" (line {frame.lineno} of {Path(frame.filename).name})" if frame else ""
    return f"{error_text(error)}{where}"


def located(error: BaseException, frame: traceback.FrameSummary) -> str:
    """Return an error in user code with its place: `mine.py, line 3, in forward: ValueError: no`."""
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}: {error_text(error)}"


def error_text(error: BaseException) -> str:
    """Return kind and message of an error."""
    return f"{type(error).__name__}: {first_line(error) if str(error).strip() else 'no message'}"


def class_line(value: object) -> str:
    """Return `, line 3` for a class or function that is defined there, or an empty string."""
    try:
        line = inspect.getsourcelines(value)[1]  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""
    return f", line {line}" if line else ""  # a module begins at line 0


@contextmanager
def user_errors(arm: str = "", kind: type | None = None) -> Iterator[None]:
    """Turn an error raised by user code into a UserError of one line, prefixed with the arm.

    `kind` is a user's class that is being built: an error without a frame of its own, such as that of a constructor with
    other arguments, is reported at the line of the class.
    """
    try:
        yield
    except (UserError, *STOPS):
        raise
    except BaseException as error:
        frame = user_frame(error)
        prefix = f"arm '{arm}': " if arm else ""
        if frame is not None:
            raise UserError(prefix + located(error, frame)) from error
        if kind is None:
            raise
        own = next((one for one in kind.__mro__ if not one.__module__.startswith("headtohead.")), kind)
        place = f"{inspect.getsourcefile(own) or own.__module__}{class_line(own)}"
        raise UserError(
            f"{prefix}{place}: {own.__name__} cannot be built with (shape, options): {error_text(error)}"
        ) from error
