"""Stands in for `nvidia-cuda-mps-control`, with real processes: `-f` runs a daemon with a server, anything else talks to it.

FAKE_MPS makes it misbehave: `refuses` (ends at once with a line), `mute` (runs and never answers), `deaf` (answers, but does not quit).
Every daemon and server notes its process id in FAKE_MPS_PIDS.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAME = "nvidia-cuda-mps-control"
NOTED = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


def install(folder: Path) -> None:
    """Put it, and an nvidia-smi that shows three GPUs, into a folder for PATH."""
    folder.mkdir()
    tool = folder / NAME
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{__file__}" "$@"\n')
    tool.chmod(0o755)
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncase $1 in *uuid*) printf 'GPU-a\\nGPU-b\\nGPU-c\\n';; *) printf 'Fake\\nFake\\nFake\\n';; esac\n")
    smi.chmod(0o755)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):  # it may end between the two
        return False


def daemon() -> None:
    pids = Path(os.environ["FAKE_MPS_PIDS"])
    mode = os.environ.get("FAKE_MPS", "")
    told = {name: os.environ.get(name) for name in NOTED}
    server = subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(600)"])
    (pids / f"{os.getpid()}.json").write_text(json.dumps({"server": server.pid, **told}))
    if mode == "refuses":
        server.kill()
        server.wait()
        print("An instance of this daemon is already running", flush=True)
        sys.exit(1)

    def quits(number: int, frame: object) -> None:
        server.kill()
        server.wait()
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else quits)
    (Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "control").write_text(str(os.getpid()))
    time.sleep(600)


def control() -> None:
    line = sys.stdin.readline().split()
    try:
        pid = int((Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "control").read_text())
    except (OSError, ValueError):
        sys.exit("Cannot find MPS control daemon process")
    if os.environ.get("FAKE_MPS") == "mute":
        time.sleep(600)
    if line[0] == "get_server_list":
        return
    if line[0] != "quit":
        sys.exit(f"unknown command {line}")
    os.kill(pid, signal.SIGTERM)
    while alive(pid):
        time.sleep(0.01)


if __name__ == "__main__":
    daemon() if sys.argv[1:] == ["-f"] else control()
