"""The command line, in a worker that harms itself: DIE is JSON, `{"ATTEMPT": [RANK, STEP, "SIGNAL"]}`, before that step of the process."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from carrywave.cli.main import app
from carrywave.launch import launch_record


def harm() -> None:
    plan = json.loads(os.environ.get("DIE", "{}")).get(str(launch_record.attempt()))
    if plan is None or os.environ.get("RANK") != str(plan[0]):
        return
    from carrywave.step.trainer import Trainer

    steps = 0
    update = Trainer.update

    def dying(self: Trainer, *batches: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == plan[1]:
            if plan[2] == "ValueError":
                raise ValueError("oops")
            os.kill(os.getpid(), getattr(signal, plan[2]))
        return update(self, *batches)

    Trainer.update = dying  # type: ignore[method-assign]


harm()
app(prog_name="carrywave")
