"""How a command ends: 0 on success, 2 on a user's mistake (one line), 1 on our own fault, 130 when interrupted, 75 when it was asked to
stop and wrote its snapshot. Of several workers one says what happened: the process that started them, or under another launcher rank 0
where all failed together, and else the one that failed."""

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
from pathlib import Path
from types import FrameType
from typing import ParamSpec

import typer

from carrywave.cli.options import note
from carrywave.errors import UserError, by_command
from carrywave.launch import exit_reports, launch_record, worker_logs
from carrywave.launch.exit_reports import FAULT, INTERRUPTED, MISTAKE, STOPPED, Ended
from carrywave.launch.signals import let_go_of_terminal, wanted
from carrywave.parallel.startup import environment
from carrywave.parallel.startup.launcher_env import launched

P = ParamSpec("P")


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """While libraries are loaded, Ctrl-C ends the program there and then: some of them would swallow it, or show a traceback."""

    def leave(number: int, frame: FrameType | None) -> None:
        _say(INTERRUPTED, "interrupted")
        os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Terminated(KeyboardInterrupt):
    """SIGTERM, SIGUSR1 or SIGHUP before the first step."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Asked to stop before training begins, the program ends as after Ctrl-C: nothing half-made is left, and it is said.

    Not in a worker, whose launcher knows what it asked for, and not once steps are taken: then the loop sees to it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if launch_record.trains():  # a second time: at once
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        raise Terminated(number)

    if launched() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in wanted((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))}
    try:
        yield
    except Terminated as asked:
        let_go_of_terminal()
        # A run that goes on has its snapshot still: that is a stop as any other.
        waiting = launch_record.last_step(launch_record.run_in_hand())
        code, what = (asked.code, "nothing was trained") if waiting is None else (STOPPED, f"the run is where it was, at step {waiting}")
        _say(code, f"stopped by {asked} before the first step; {what}", asked)
        raise typer.Exit(code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_exit_codes(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with what it raises turned into a message on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            environment.check()
            with by_command():
                command(*args, **kwargs)
        except UserError as error:
            _say(MISTAKE, str(error), error)
            raise typer.Exit(MISTAKE) from None
        except KeyboardInterrupt as error:
            _say(INTERRUPTED, str(error) or "interrupted", error)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # whoever read our output has left: no message, the caller's business
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            mistake = _mistake(error)
            if mistake is not None:
                _say(MISTAKE, mistake, error)
                raise typer.Exit(MISTAKE) from None
            _say(FAULT, f"{type(error).__name__}: {error}", error)
            raise typer.Exit(FAULT) from None

    return run


def end_as(ended: Ended) -> None:
    """End as the workers did that this process started, with the one thing there is to say."""
    if ended.message:
        note(ended.message + (f"; full logs: {shown(ended.logs)}" if ended.logs is not None and ended.died else ""))
    if ended.code == FAULT and ended.trace and ended.logs is None:
        print(ended.trace, file=sys.stderr, end="", flush=True)
    if ended.code:
        raise typer.Exit(ended.code)


def _mistake(error: Exception) -> str | None:
    """What the system refused, in words of what can be done about it; None: it is our own fault."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        return f"no room on the disk{where}; free some space, or choose another folder with --run, data.cache or TMPDIR"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"the name {str(error.filename)[:60]}… is too long for this system; use a shorter one"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open at once; allow more of them (ulimit -n 1024), or close other programs"
    if isinstance(error, ImportError) and "failed to map segment" in str(error):
        return "there is not enough memory to load the program; allow more of it (ulimit -v), or free some"
    if isinstance(error, UnicodeEncodeError) and "surrogate" in error.reason:  # so Python holds bytes of a name that are not UTF-8
        return f"{error.object[:200]} is not UTF-8 text; rename the file or folder, or mend the text"
    if _is_out_of_memory(error):
        what = str(error).strip().partition(". ")[0].partition("\n")[0]
        remedy = "make model.hidden, batch.lanes, batch.steps or batch.tokens smaller"
        return f"there is not enough memory ({what or type(error).__name__}); {remedy}"
    return None


def _say(code: int, message: str, error: BaseException | None = None) -> None:
    """The message to where it is said once, with the traceback of a fault of our own."""
    world = sys.modules.get("carrywave.parallel.world")  # not imported here, since it loads torch: without it no contact is to be lost
    contact = sys.modules.get("carrywave.parallel.liveness.lost_contact")
    is_lost = code == FAULT and error is not None and contact is not None and contact.lost(error)
    peer: int | None = None
    if is_lost and contact is not None:
        said = contact.of(error)
        message, peer = str(said), said.rank
    folder = exit_reports.folder()
    if folder is not None:
        kind: exit_reports.Kind = "lost" if is_lost else "fault" if code == FAULT else "user"
        exit_reports.leave(folder, kind, code, message, error, with_trace=code == FAULT, peer=peer)
        return
    kept: Path | None = None
    rank = os.environ.get("RANK", "") if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    if rank.isdecimal() and code == FAULT and error is not None:
        kept = worker_logs.keep_trace(launch_record.run_in_hand(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), rank, error)
    more = "" if kept is None else f"; full log: {shown(kept)}"
    if not rank.isdecimal() or (code == INTERRUPTED and rank == "0"):
        note(message)
    elif code == INTERRUPTED:
        pass  # all were interrupted
    elif world is not None and isinstance(error, UserError) and error.told_by is not None:
        world.tell_once(error, int(rank), lambda: note(message))
    elif is_lost and world is not None:
        if world.first_to_tell():
            note(f"rank {rank}: {message}{more}")
    else:
        note(f"rank {rank}: {message}{more}")
    if code == FAULT and not is_lost and error is not None and kept is None:
        traceback.print_exception(error)


def shown(path: Path) -> str:
    """A path as a person would write it here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own, that of a GPU (torch is not imported to name it), and that of torch on the CPU, which has no class."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
