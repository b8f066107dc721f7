"""The message for a column or field that is not there: the one that was probably meant, or those that there are."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

SHOWN = 8  # at most this many names


def missing_column(where: str, column: str, names: Sequence[str], setting: str | None) -> str:
    """Return the message; `setting` is the key that names the column, None if the training data had it."""
    fact = f"{where} has no column {column!r}" + (f" ({setting})" if setting else ", which the training data has")
    near = difflib.get_close_matches(column, names, n=1, cutoff=0.6) or [name for name in names if name.lower() == column.lower()]
    if near:
        return f"{fact}; did you mean {quoted(near[0])}?" if setting else f"{fact}; if it is {quoted(near[0])}, rename that"
    shown = ", ".join(map(quoted, names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return f"{fact}; use one of {shown}" if setting else f"{fact} (here there are {shown}); add it"


def quoted(column: str) -> str:
    """Return a name as it is, or in quotes if it would not be seen."""
    return column if column.strip() else repr(column)
