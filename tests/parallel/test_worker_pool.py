"""A pool of workers leaves nothing behind when the process that started it is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STARTED = "from carrywave.parallel import worker_pool; worker_pool.start('nothing.of.this.name', {}, 1)"


def test_a_process_that_is_asked_to_stop_removes_the_folder_of_its_pool(tmp_path: Path) -> None:
    started = subprocess.Popen([sys.executable, "-c", STARTED], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        while not list(tmp_path.glob("carrywave-crew-*/0.log")):  # it takes seconds until a worker knows that there is no such module
            assert started.poll() is None
            time.sleep(0.01)
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=60) == -signal.SIGTERM
    finally:
        started.kill()
    assert list(tmp_path.glob("carrywave-*")) == []
