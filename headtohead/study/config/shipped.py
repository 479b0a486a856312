"""The studies that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from headtohead.common.errors import UserError, unknown

_FOLDER = Path(__file__).parents[2] / "studies"
QUICK = "quick"
"""The study that runs in minutes on any machine, without data."""


def shipped_studies() -> dict[str, Path]:
    """Return the file of every shipped study by name, sorted."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def find_study(name: str | Path) -> Path:
    """Return a study file: a path, or the name of a shipped study."""
    path, shipped = Path(name), shipped_studies()
    if path.suffix == ".toml" or len(path.parts) != 1 or path.is_file():
        if path.stem in shipped and not path.exists():
            raise UserError(f"no such study file: {path}; the shipped study is named {path.stem}")
        return path
    if path.name not in shipped:
        raise unknown("study", path.name, [*shipped, "FILE.toml"])
    return shipped[path.name]
