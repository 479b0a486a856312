"""What a probe is: something measured on a trained run besides its loss, and kept beside its result.

A probe is no part of what a run is: it may be asked for when the run is long done, and is made again where its file is
missing or damaged. What it found stands in the run's directory as probes/NAME.json, sealed with a checksum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headtohead.data.shards import Prepared
from headtohead.data.tokenizers import Tokenizer
from headtohead.model.decoder import Decoder

Found = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A trained run under a probe."""

    model: Decoder
    """In evaluation mode, on the device the study runs on."""
    tokenizer: Tokenizer
    corpus: Prepared
    """The corpus it was trained on."""
    record: dict[str, Any]
    """Its spec.json."""
    data_dir: str = ""
    progress: Callable[[float], None] = lambda share: None

    @property
    def precision(self) -> str:
        """The precision it was trained in."""
        return str(self.record["training"]["precision"])


@dataclass(frozen=True)
class Probe:
    """A named probe: a line about it, how it measures, and what may stand behind its name and a colon."""

    about: str
    measure: Callable[[Subject, str], Found]
    check: Callable[[str], str] | None = None
    """Returns the argument in its one spelling, or raises UserError; None: the probe takes no argument."""
    ready: Callable[[str, str | Path | None], None] | None = None
    """Raises UserError where what the argument names is not at hand; asked, with the data directory, before training."""
