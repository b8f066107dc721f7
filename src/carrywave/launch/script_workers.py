"""Runs `fit(devices=N)` from a user's script: workers run the script again, and this module tracks which call of `fit` they are for.

In the process the user started, a call with several devices starts workers and returns the result that rank 0 reports. In a worker, earlier
calls return immediately with the results they had in that process; the call itself trains, and the worker exits when it ends, so that the
rest of the script runs only once. Calls are counted in the order in which the script makes them, including those with one device.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from carrywave.errors import UserError, WorkerError
from carrywave.launch.exit_reports import FAULT, INTERRUPTED, MISTAKE, STOPPED, Ended, code_of
from carrywave.launch.hosts import take_place
from carrywave.launch.launcher import Patience, start
from carrywave.parallel.liveness import device_faults, failure_file
from carrywave.parallel.startup.launcher_env import FitCall, check_not_of_mpi, is_first, worker_file

VALUED = ("-W", "-X", "--check-hash-based-pycs")  # interpreter options that take the next argument as their value

FAILED = "failed"  # the key of the error's class, in the record of a call that raised one

CallRecord = dict[str, Any]  # a result in a form that JSON can hold

_results: list[CallRecord | None] = []  # of each call begun in this process; None while it is in progress


def begin() -> CallRecord | None:
    """Count a call of `fit`; every call must do this first.

    Returns the call's result if the process that started this one already has it (or raises its error); None: do the work.
    """
    take_place(trains=False)  # a script starts no workers on other hosts, so every task of srun is one
    check_not_of_mpi()
    _results.append(None)
    call, number = worker_file().fit, len(_results) - 1
    if call is None or number >= call.number:
        return None
    record = call.earlier[number]
    _results[number] = record
    if record is not None and FAILED in record:
        Ended(MISTAKE, record["message"], record[FAILED]).check()
    return record


def remember(record: CallRecord) -> None:
    """Record the result of the current call, for the workers of later ones."""
    _results[-1] = record


def relaunch(devices: int, patience: Patience) -> CallRecord:
    """Start workers that run this script again up to the current call, and wait for its result."""
    command = script_command()
    with tempfile.TemporaryDirectory(prefix="carrywave-fit-") as folder:
        result = Path(folder) / "result.json"
        call = FitCall(number=len(_results) - 1, earlier=tuple(_results[:-1]), result=result)
        ended = start(command, devices, patience, fit=call)
        ended.check()
        if ended.code == STOPPED and not result.exists():
            raise WorkerError("the workers were stopped before their first step, and the run is unchanged; call fit with resume=True")
        if not result.exists():
            raise WorkerError(
                "the workers ended before they reached this call of fit; call it unconditionally at the top level of the script"
            )
        remember(json.loads(result.read_text(encoding="utf-8")))
    record = _results[-1]
    assert record is not None
    return record


def is_script_worker() -> bool:
    """True if this process is a worker that runs a script again."""
    return worker_file().fit is not None


@contextmanager
def working() -> Iterator[None]:
    """The body of a call, after `begin`.

    A failure ends a worker here, whatever the script would do about it: the process that started it raises the same error, and the script
    continues there. Workers of later calls are told of the error and raise it in turn.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        where = failure_file.folder()
        if not is_script_worker() or where is None:
            remember({FAILED: type(error).__name__, "message": str(error)})
            raise
        if isinstance(error, UserError):
            code = code_of(error)
            failure_file.leave(where, "user", code, str(error), error)
            _leave(code)
        if isinstance(error, KeyboardInterrupt):
            failure_file.leave(where, "user", INTERRUPTED, str(error) or "interrupted", error)
            _leave(INTERRUPTED)
        from carrywave.parallel.liveness import lost_contact

        if lost_contact.lost(error):
            said = lost_contact.of(error)
            failure_file.leave(where, "lost", FAULT, str(said), error, with_trace=True, peer=said.rank)
        else:
            failure_file.leave(where, "fault", FAULT, f"{type(error).__name__}: {error}", error, with_trace=True)
        _leave(FAULT)


def _leave(code: int) -> NoReturn:
    """Exit after a failure was reported; at once if other workers write to this one's device memory."""
    device_faults.leave_if_in_use(code)
    sys.exit(code)


def finish(record: CallRecord) -> NoReturn:
    """End this worker; rank 0 first writes the result for the process that started it."""
    call = worker_file().fit
    if call is not None and is_first():
        part = call.result.with_suffix(".part")
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(call.result)
    sys.exit(0)


def script_command() -> list[str]:
    """The command that runs this program again: `python script.py …` or `python -m module …`, with the interpreter's own options."""
    words = list(sys.orig_argv[1:])
    options: list[str] = []
    while words and words[0].startswith("-") and words[0] != "-" and not words[0].startswith(("-m", "-c")):
        options.append(words.pop(0))
        if options[-1] in VALUED and words:
            options.append(words.pop(0))
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not words or words[0] == "-" or words[0].startswith("-c") or main is None or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise WorkerError(
            "each worker runs this program again, but it is not in a file (a notebook, a prompt, -c or stdin); "
            "put the code into a file and run it with python, or start it with torchrun"
        )
    if not words[0].startswith("-m"):
        words[0] = os.path.abspath(main)  # the working directory may have changed since
    return [sys.executable, *options, *words]
