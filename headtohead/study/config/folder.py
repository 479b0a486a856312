"""The default directory of a study, and the checks that a directory holds the same study or none."""

from __future__ import annotations

import re
from pathlib import Path

from headtohead.common.errors import UnreadableFile, UserError
from headtohead.study.config.spec import StudySpec
from headtohead.study.store.manifest import read_manifest

UNNAMED = "study"
_MAX_NAMED = 3


def given_folder(out: str | Path) -> Path:
    """Return a directory that is given; raise UserError for an empty name, which would be the current directory."""
    if out == "":
        raise UserError("out is empty; give a directory, such as '.' for this one")
    return Path(out)


def default_folder(spec: StudySpec) -> Path:
    """Return the default directory of a study: races/NAME, or its arms and datasets if it has no name."""
    if spec.name != UNNAMED:
        # A name is one directory below races/, whatever it contains.
        return Path("races") / re.sub(r"^\.{1,2}$", "_", spec.name.replace("/", "_"))
    arms = [arm.text for arm in spec.arms]
    more = [f"and-{len(arms) - _MAX_NAMED}-more"] if len(arms) > _MAX_NAMED else []
    parts = [*arms[:_MAX_NAMED], *more, "on", *(spec.tasks or spec.corpora)]
    # User files and corpus paths are shortened to their last component.
    short = [re.sub(r"(file:|^|(?<=[( ]))[^():\s]*/", "", part) for part in parts]
    plain = [re.sub(r"[^A-Za-z0-9.=]+", "_", part).strip("_") for part in short]
    return Path("races") / "-".join(plain)[:120]


def check_same_study(folder: Path, spec: StudySpec) -> None:
    """Raise UserError if `folder` holds another study, whose definition, verdicts and page would be replaced.

    Two studies are the same if name, datasets, sizes and rules are equal. Arms, seeds and settings may differ;
    the history records such changes.
    """
    try:
        manifest, _ = read_manifest(folder / "study.json")
    except UnreadableFile:  # none yet, or damaged: the study's own command writes it again
        return
    contests = manifest.contests()
    there = {
        "name": {manifest.name},
        "datasets": {contest.corpus for contest in contests},
        "sizes": {contest.size for contest in contests},
        "shape rules": {contest.shape for contest in contests},
        "length rules": {contest.length for contest in contests},
    }
    here = {
        "name": {spec.name},
        "datasets": set(spec.tasks or spec.corpora),
        "sizes": set(spec.sizes),
        "shape rules": set(spec.shapes),
        "length rules": set(spec.lengths),
    }
    for what, known in there.items():
        if known != here[what]:
            raise UserError(
                f"{folder} holds another study ({what}: {_listed(known)}; given: {_listed(here[what])}); "
                "choose another folder with --out, or add to that study with --extend"
            )


def check_no_study(folder: Path, what: str) -> None:
    """Raise UserError if `folder` holds a study, whose verdicts and page `what` would replace or mix with its own."""
    if (folder / "study.json").exists():
        raise UserError(f"{folder} holds a study; choose another folder for {what} with --out")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
