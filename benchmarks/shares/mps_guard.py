"""Runs an MPS daemon for as long as the process that asked for it lives. A program of its own, with nothing but the standard library.

Its standard input is a pipe that only that process holds and never writes to before its end: a line means that the shares are no longer
needed, end-of-file without one that the process is gone, however that happened. Workers may then still be writing a snapshot, so they are
given longer. The daemon, its server and their folder go in either case.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

STOP_SECONDS = 5.0  # for clients to end, once the shares are no longer needed
ORPHAN_SECONDS = 60.0  # for workers to finish their step and write a snapshot, after their launcher has died
ANSWER_SECONDS = 5.0  # for the daemon to answer, and to end after its last client
POLL_SECONDS = 0.05


def main(tool: str, folder: str) -> int:
    """Run the daemon until it is no longer needed; returns its exit code if it ended before that, else 0."""
    # A cluster may send its signals to every process: this one ends with its parent, which is asked to stop too. Not SIG_IGN, which the
    # daemon would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, _leave_alone)
    daemon = subprocess.Popen([tool, "-f"], stdin=subprocess.DEVNULL, process_group=0)
    try:
        while not select.select([0], [], [], POLL_SECONDS)[0]:
            if daemon.poll() is not None:
                return daemon.returncode or 1
        word = os.read(0, 1)
        seconds = STOP_SECONDS if word else ORPHAN_SECONDS
        with suppress(OSError, subprocess.TimeoutExpired):
            quit_ = f"quit -t {seconds:g}\n"
            subprocess.run([tool], input=quit_, text=True, check=False, capture_output=True, timeout=seconds + ANSWER_SECONDS)
            daemon.wait(ANSWER_SECONDS)
        return 0
    finally:
        # The daemon's server is in its process group.
        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _leave_alone(number: int, frame: FrameType | None) -> None:
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
