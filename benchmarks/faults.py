"""Claim: whichever worker dies, whenever, the run recovers by itself and ends with the same result as an undisturbed run.

Trains a small language model (streams with carry, dropout, Adam, a snapshot every 8 steps) with real `carrywave train --devices N`
commands. Workers are killed at random moments: at random steps, while a snapshot is being written, and while they restart. `equal` tells
whether the best weights, metrics.jsonl and the last snapshot (parameters, optimizer, carry) are byte for byte those of an undisturbed run.
`once` tells whether, according to a ledger, every step of the data was trained on exactly once per epoch; of steps repeated after a
restart only the last counts. `noticed_s` and `again_s` are the median and maximum time from the fault to the launcher's report, and to the
next completed step. Stopped workers (SIGSTOP) are a separate scenario.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.command import main
from benchmarks.harness.workers import printed
from carrywave.errors import RunError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from _disturbed_run import KILLS, MOMENTS, REPLICAS, STAGES, RunSetup, calm, contents, disturbed, each_once, write_data


def run(*, quick: bool = False) -> list[dict[str, Any]]:
    """One row per scenario. Quick: three kills with two replicas."""
    if quick:
        return printed([_row(replace(REPLICAS, steps=60), 3, signal.SIGKILL)])
    killed = [_row(setup, kills, signal.SIGKILL) for setup, kills in KILLS.items()]
    return printed([*killed, _row(REPLICAS, 2, signal.SIGSTOP)])


def _row(setup: RunSetup, faults: int, number: signal.Signals) -> dict[str, Any]:
    """Run with and without faults, and compare."""
    stages = 2 if setup is STAGES else 1
    with tempfile.TemporaryDirectory(prefix="carrywave-bench-") as name:
        folder = Path(name)
        write_data(folder)
        moments = MOMENTS if number is signal.SIGKILL else ("step",)
        undisturbed = calm(folder, setup)
        outcome = disturbed(folder, setup, faults, seed=faults + setup.devices, number=number, moments=moments)
        for each in (undisturbed, outcome):
            if each.code:
                raise RunError(f"a run of {setup.name} exited with code {each.code}: {' / '.join(each.lines[-2:])}; fix that first")
        equal = contents(folder / "disturbed") == contents(folder / "calm")
        once = each_once(folder / "disturbed-ledger", stages) and each_once(folder / "calm-ledger", stages)
    return {
        "scenario": f"{setup.name}, {number.name}",
        "workers": setup.devices,
        "faults": len(outcome.faults),
        "in_saves": sum(fault.in_a_save for fault in outcome.faults),
        "restarts": outcome.restarts,
        "noticed_s": _spread([fault.noticed_seconds for fault in outcome.faults]),
        "again_s": _spread([fault.again_seconds for fault in outcome.faults]),
        "equal": "yes" if equal else "no",
        "once": "yes" if once else "no",
    }


def _spread(seconds: list[float | None]) -> str:
    timed = [each for each in seconds if each is not None]
    return f"{statistics.median(timed):.2f} (most {max(timed):.2f})" if timed else "-"


if __name__ == "__main__":
    main("benchmarks.faults")
