"""What identifies a user's file: its text, and that of the user's modules that it imports.

Nothing is executed: the file of a stored run may not be trusted.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from headtohead.common.files import digest, open_regular
from headtohead.mechanisms.contract.user_code import is_installed_file


def source_digests(path: str) -> tuple[str, str]:
    """Return the digests of a user's file with its imports: of the bytes, and of the program they contain."""
    file = Path(path).expanduser()
    content = _read(file)
    modules: dict[str, bytes] = {}
    _add_imports(content, "", file.resolve().parent, modules)
    return _joined(digest, content, modules), _joined(program_digest, content, modules)


def program_digest(source: bytes) -> str:
    """Return the digest of a parsed program, docstrings included; empty if it cannot be parsed."""
    program = _parsed(source)
    return digest(ast.dump(program)) if program else ""


def _joined(of: Callable[[bytes], str], content: bytes, modules: dict[str, bytes]) -> str:
    """Return the digest of a file, with its modules if it has any; empty if one of them has none."""
    own = of(content)
    others = {name: of(modules[name]) for name in sorted(modules)}
    if not others:
        return own
    whole = "\n".join([own, *(f"{name} {one}" for name, one in others.items())])
    return digest(whole) if all((own, *others.values())) else ""


def _add_imports(content: bytes, package: str, folder: Path, found: dict[str, bytes]) -> None:
    """Add the text of the user's modules that a program imports, and of those that they import, by name."""
    for name in _imported_names(content, package):
        spec, path = None, None
        for end in (place for place, sign in enumerate(f"{name}.") if sign == "."):
            part = name[:end]
            spec = _spec_of(part, path, folder)
            if spec is None or (spec.origin and is_installed_file(spec.origin)):
                break
            path = spec.submodule_search_locations
            if part not in found and spec.origin and spec.origin.endswith(".py"):
                found[part] = _read(Path(spec.origin))
                _add_imports(found[part], part if path else part.rpartition(".")[0], folder, found)
            if path is None:
                break


def _imported_names(content: bytes, package: str) -> Iterator[str]:
    """Yield the names of the modules that a program may import; `from a import b` may import `a.b`."""
    program = _parsed(content)
    for node in ast.walk(program) if program else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            with suppress(ImportError):  # beyond its package
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{module}.{alias.name}" for alias in node.names)


def _spec_of(name: str, path: list[str] | None, folder: Path) -> ModuleSpec | None:
    """Return where a module is, without an import of its packages; also beside the user's file, which may extend sys.path."""
    if name in sys.stdlib_module_names:
        return None
    for finder in sys.meta_path:
        if spec := finder.find_spec(name, path):
            return spec
    return PathFinder.find_spec(name, [str(folder)]) if path is None else None


def _parsed(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _read(file: Path) -> bytes:
    with open_regular(file, links=True) as stream:
        content: bytes = stream.read()
    return content
