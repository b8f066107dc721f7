"""What the doctor says: findings, each with a verdict, the fact and a remedy if one is needed; and the report of all. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from carrywave.errors import UserError

Level = Literal["fine", "warning", "wrong"]  # a warning costs time or may surprise; what is wrong keeps a run from its work
MARKS = {"fine": "ok", "warning": "WARNING", "wrong": "WRONG"}
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
    def text(self) -> str:
        """Where it holds, the fact and the remedy, as in an error message."""
        sentence = f"{self.fact}; {self.remedy}" if self.remedy else self.fact
        named = not self.where or self.fact.startswith(tuple(f"{self.where}{end}" for end in " ;,"))
        return sentence if named else f"{self.where}: {sentence}"


@dataclass(frozen=True)
class Report:
    """All findings, and what was measured."""

    findings: tuple[Finding, ...]
    workers: Sequence[Mapping[str, Any]] = ()  # rank, host, device, versions, settings
    measured: Mapping[str, Any] = field(default_factory=dict)  # speeds, links

    @property
    def code(self) -> int:
        """The exit code: 0 if nothing is wrong."""
        return int(any(finding.level == "wrong" for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """The report as a dict that JSON can represent."""
        found = [asdict(finding) for finding in self.findings]
        return {"format": 2, "well": self.code == 0, "findings": found, "workers": list(self.workers), **self.measured}

    @property
    def rows(self) -> list[Finding]:
        """The findings for people: those that say the same of several hosts are one."""
        places: dict[Finding, list[str]] = {}
        for finding in self.findings:
            places.setdefault(replace(finding, where=""), []).append(finding.where)
        return [replace(finding, where=several(list(filter(None, dict.fromkeys(where))))) for finding, where in places.items()]

    @property
    def verdict(self) -> str:
        """One line that sums up."""
        wrong, warnings = (sum(row.level == level for row in self.rows) for level in ("wrong", "warning"))
        verdict = f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong" if wrong else "all is well"
        return verdict + f", with {warnings} warning{'s' * (warnings > 1)}" * bool(warnings)

    @property
    def lines(self) -> list[str]:
        """The report as plain lines: one for each finding, and the verdict."""
        width = max((len(row.what) for row in self.rows), default=0)
        return [*(f"{MARKS[row.level]:<8}{row.what:<{width}}  {row.text}" for row in self.rows), self.verdict]


def of_error(what: str, error: Exception, where: str = "") -> Finding:
    """The finding for an error; a user error's message is a fact and a remedy."""
    fact, _, remedy = str(error).strip().partition("; ") if isinstance(error, UserError) else (str(error).strip(), "", "")
    return Finding("wrong", what, fact.rpartition("\n")[2], remedy, where)


def several(names: Iterable[str]) -> str:
    """A few names as a list in words; the rest are counted."""
    every = list(names)
    shown = every[:NAMED] + [f"{len(every) - NAMED} others"] * (len(every) > NAMED)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


def size(num_bytes: float) -> str:
    """A number of bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
