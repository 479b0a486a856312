"""User code of stored runs: which file it came from, whether that file has changed since, and which runs differ only in its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.files import canonical_json, digest
from headtohead.mechanisms.contract.identity.source_digests import source_digests
from headtohead.study.store.run_spec import RunSpec

FILE = re.compile(r"([^\s*+()=]+\.py):[A-Za-z_]\w*")


def user_files(spec: RunSpec) -> list[str]:
    """Return the mechanism files that a run names."""
    return list(dict.fromkeys(path for text in spec.layers for path in FILE.findall(text)))


def sources_of(spec: RunSpec) -> set[str]:
    """Return the digests of the user code in a run."""
    return {term["source"] for layer in spec.mechanisms for term in layer if term.get("source")}


def code_digests(spec: RunSpec) -> set[str]:
    """Return two digests of all user code in a run, of its text and of its program; none without user code."""
    sources, programs = sorted(sources_of(spec)), dict(spec.programs)
    if not sources:
        return set()
    return {digest(canonical_json([programs.get(one, one) for one in sources]))[:16]} | {
        digest(canonical_json(sources))[:16]
    }


def source_changes(spec: RunSpec) -> str:
    """Return what has happened to the mechanism files of a run since: `older source`, `source is gone`, or nothing.

    A change of comments or formatting is none.
    """
    files = user_files(spec)
    now = [_digests(path) for path in files]
    if None in now:
        return "source is gone"
    known = {digest for pair in now if pair for digest in pair}
    programs = dict(spec.programs)
    older = [one for one in sources_of(spec) if one not in known and programs.get(one) not in known]
    return "older source" if files and older else ""


@cache
def _digests(path: str) -> tuple[str, str] | None:
    try:
        return source_digests(path)
    except (UserError, OSError):
        return None


def program_key(spec: RunSpec, parents: Mapping[str, str]) -> str:
    """Return what identifies a run if its user code is known by its program instead of its text.

    `parents` replaces the ids of trunks. Runs whose program is unknown have the key of their text.
    """
    programs = dict(spec.programs)

    def by_program(term: dict[str, Any]) -> dict[str, Any]:
        return term | {"source": programs.get(term["source"], term["source"])} if "source" in term else term

    identity = spec.identity
    layers = [[by_program(term) for term in layer] for layer in identity["layers"]]
    parent = identity.get("parent")
    moved = {"parent": parent | {"run": parents.get(parent["run"], parent["run"])}} if parent else {}
    return canonical_json(identity | {"layers": layers} | moved)
