"""Turns the outcome of a command into one message and an exit code.

Exit codes: 0 success, 1 internal error, 2 user error (one line), 74 the machine lacks something (one line), 75 stopped on request with a
snapshot written, 130 interrupted, 128 + N stopped by signal N before the first step, with no snapshot to resume from.

With several workers the failure is reported once: by the process that started them; under another launcher, by rank 0 if all failed
together, otherwise by the worker that failed.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, ParamSpec

import typer

from carrywave.cli.options import note
from carrywave.errors import ResourceError, UserError, by_command, denied, from_system, remedy_for
from carrywave.launch import launch_record, worker_logs
from carrywave.launch.exit_reports import FAULT, INTERRUPTED, MISTAKE, RESOURCE, STOPPED, Ended, code_of
from carrywave.launch.signals import REQUESTS, let_go_of_terminal, wanted
from carrywave.parallel.liveness import device_faults, failure_file
from carrywave.parallel.startup.launcher_env import launched

P = ParamSpec("P")


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Exit immediately on Ctrl-C while libraries are imported, and at other stop signals after that: some libraries would swallow an
    exception, or print a traceback.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        _say(INTERRUPTED, "interrupted")
        os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, blocked = signal.signal(signal.SIGINT, leave), signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Terminated(KeyboardInterrupt):
    """A signal that asks to stop arrived before the first step, or during a command that takes none."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextmanager
def _heeding_stops() -> Iterator[None]:
    """Raise `Terminated` at a signal that asks to stop, also for one that came while the program was loaded. Once training has started, the
    loop handles them, and leaves the second one to this.

    In a worker none is handled, because its launcher sent it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second signal: exit at once
        if launch_record.trains():
            signal.raise_signal(number)
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {} if launched() else {number: signal.signal(number, end) for number in wanted(REQUESTS)}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(by: Terminated, command: str, options: Mapping[str, object]) -> tuple[int, str]:
    """The exit code of a command that a signal ended before a first step, and what to say."""
    let_go_of_terminal()
    run = Path(str(options["run"])) if options.get("run") and (options.get("resume") or options.get("or_start")) else None
    # A resumed run still has its snapshot, so this counts as an ordinary stop.
    waiting = launch_record.last_step(launch_record.current_run() or run)
    if waiting is not None:
        return STOPPED, f"stopped by {by} before the first step; the run is unchanged, at step {waiting}"
    return by.code, f"stopped by {by}" + (" before the first step; nothing was trained" if command == "train" else "; nothing was written")


def with_exit_codes(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command so that exceptions become a message on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _heeding_stops(), by_command():
                _check_folder()
                command(*args, **kwargs)
        except UserError as error:
            _say(code_of(error), str(error), error)
            _leave(code_of(error))
        except Terminated as error:
            code, said = _terminated(error, command.__name__, kwargs)
            _say(code, said, error)
            _leave(code)
        except KeyboardInterrupt as error:
            _say(INTERRUPTED, str(error) or "interrupted", error)
            _leave(INTERRUPTED)
        except BrokenPipeError:
            raise  # the reader of our output has closed the pipe: say nothing, the caller handles it
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            for code, explain in ((RESOURCE, _lack), (MISTAKE, _mistake)):
                if (line := explain(error)) is not None:
                    _say(code, line, error)
                    _leave(code)
            _say(FAULT, f"{type(error).__name__}: {error}", error)
            _leave(FAULT)

    return run


def _check_folder() -> None:
    """Refuse to work in a folder that was removed: relative paths mean nothing there, and some libraries abort when they are loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder no longer exists; change to another one (cd)") from None


def _leave(code: int) -> NoReturn:
    """Exit after a failure was reported; at once if other workers write to this one's device memory."""
    device_faults.leave_if_in_use(code)
    raise typer.Exit(code) from None


def end_as(ended: Ended) -> None:
    """Exit with the combined result of the workers this process started, reporting it once."""
    if ended.code - 128 in REQUESTS and not ended.message:
        raise Terminated(ended.code - 128)
    if ended.message:
        note(ended.message + (f"; full logs: {shown(ended.logs)}" if ended.logs is not None and ended.died else ""))
    if ended.code == FAULT and ended.trace and ended.logs is None:
        print(ended.trace, file=sys.stderr, end="", flush=True)
    if ended.code:
        raise typer.Exit(ended.code)


def _lack(error: Exception) -> str | None:
    """Explain what the machine lacks, and the remedy; None if it is something else."""
    if isinstance(error, OSError) and from_system(error) is ResourceError:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}; {remedy_for(error, '')}, then try again"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "no further thread can be started; raise the limit of processes (ulimit -u) or end other programs"
    if isinstance(error, ImportError) and "failed to map segment" in str(error):
        return "not enough memory to load the program; raise the limit (ulimit -v) or free some memory"
    if _is_out_of_memory(error):
        what = str(error).strip().partition(". ")[0].partition("\n")[0]
        remedy = "reduce model.hidden, batch.lanes, batch.steps or batch.tokens"
        return f"not enough memory ({what or type(error).__name__}); {remedy}"
    return None


def _mistake(error: Exception) -> str | None:
    """Explain what a user can correct, and how; None means an internal error."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"the name {str(error.filename)[:60]}… is too long for this system; use a shorter one"
    if isinstance(error, PermissionError) and error.filename is not None:
        return str(denied(error))
    if isinstance(error, UnicodeEncodeError) and "surrogate" in error.reason:  # how Python decodes a file name that is not UTF-8
        return f"{error.object[:200]} is not UTF-8 text; rename the file or folder, or fix the text"
    return None


def _say(code: int, message: str, error: BaseException | None = None) -> None:
    """Report the message exactly once across workers; an internal error comes with its traceback."""
    world = sys.modules.get("carrywave.parallel.world")  # importing it would load torch; if it is not loaded, there are no peers to lose
    contact = sys.modules.get("carrywave.parallel.liveness.lost_contact")
    is_lost = code == FAULT and error is not None and contact is not None and contact.lost(error)
    peer: int | None = None
    if is_lost and contact is not None:
        lost_peer = contact.of(error)
        message, peer = str(lost_peer), lost_peer.rank
    folder = failure_file.folder()
    if folder is not None:
        kind: failure_file.FailureKind = "lost" if is_lost else "fault" if code == FAULT else "user"
        with suppress(OSError):  # a full disk, say: then this worker says it itself
            failure_file.leave(folder, kind, code, message, error, with_trace=code == FAULT, peer=peer)
            return
    kept: Path | None = None
    rank = os.environ.get("RANK", "") if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    if rank.isdecimal() and code == FAULT and error is not None:
        kept = worker_logs.keep_trace(launch_record.current_run(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), rank, error)
    more = "" if kept is None else f"; full log: {shown(kept)}"
    if not rank.isdecimal() or (code == INTERRUPTED and rank == "0"):
        note(message)
    elif code == INTERRUPTED:
        pass  # every rank was interrupted; rank 0 reports it
    elif world is not None and isinstance(error, UserError) and error.reported_by is not None:
        world.report_once(error, int(rank), lambda: note(message))
    elif is_lost and world is not None:
        if world.first_to_report():
            note(f"rank {rank}: {message}{more}")
    else:
        note(f"rank {rank}: {message}{more}")
    if code == FAULT and not is_lost and error is not None and kept is None:
        traceback.print_exception(error)


def shown(path: Path) -> str:
    """The path relative to the current directory, if it lies inside it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _is_out_of_memory(error: Exception) -> bool:
    """Covers Python, CUDA (matched by class name, to avoid importing torch), and torch's CPU allocator, which has no exception class."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
