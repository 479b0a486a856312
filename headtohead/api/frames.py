"""Tables of a study as pandas data frames; pandas is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headtohead.common.errors import UserError
from headtohead.evaluation.logged_row import LoggedRow

_NUMBERS = ("step", "tokens", "nats", "lr", "grad_norm", "grad_norm_max", "seconds")


def data_frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> Any:
    """Return rows as a pandas data frame; the columns are those of the first rows that have them unless given."""
    try:
        import pandas
    except ImportError:
        raise UserError("data frames need pandas: pip install pandas") from None
    return pandas.DataFrame(rows, columns=None if columns is None else list(columns))


def curve_row(row: LoggedRow) -> dict[str, Any]:
    """Return the numbers of a logged row, those of an evaluation as `valid_` and `test_` columns."""
    found: dict[str, Any] = {name: getattr(row, name) for name in _NUMBERS}
    for split in ("valid", "test"):
        found |= {f"{split}_{name}": value for name, value in (getattr(row, split) or {}).items()}
    return found
