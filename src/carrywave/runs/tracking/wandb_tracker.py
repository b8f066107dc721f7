"""Weights & Biases: one of its runs for each run of ours, in the project that WANDB_PROJECT names, or in `carrywave`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

from carrywave.runs.tracking.tracker import Description, How, Row, values_of

PROJECT = "carrywave"
EXIT: dict[How, int] = {"finished": 0, "stopped": 130, "failed": 1}


class WandbTracker:
    """Where to is set by `wandb login`, WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE, as in any program that uses W&B."""

    def __init__(self, described: Description) -> None:
        self.described = described
        self._run: Any = None

    def open(self, record_id: str | None) -> str:
        """Begin a run of W&B with the spec as its configuration, or continue one; its files are in the run's folder."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nobody asked for its crashes to be reported
        import wandb

        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.api.api_key:
            # It would ask for one on the terminal, and wait.
            raise RuntimeError("there is no API key, so run wandb login, or set WANDB_MODE=offline")
        folder = self.described.folder / "tracking"
        folder.mkdir(exist_ok=True)
        identity = record_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=identity,
            resume="allow" if mode == "online" else None,  # offline, the id alone tells `wandb sync` which run it is
            name=self.described.folder.name,
            dir=str(folder),
            config={**self.described.settings, "carrywave": self.described.version},
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        # Steps of ours, not W&B's own count of calls, which cannot go back when a run resumes from a snapshot.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return identity

    def send(self, rows: Sequence[Row]) -> None:
        """Log the numbers of rows, with their steps."""
        for row in rows:
            self._run.log({"step": int(row["step"]), **dict(values_of(row))})

    def close(self, how: How) -> None:
        """Finish the run."""
        self._run.finish(exit_code=EXIT[how])
