"""Processes that start warm: one process loads torch and carrywave once, and forks into every program that it is asked for.

Loading takes seconds of processor time in each process, most of what a test with several workers costs. What comes of a fork is a process
like any other, with its own environment, folder, files and signals. How workers are started for real is tested elsewhere: test_launch.py
and test_elastic.py in tests/distributed, test_kills.py in tests/faults.

`python _warm.py SOCKET` is the process that forks. A request is a line of JSON, with the file descriptors of the new process; its number
goes back at once, and how it ended when it has.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from carrywave.launch import launcher, supervisor
from carrywave.launch.exit_reports import Ended

HIGH = 200  # where descriptors are put aside, above those that a process has
LONGEST = 1 << 20  # of a request, in bytes


class Warm:
    """A program in a process forked from one that has loaded what it needs; the part of `subprocess.Popen` that the tests use."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        process_group: int = 0,
    ) -> None:
        assert command[0] == sys.executable
        assert process_group == 0
        self.returncode: int | None = None
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(_address())
        given = {number: _number(number if file is None else file) for number, file in ((1, stdout), (2, stderr))}
        given |= {number: number for number in pass_fds}
        asked = {"argv": command[1:], "env": dict(os.environ if env is None else env), "cwd": str(Path.cwd()), "files": list(given)}
        socket.send_fds(self._line, [json.dumps(asked).encode()], list(given.values()))
        self.pid = int(self._line.recv(64))

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, once it has."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                told = self._line.recv(64)
            except (BlockingIOError, TimeoutError):
                return None
            assert told, "the process that forks has ended"
            self.returncode = int(told)
            self._line.close()
        return self.returncode


def start(command: Sequence[str], devices: int, *, environment: Mapping[str, str] | None = None) -> Ended:
    """`launcher.start`, with workers that start warm where there are pidfds."""
    if sys.platform != "linux":
        return launcher.start(command, devices, environment=environment)
    _address()  # started outside the patch
    with mock.patch.object(supervisor, "Process", Warm):
        return launcher.start(command, devices, environment=environment)


def _number(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


@cache
def _address() -> str:
    """Where the process that forks listens. It ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="carrywave-warm-")
    path = f"{folder.name}/socket"
    program = subprocess.Popen([sys.executable, __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end() -> None:
        program.communicate()  # closes its standard input
        folder.cleanup()

    atexit.register(end)
    assert program.stdout is not None
    assert program.stdout.readline() == b"ready\n"
    return path


def serve(path: str) -> None:
    """Fork into what is asked for, until standard input is closed."""
    _load()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    looking = selectors.DefaultSelector()
    looking.register(sys.stdin, selectors.EVENT_READ)
    looking.register(listener, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in looking.select():
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                line, _ = listener.accept()
                text, files, _, _ = socket.recv_fds(line, LONGEST, 64)
                asked = json.loads(text)
                pid = os.fork()
                if pid == 0:
                    _let_go(looking, listener, line)
                    _become(asked, files)
                for file in files:
                    os.close(file)
                line.send(str(pid).encode())
                looking.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, line))
            else:
                pid, line = key.data
                looking.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with line, suppress(BrokenPipeError):  # who asked may be gone
                    line.send(str(code).encode())


def _load() -> None:
    """Load what programs need, and nothing that starts a thread: a fork has only one."""
    import torch

    import carrywave.train.fit

    assert carrywave.train.fit
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)  # loads what any optimizer loads when it is first made
    os.fsync = os.fstat  # type: ignore[assignment]  # as in conftest.py


def _let_go(looking: selectors.BaseSelector, *lines: socket.socket) -> None:
    """Close in a new process what belongs to the one that forks."""
    for key in [key for key in looking.get_map().values() if key.data is not None]:
        os.close(key.fd)
        key.data[1].close()
    looking.close()
    for line in lines:
        line.close()


def _become(asked: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the program in this process, with its own descriptors, environment and folder, as if Python had been started with it."""
    code = 1
    try:
        os.setpgid(0, 0)
        aside = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in files]
        for file in files:
            os.close(file)
        for number, file in zip(asked["files"], aside, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if file := asked["env"].get("CARRYWAVE_WORKER"):
            told = json.loads(Path(file).read_text()) | {"parent": os.getppid()}  # a worker ends with the process whose child it is
            asked["env"]["CARRYWAVE_WORKER"] = f"{file}-{os.getpid()}"
            Path(asked["env"]["CARRYWAVE_WORKER"]).write_text(json.dumps(told))
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        sys.argv = asked["argv"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
