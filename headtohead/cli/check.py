"""h2h check."""

from __future__ import annotations

import sys
from typing import Annotated

from headtohead import api
from headtohead.cli.shared.options import flag
from headtohead.common.errors import UserError
from headtohead.common.progress import progress_bar
from headtohead.common.terminal import is_terminal, say
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.check import LEVELS, Verification, check_composed
from headtohead.model.layout import parse_layout


def command(
    names: Annotated[tuple[str, ...], flag("ARM|FILE.py")] = (),
    *,
    all_: Annotated[bool, flag(name="all")] = False,
    compile: bool = False,
) -> int:
    """Run the conformance suite on mechanisms. Levels: raceable, decodable, accounted.

    The exit code is 1 when a mechanism is not raceable.

    Args:
        names: built-in mechanisms, with options to check one setting only, or files with a mechanism: FILE.py, FILE.py:Class
        all_: check every built-in mechanism; the exit code is 1 when one misses the last level
        compile: also check that torch.compile captures it without graph breaks (slow)
    """
    chosen = list(names) or ([*builtin_mechanisms()] if all_ else [])
    if not chosen:
        raise UserError(
            f"h2h check needs a name, FILE.py, or --all (allowed: {', '.join(builtin_mechanisms())})"
        )
    good = True
    levels = list(LEVELS)
    for name in chosen:
        settings = api.check_settings(parse_layout(name).pattern[0])
        found = _checked(name, settings, compile)
        level = "not raceable" if found.level == "none" else found.level
        plural = "setting" if len(settings) == 1 else "settings"
        say(f"{name}: {level} ({len(settings)} {plural}, {found.seconds:.1f} s)")
        for finding in found.findings:
            say(f"  {finding.check.replace('_', ' ')}: {finding.words}\n    at {finding.setting}")
        if not found.complete:
            missing = "raceable" if found.level == "none" else levels[levels.index(found.level) + 1]
            say(f"  fix these to be {missing}")
        good = good and (found.complete if all_ else found.level != "none")
    return 0 if good else 1


def _checked(name: str, settings: list[Composed], compile: bool) -> Verification:
    with progress_bar(name, quiet=not is_terminal(sys.stderr)) as progress:
        return check_composed(settings, compile, lambda words: progress(f"{name}: {words}", 0.0))
