"""Real processes that train case after case: `Workers` starts them as torchrun would, by what is in their environment.

`python _workers.py` loads the libraries once and forks into as many workers as a case needs, which stay for the next case of that size:
loading takes seconds in each process. A case comes in as a line of JSON, and a line goes back.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 120  # for a case; a hang is a failure of the case at hand
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "CARRYWAVE_WORKER")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Workers:
    """`train(case)`: the answer of each rank, that of rank 0 with the weights. What is given here is the same for all workers; for
    `transport`, see `_transports.py`.
    """

    def __init__(self, device: str = "cpu", environment: Mapping[str, str] | None = None, transport: str = "") -> None:
        self.device, self.environment, self.transport = device, dict(environment or {}), transport
        self.program: subprocess.Popen[str] | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.program is not None:
            self.program.communicate()  # closes its input, upon which it ends its workers, and itself
            self.folder.cleanup()

    def train(self, case: dict[str, Any], size: int) -> list[Any]:
        from _answers import load

        if self.program is None:
            self.folder = tempfile.TemporaryDirectory(prefix="carrywave-workers-")
            kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
            own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK, "CUBLAS_WORKSPACE_CONFIG": ":4096:2"}
            command = [sys.executable, __file__, self.folder.name, self.device, self.transport]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.program = subprocess.Popen(command, **pipes, text=True, env=kept | own | self.environment)  # type: ignore[call-overload]
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(json.dumps({"size": size, "case": case}) + "\n")
        self.program.stdin.flush()
        told = json.loads(self.program.stdout.readline())
        wrong = [f"worker {rank}: {each}" for rank, each in enumerate(told) if not each.startswith("/")]
        assert not wrong, "\n".join(wrong)
        return [load(path) for path in told]


class Group:
    """The workers of one world, in the process that forks."""

    def __init__(self, size: int, folder: Path, device: str, transport: str) -> None:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            port = any_port.getsockname()[1]
        self.members: list[tuple[int, Any, int]] = []
        for rank in range(size):
            (read, to), (back, write) = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                for _, other_to, other_back in self.members:
                    other_to.close()
                    os.close(other_back)
                os.close(to)
                os.close(back)
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                os.environ |= {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                if transport:
                    import _transports

                    _transports.use(transport, folder / f"meeting-{port}")
                serve(folder / f"{size}-{rank}-{port}", device, read, write)
            os.close(read)
            os.close(write)
            self.members.append((pid, os.fdopen(to, "w", buffering=1), back))

    def train(self, case: dict[str, Any]) -> list[str]:
        """Where the answer of each rank is, or what went wrong there."""
        for _, to, _ in self.members:
            to.write(json.dumps(case) + "\n")
        return [self._reply(back) for _, _, back in self.members]

    def _reply(self, back: int) -> str:
        text = b""
        while not text.endswith(b"\n"):
            if not select.select([back], [], [], SECONDS)[0]:
                return f"no answer within {SECONDS} s"
            if not (part := os.read(back, 1 << 16)):
                return "it has ended"
            text += part
        return str(json.loads(text))

    def end(self) -> None:
        for pid, to, back in self.members:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            to.close()
            os.close(back)


def serve(path: Path, device: str, read: int, write: int) -> None:
    """Train the cases that come in, until there are no more."""
    from _answers import save, train

    with os.fdopen(read) as lines, os.fdopen(write, "w", buffering=1) as replies:
        for text in lines:
            try:
                save(train(json.loads(text), device=device), path)
                reply = str(path)
            except BaseException:
                reply = traceback.format_exc()
            replies.write(json.dumps(reply) + "\n")
    os._exit(0)


def main() -> None:
    import _answers  # loads all that a case needs
    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)  # loads what any optimizer loads when it is first made
    assert _answers
    groups: dict[int, Group] = {}
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no reply
    for line in sys.stdin:
        asked = json.loads(line)
        size = asked["size"]
        if size not in groups:
            groups[size] = Group(size, Path(sys.argv[1]), *sys.argv[2:])
        told = groups[size].train(asked["case"])
        if any(not each.startswith("/") for each in told):
            groups.pop(size).end()
        replies.write(json.dumps(told) + "\n")
    for group in groups.values():
        group.end()


if __name__ == "__main__":
    main()
