"""Where a study's directory is, and whether the study that is there is the same one."""

from __future__ import annotations

import re
from pathlib import Path

from headtohead.common.errors import UnreadableFile, UserError
from headtohead.study.config.spec import StudySpec
from headtohead.study.store.manifest import read_manifest

UNNAMED = "study"
_MAX_NAMED = 3


def default_folder(spec: StudySpec) -> Path:
    """Return where a study goes that was given no folder: its name, or its arms and datasets where it has none."""
    if spec.name != UNNAMED:
        return Path("races") / spec.name
    arms = [arm.text for arm in spec.arms]
    more = [f"and-{len(arms) - _MAX_NAMED}-more"] if len(arms) > _MAX_NAMED else []
    words = [*arms[:_MAX_NAMED], *more, "on", *(spec.tasks or spec.corpora)]
    # Paths of users' files and corpora are named by their last part.
    plain = [re.sub(r"[^A-Za-z0-9.=]+", "_", word.rpartition("/")[2]).strip("_") for word in words]
    return Path("races") / "-".join(plain)[:120]


def check_same_study(folder: Path, spec: StudySpec) -> None:
    """Reject a folder that holds another study: its definition, verdicts and page would be replaced.

    The same name, datasets, sizes and rules make a study the same; arms, seeds and settings may change, and the history says so.
    """
    try:
        manifest, _ = read_manifest(folder / "study.json")
    except UnreadableFile:  # there is none yet, or the study's own command writes it anew
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
                f"{folder} holds another study ({what}: {_words(known)}; given: {_words(here[what])}); "
                "name another folder as --out, or continue that study with --extend"
            )


def _words(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
