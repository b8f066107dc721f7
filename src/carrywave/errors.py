"""Exception types: user errors, which state the problem and the remedy and become one line and exit code 2, `ResourceError`, which is the
machine's fault and becomes one line and exit code 74, and `ContactLost`; and how a signal ends what has something to clear away.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class UserError(ValueError):
    """A mistake in the user's input. The command line prints it on one line and exits with 2."""

    reported_by: int | None = None  # when every worker raises this error: the rank that reports it


class WrongType(UserError, TypeError):
    """An argument of layers has a type for which torch's own layers raise TypeError."""


class WrongTensor(UserError, RuntimeError):
    """A tensor does not fit layers in a way for which torch's own layers raise RuntimeError."""


class SpecError(UserError):
    """The spec asks for something impossible or unknown."""


class DataError(UserError):
    """A data file, or an object passed as data, does not match the spec."""


class PlanError(UserError):
    """The plan does not fit these layers, lanes or workers."""


class RunError(UserError):
    """A run folder, snapshot or weights file cannot be used."""


class ResourceError(RunError):
    """The machine lacks what the work needs: disk space, file descriptors, memory, a port. Nothing in the input is wrong.

    The command line prints one line and exits with 74 (EX_IOERR): the same command may succeed later.
    """


class Diverged(RunError):
    """The loss or a gradient became NaN or infinite. The step is discarded."""


class WorkerError(UserError):
    """The workers cannot start, complete the rendezvous, or agree on their settings."""


class PortError(ResourceError, WorkerError):
    """A port that was asked for is in use by another program."""


class ContactLost(RuntimeError):
    """Another worker has died or stopped responding. This worker is not at fault, so a launcher may restart them all.

    The command line prints one line and exits with 1.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank  # the peer that was lost, if known


def one_line(error: BaseException, most_characters: int = 600) -> str:
    """What a library says, on one line, for a message of ours. Its remedy often comes last, so little is cut, and only between words."""
    return textwrap.shorten(str(error), most_characters, placeholder=" …").rstrip(".")


def short(value: str | None) -> str:
    """A value shortened for a one-line message."""
    if value is None:
        return "nothing"
    return value if len(value) <= 60 else f"{value[:57]}…"


_DISK = "free disk space"
_LACKS = {  # what helps where the system has run out of something, or fails
    errno.ENOSPC: _DISK,
    errno.EDQUOT: f"{_DISK}, or raise your quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n 1024)",
    errno.ENFILE: "close other programs: the system has no file descriptors left",
    errno.ENOMEM: "free some memory",
    errno.ENOBUFS: "free some memory",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), or end others",
    errno.EIO: "check the disk",
    errno.ESTALE: "check the network file system",
    errno.EROFS: "make the file system writable",
    errno.EADDRINUSE: "use a free port",
}


def from_system(error: OSError, otherwise: type[UserError] = UserError) -> type[UserError]:
    """The class for an error of the operating system: ResourceError if the machine is at fault, else the given one."""
    return ResourceError if error.errno in _LACKS else otherwise


def remedy_for(error: OSError, otherwise: str) -> str:
    """What to do about an error of the operating system."""
    return _LACKS.get(error.errno or 0, otherwise)


def denied(error: PermissionError) -> UserError:
    """What to say where the system lets this user not reach a file or a folder."""
    return UserError(f"{error.filename} cannot be reached: {error.strerror}; give this user the permission, or name another")


class _Words:
    by_command = False  # per process, not per thread: background writer threads must see it too


@contextlib.contextmanager
def by_command() -> Iterator[None]:
    """Within this context, error messages name command-line options; outside it, Python keyword arguments."""
    before, _Words.by_command = _Words.by_command, True
    try:
        yield
    finally:
        _Words.by_command = before


def option(name: str, value: str | int | None = None) -> str:
    """Format an option the way the caller would write it: `--run DIR` on the command line, `run=...` in Python."""
    if _Words.by_command:
        return f"--{name}" if value is None else f"--{name} {value}"
    if name == "resume":
        return "resume=True"
    argument = name.replace("-", "_")
    return f"{argument}=..." if value is None else f"{argument}={value!r}"


class _Ended(KeyboardInterrupt):
    """A signal that ends this process."""


@contextlib.contextmanager
def unwinding(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Let a signal that would end this process at once, as it does a worker that has not begun to train, unwind this context first.

    It is for what leaves files behind and does not wait inside a library for long: no signal is handled there. `unless`: by then it is to
    end at once after all.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if not unless():
            raise _Ended(number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    main = threading.current_thread() is threading.main_thread()  # Python allows handlers in no other
    taken = [number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP) if main and signal.getsignal(number) is signal.SIG_DFL]
    asked: int | None = None
    try:
        for number in taken:
            signal.signal(number, end)
        yield
    except _Ended as ended:
        asked = int(ended.args[0])
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if asked is not None:
            signal.raise_signal(asked)
