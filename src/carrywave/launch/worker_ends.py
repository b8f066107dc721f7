"""What remains to be done when the workers of an attempt have ended: their logs go to the run, and a stop on request is told as one."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from carrywave.launch import launch_record
from carrywave.launch.exit_reports import STOPPED, Ended
from carrywave.launch.supervisor import AttemptOutcome, Signals


def with_logs(outcome: AttemptOutcome, signals: Signals, host: str = "") -> Ended:
    """How an attempt ended, after copying its logs into the run's folder."""
    ended, run = outcome.ended, outcome.run
    logs = outcome.outputs.publish(run, host)
    if logs is None and ended.died and ended.rank is not None and not ended.trace and not ended.lost:
        outcome.outputs.show_errors(ended.rank)
    outcome.outputs.close()
    ended = replace(ended, logs=logs)
    return ended if signals.asked is None else asked_to_stop(ended, run)


def asked_to_stop(ended: Ended, run: Path | None) -> Ended:
    """Treat a stop before the attempt's first step as an orderly one if there is a snapshot to resume from."""
    at_once = ended.code in {128 + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)} and not ended.message
    return Ended(STOPPED) if at_once and launch_record.last_step(run) is not None else ended
