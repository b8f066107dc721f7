"""The doctor's report: all findings, and what they rest on, as JSON for programs and as lines for people. Torch-free to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from carrywave.doctor.finding import Finding, merged, well

if TYPE_CHECKING:
    from carrywave.doctor.device_speed import DeviceSpeed
    from carrywave.doctor.links import MeasuredLink
    from carrywave.doctor.worker import Worker

FORMAT = 1
MARKS = {"fine": "ok", "warning": "WARNING", "wrong": "WRONG"}


@dataclass(frozen=True)
class Report:
    """What the doctor found."""

    findings: tuple[Finding, ...]
    workers: tuple[Worker, ...] = ()
    speeds: Mapping[int, DeviceSpeed] = field(default_factory=dict)  # by rank
    links: tuple[MeasuredLink, ...] = ()
    clocks: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by host: seconds ahead of rank 0, and how uncertain that is

    @property
    def code(self) -> int:
        """The exit code: 0 if nothing is wrong."""
        return 0 if well(self.findings) else 1

    def to_json(self) -> dict[str, Any]:
        """The report as a dict that JSON can represent; what is not a number is null."""
        parts = {
            "format": FORMAT,
            "well": self.code == 0,
            "findings": self.findings,
            "workers": self.workers,
            "speeds": [{"rank": rank, **asdict(speed)} for rank, speed in self.speeds.items()],
            "links": self.links,
            "clocks": [{"host": host, "ahead_seconds": each[0], "doubt_seconds": each[1]} for host, each in self.clocks.items()],
        }
        plain: dict[str, Any] = to_jsonable_python(parts, inf_nan_mode="null")
        return plain

    @property
    def rows(self) -> list[Finding]:
        """The findings for people: what several hosts share is reported once."""
        return merged(self.findings)

    @property
    def verdict(self) -> str:
        """One line that sums up."""
        wrong, warnings = (sum(row.level == level for row in self.rows) for level in ("wrong", "warning"))
        beside = f"{warnings} warning{'s' * (warnings != 1)}"
        if wrong:
            return f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong" + (
                f", and there {'is' if warnings == 1 else 'are'} {beside}" * bool(warnings)
            )
        return "all is well" + (f", with {beside}" * bool(warnings))


def lines(report: Report) -> list[str]:
    """The report as plain lines: one for each finding, and the verdict."""
    rows = report.rows
    width = max((len(row.what) for row in rows), default=0)
    shown = [f"{MARKS[row.level]:<8}{row.what:<{width}}  {finding_text(row)}" for row in rows]
    return [*shown, report.verdict]


def finding_text(row: Finding) -> str:
    """Where a finding holds, and its sentence."""
    named = row.fact.startswith(tuple(f"{row.where}{end}" for end in " ;,"))
    return f"{row.where}: {row.sentence}" if row.where and not named else row.sentence
