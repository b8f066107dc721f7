"""A `Finding` is what one check says: how bad it is, what was looked at, the fact, and the remedy if one is needed. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from carrywave.errors import UserError

Level = Literal["fine", "warning", "wrong"]
LEVELS: tuple[Level, ...] = ("fine", "warning", "wrong")  # a warning costs time or may surprise; what is wrong keeps a run from its work

NAMED = 8  # most ranks or hosts named in a sentence


@dataclass(frozen=True)
class Finding:
    """What one check says, in words."""

    level: Level
    what: str  # what was looked at, in a word or two
    fact: str
    remedy: str = ""
    where: str = ""  # the host or rank it is about; empty: all of them

    @property
    def sentence(self) -> str:
        """Fact and remedy, as in an error message."""
        return f"{self.fact}; {self.remedy}" if self.remedy else self.fact


def of_error(what: str, error: UserError, where: str = "") -> Finding:
    """The finding for a user error, whose message is a fact and a remedy."""
    fact, _, remedy = str(error).partition("; ")
    return Finding("wrong", what, fact, remedy, where)


def well(findings: Iterable[Finding]) -> bool:
    """True if nothing is wrong; warnings do not count."""
    return all(finding.level != "wrong" for finding in findings)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, those that say the same of several hosts as one, in the order in which they first appear."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=several(list(filter(None, dict.fromkeys(where))))) for finding, where in places.items()]


def several(names: Sequence[str]) -> str:
    """A few names as a list in words; the rest are counted."""
    shown = list(names[:NAMED])
    if len(names) > NAMED:
        shown.append(f"{len(names) - NAMED} others")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 3`."""
    return f"rank{'s' * (len(numbers) > 1)} {several([str(number) for number in sorted(numbers)])}"


def size(num_bytes: float) -> str:
    """A number of bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def set_variables(names: Iterable[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of these environment variables that are set and not empty."""
    variables = os.environ if environment is None else environment
    return {name: variables[name] for name in names if variables.get(name)}
