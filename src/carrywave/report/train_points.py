"""Points of the curves of training, each over about as many steps. A run logs a row whenever it evaluates, too: at the end of an epoch that
may be a row over two steps, whose mean says little and would stand out among rows over fifty.
"""

from __future__ import annotations

from collections.abc import Sequence

from carrywave.report.record import Row, is_number


def train_points(rows: Sequence[Row], name: str, weight: str) -> list[tuple[float, float]]:
    """The means of a value over neighbouring rows, weighted by `weight`, at the last step of each; what is not finite is left out."""
    points = []
    for group in groups(rows):
        pairs = [(row[name], _weight(row, weight)) for row in group if is_number(row.get(name))]
        total = sum(many for _, many in pairs)
        if total > 0 and is_number(step := group[-1].get("step")):
            points.append((float(step), sum(value * many for value, many in pairs) / total))
    return points


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Neighbouring rows that are drawn as one point: as many as make up the usual number of steps."""
    usual = _usual(rows)
    rows_by_point: list[list[Row]] = []
    pending: list[Row] = []
    for row in rows:
        pending.append(row)
        if _steps(pending) >= usual:
            rows_by_point.append(pending)
            pending = []
    if pending and rows_by_point and _steps(pending) < usual / 2:
        rows_by_point[-1] += pending
    elif pending:
        rows_by_point.append(pending)
    return rows_by_point


def _usual(rows: Sequence[Row]) -> float:
    """The steps of a row, as they are for most steps: half of all steps are in rows of at least this many."""
    sizes = sorted((_weight(row, "steps") for row in rows), reverse=True)
    half, seen = sum(sizes) / 2, 0.0
    for size in sizes:
        seen += size
        if seen >= half:
            return size
    return 1.0


def _steps(rows: Sequence[Row]) -> float:
    return sum(_weight(row, "steps") for row in rows)


def _weight(row: Row, name: str) -> float:
    value = row.get(name)
    return float(value) if is_number(value) and value > 0 else 1.0
