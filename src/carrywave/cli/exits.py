"""How a command ends: 0 on success, 2 on a user's mistake (one line), 1 on our own fault, 130 when interrupted, 75 when it was asked to
stop and wrote its snapshot."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec

import typer

from carrywave.errors import UserError

P = ParamSpec("P")

FAULT, MISTAKE, STOPPED, INTERRUPTED = 1, 2, 75, 130


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While libraries are loaded, Ctrl-C ends the program there and then: some of them would swallow it, or show a traceback."""

    def leave(number: int, frame: FrameType | None) -> None:
        _complain("interrupted")
        os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def with_exit_codes(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with what it raises turned into a message on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            _complain(str(error))
            raise typer.Exit(MISTAKE) from None
        except KeyboardInterrupt as error:
            _complain(str(error) or "interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # whoever read our output has left: no message, the caller's business
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                where = f" for {error.filename}" if error.filename else ""
                _complain(f"no room on the disk{where}; free some space, or choose another folder with --run, data.cache or TMPDIR")
                raise typer.Exit(MISTAKE) from None
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                _complain(f"the name {str(error.filename)[:60]}… is too long for this system; use a shorter one")
                raise typer.Exit(MISTAKE) from None
            if _is_out_of_memory(error):
                what = str(error).strip().partition(". ")[0].partition("\n")[0]
                remedy = "make model.hidden, batch.lanes, batch.steps or batch.tokens smaller"
                _complain(f"there is not enough memory ({what or type(error).__name__}); {remedy}")
                raise typer.Exit(MISTAKE) from None
            _complain(f"{type(error).__name__}: {error}")
            traceback.print_exc()
            raise typer.Exit(FAULT) from None

    return run


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own, that of a GPU (torch is not imported to name it), and that of torch on the CPU, which has no class."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def _complain(message: str) -> None:
    print(f"carrywave: {' '.join(message.split())}", file=sys.stderr, flush=True)
