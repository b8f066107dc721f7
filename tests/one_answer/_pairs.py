"""Tables in which every two values of different factors meet at least once: faults need two things to come together, rarely three."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]


def pairs(factors: Mapping[str, Sequence[str]], fits: Callable[[Row], bool]) -> list[Row]:
    """Rows with a value of each factor, always the same ones; the widest first. `fits` also judges rows in the making."""
    names = list(factors)
    places = {name: place for place, name in enumerate(names)}
    open_pairs = {
        (one, a, two, b)
        for one, two in combinations(names, 2)
        for a in factors[one]
        for b in factors[two]
        if _completed({one: a, two: b}, factors, fits) is not None
    }

    def gain(row: Row, name: str, value: str) -> int:
        keys = ((n, v, name, value) if places[n] < places[name] else (name, value, n, v) for n, v in row.items())
        return sum(key in open_pairs for key in keys)

    rows = []
    while open_pairs:
        one, a, two, b = min(open_pairs, key=lambda pair: (places[pair[0]], places[pair[2]], str(pair)))
        row = {one: a, two: b}
        for name in names:
            if name not in row:
                start = len(rows) % len(factors[name])  # of equally good values, another one in each row
                values = [*factors[name][start:], *factors[name][:start]]
                for value in sorted(values, key=lambda value: -gain(row, name, value)):
                    if _completed({**row, name: value}, factors, fits) is not None:
                        row[name] = value
                        break
        rows.append({name: row[name] for name in names})
        open_pairs -= {(one, row[one], two, row[two]) for one, two in combinations(names, 2)}
    return _widest_first(rows)


def _completed(row: Row, factors: Mapping[str, Sequence[str]], fits: Callable[[Row], bool]) -> Row | None:
    """The row with a value of each factor, if there is one that fits."""
    if not fits(row):
        return None
    missing = [name for name in factors if name not in row]
    if not missing:
        return row
    found = (_completed({**row, missing[0]: value}, factors, fits) for value in factors[missing[0]])
    return next((row for row in found if row is not None), None)


def _widest_first(rows: list[Row]) -> list[Row]:
    """The same rows, each the one that adds the most values, and then pairs, to those before it."""
    left, done, seen = list(rows), [], set[tuple[str, ...]]()

    def new(row: Row) -> tuple[int, int]:
        items = [f"{name}={value}" for name, value in row.items()]
        return sum((item,) not in seen for item in items), sum(pair not in seen for pair in combinations(items, 2))

    while left:
        row = max(left, key=new)
        left.remove(row)
        done.append(row)
        items = [f"{name}={value}" for name, value in row.items()]
        seen |= {(item,) for item in items} | set(combinations(items, 2))
    return done
