"""What a tracker is: somebody else's record of a run, such as MLflow's, to which rows of metrics.jsonl are copied."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from carrywave import __version__
from carrywave.spec.spec import Spec

Row = Mapping[str, Any]
How = Literal["finished", "stopped", "failed"]
PLACE = ("split", "step")  # of a row; the rest are its values


class NotFound(Exception):
    """The tracker does not know the record that a run was continued with."""


@dataclass(frozen=True)
class Description:
    """What a tracker learns of a run when its record begins."""

    folder: Path
    settings: Mapping[str, str]  # the resolved spec, by full names
    version: str = __version__

    @staticmethod
    def of(folder: Path, spec: Spec) -> Description:
        """Describe a run with its spec."""
        flat: dict[str, str] = {}
        for section, value in spec.model_dump(mode="json").items():
            pairs = {f"{section}.{key}": setting for key, setting in value.items()} if isinstance(value, dict) else {section: value}
            flat |= {name: setting if isinstance(setting, str) else json.dumps(setting) for name, setting in pairs.items()}
        return Description(folder, flat)


class Tracker(Protocol):
    """A record of one run, elsewhere. All of it is called from one thread, and any exception ends the record, not the run."""

    def open(self, record_id: str | None) -> str:
        """Begin a record, or continue the one with this id; returns its id. Raises NotFound if there is none with that id."""

    def send(self, rows: Sequence[Row]) -> None:
        """Add rows of metrics.jsonl."""

    def close(self, how: How) -> None:
        """Complete the record: the run has ended."""


def values_of(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row, by names such as `valid/loss`."""
    for name, value in row.items():
        if name not in PLACE and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{row['split']}/{name}", float(value)
