"""Writes snapshots in the background, on all workers in parallel, while training continues.

`begin` copies the content of a snapshot into buffers that are reused for the next one, and a thread writes the copy. Every worker's thread
leaves a report beside its files in the run's folder, which all workers share, and that of rank 0 waits for all reports, checks that the
files are there, writes the manifest and publishes. Threads exchange no messages. The workers agree on the outcome in `settle`, which all
call at the same step: before the next snapshot, or at the end. So at most one snapshot is in progress at a time, and a second one waits.

A worker that dies leaves a draft, which the next start removes; the previous snapshot remains valid.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carrywave import errors
from carrywave.data.loader import copy_stream
from carrywave.errors import RunError, UserError, from_system, option, remedy_for
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import World, all_gather_json, from_rank_0, raise_on_all
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.manifest import File, Manifest
from carrywave.runs.checkpoint.snapshot import TEMPORARY, Groups, publish, sweep, write_part
from carrywave.runs.watcher import size_text

POLL_SECONDS = 0.02
SEEN_SECONDS = 3.0  # within which a file written by another host must be visible here

Failure = tuple[str, str]  # class and message of an error


def _nothing() -> None:
    """What is called before a snapshot is published if nothing is to be."""


@dataclass
class _Job:
    """One snapshot in progress."""

    target: Path
    draft: Path
    groups: Groups  # this worker's part, copied
    ready: Any  # the CUDA event after which the copies are complete; None: they already are
    meta: dict[str, Any] | None  # on rank 0 only
    keep: int
    best: bool
    before: Callable[[], None]  # called before it is published
    written: threading.Event = field(default_factory=threading.Event)  # this worker's part is written, or has failed
    given_up: threading.Event = field(default_factory=threading.Event)  # another worker's part will never arrive
    part_failure: Failure | None = None
    failure: Failure | None = None  # of the whole snapshot, known to rank 0
    thread: threading.Thread | None = None


class Writer:
    """Writes the snapshots of one run. Every worker has one, and all call its methods at the same steps."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.held_seconds = 0.0  # for which training was blocked
        self._job: _Job | None = None
        self._memory: dict[tuple[str, str], Tensor] = {}
        self._stream: Any = None
        self._token = ""

    def meet(self) -> None:
        """Remove leftovers, and check that all workers share the folder. Collective: every rank must call it."""
        token = secrets.token_hex(4)
        if self.world.rank == 0 and self.folder.is_dir():
            sweep(self.folder)
        if self.world.size == 1:
            self._token = token
            return

        def leave_mark() -> str:
            with atomic_files.writing(str(self.folder)):
                (self.folder / f"{TEMPORARY}meeting-{token}").mkdir(parents=True)
            return token

        self._token = from_rank_0(self.world, leave_mark)
        mark = self.folder / f"{TEMPORARY}meeting-{self._token}"
        with raise_on_all(self.world):
            if not _visible(mark):
                raise RunError(
                    f"{os.uname().nodename} does not see {self.folder} of rank 0; set {option('run')} to a folder that all hosts share"
                )
        if self.world.rank == 0:
            atomic_files.remove(mark)

    def begin(
        self,
        name: str,
        groups: Mapping[str, Mapping[str, Tensor]],
        meta: dict[str, Any] | None,
        *,
        keep: int,
        best: bool = False,
        before: Callable[[], None] = _nothing,
    ) -> None:
        """Copy this worker's part of a snapshot, and start writing it. The previous one must be settled."""
        started = time.perf_counter()
        assert self._job is None
        copied, ready = self._copy(groups)
        draft = self.folder / f"{TEMPORARY}{name}-{self._token}"
        plain_meta = None if meta is None else json.loads(json.dumps(meta))
        job = _Job(self.folder / name, draft, copied, ready, plain_meta, keep, best, before)
        # A daemon: a process that has to exit does not wait for the disk. It leaves a draft.
        job.thread = threading.Thread(target=self._write, args=(job,), name="carrywave-snapshot", daemon=True)
        self._job = job
        job.thread.start()
        self.held_seconds += time.perf_counter() - started

    def settle(self) -> UserError | None:
        """Wait for the snapshot in progress, if any; returns why it failed, the same on every worker. Collective."""
        started = time.perf_counter()
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return None
        if job.thread.is_alive():
            heartbeat.rest()  # a slow disk is no hang, though no step is taken meanwhile
        with raise_on_all(self.world, no_timeout=True):
            job.written.wait()
        failures = all_gather_json(self.world, job.part_failure)
        failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
        if failed:
            job.given_up.set()
        with raise_on_all(self.world, no_timeout=True):
            job.thread.join()
            if self.world.rank == 0 and (failed or job.failure):
                sweep(self.folder)  # including what a worker created after the draft was removed
        failure = all_gather_json(self.world, job.failure)[0]
        if failed:
            # A worker's own report is closer to the cause than rank 0 missing its files.
            rank, (kind, message) = failed[0]
            failure = kind, message if self.world.size == 1 or len(failed) == self.world.size else f"rank {rank}: {message}"
        self.held_seconds += time.perf_counter() - started
        return None if failure is None else on_every_rank(getattr(errors, failure[0], RunError)(failure[1]))

    def close(self, seconds: float) -> str | None:
        """After the run failed: give the snapshot in progress this long to complete. Returns the reason if it failed."""
        if self._job is None or self._job.thread is None:
            return None
        self._job.thread.join(seconds)
        if self._job.thread.is_alive():
            return f"a snapshot was still incomplete {seconds:g} s after the run failed"
        failure = self._job.part_failure or self._job.failure
        return None if failure is None else failure[1]

    def _copy(self, groups: Mapping[str, Mapping[str, Tensor]]) -> tuple[Groups, Any]:
        """Copy the tensors to host memory as of this point in the device's work; also returns the event that completes the copies."""
        tensors = {(group, name): tensor.detach() for group, named in groups.items() for name, tensor in named.items()}
        on_device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        if on_device is not None and self._stream is None:
            self._stream = copy_stream(on_device)
        for key, tensor in tensors.items():
            room = self._memory.get(key)
            if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                # Pinned: only then does a copy from the device overlap with its work.
                self._memory[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._memory = {key: room for key, room in self._memory.items() if key in tensors}
        copied: Groups = {group: {name: self._memory[group, name] for name in named} for group, named in groups.items()}
        if on_device is None:
            for key, tensor in tensors.items():
                self._memory[key].copy_(tensor)
            return copied, None
        work = torch.cuda.current_stream(on_device)
        self._stream.wait_stream(work)
        with torch.cuda.stream(self._stream):
            for key, tensor in tensors.items():
                self._memory[key].copy_(tensor, non_blocking=True)
            ready = self._stream.record_event()
        # The next step modifies what is being copied: the device waits for the copy, the host does not.
        work.wait_event(ready)
        return copied, ready

    # In the background thread

    def _write(self, job: _Job) -> None:
        """Write this worker's part; on rank 0, then complete and publish the snapshot."""
        files: dict[str, File] = {}
        try:
            if job.ready is not None:
                job.ready.synchronize()
            self.folder.mkdir(exist_ok=True)  # within the run's folder, which is not created again if it was removed
            job.draft.mkdir(exist_ok=True)
            files = write_part(job.draft, job.groups)
            if self.world.rank > 0:
                self._report(job, {"files": {name: file.to_json() for name, file in files.items()}})
        except Exception as error:
            job.part_failure = _failure(job.target, error, job.groups)
        job.written.set()
        if self.world.rank > 0:
            if job.part_failure is not None:
                with suppress(OSError):  # if there is no room for a report either, `settle` reports it
                    self._report(job, {"failure": job.part_failure})
            return
        try:
            # Even if its own part failed: the draft must not be removed while others write into it.
            if self._complete(job, files) and job.part_failure is None:
                job.before()
                publish(job.draft, job.target.name, Manifest(files, job.meta or {}), job.keep, best=job.best)
        except Exception as error:
            job.failure = _failure(job.target, error, job.groups)
        atomic_files.remove(job.draft)  # does nothing if it was published

    def _report(self, job: _Job, content: Any) -> None:
        report = _report_of(job.draft, self.world.rank)
        part = report.with_suffix(".part")
        part.write_text(json.dumps(content))
        os.replace(part, report)

    def _complete(self, job: _Job, files: dict[str, File]) -> bool:
        """Wait until every other worker has reported its part, and add their files to `files`; False if a part is missing."""
        whole = True
        for rank in range(1, self.world.size):
            report = _report_of(job.draft, rank)
            while not report.is_file():
                if job.given_up.is_set():
                    return False
                time.sleep(POLL_SECONDS)
            reported = json.loads(report.read_text())
            whole = whole and "failure" not in reported
            for name, described in reported.get("files", {}).items():
                file = File.of(described)
                if not _visible(job.draft / name) or (job.draft / name).stat().st_size != file.num_bytes:
                    raise RunError(
                        f"snapshot {job.target}: {name} of rank {rank} is not visible to rank 0; "
                        f"set {option('run')} to a folder on a file system that all hosts share"
                    )
                files[name] = file
            report.unlink()
        return whole


def _visible(path: Path) -> bool:
    """True if a path exists. A network file system may take a while to show what another host has created."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _report_of(draft: Path, rank: int) -> Path:
    return draft / f"report-{rank}.json"


def _failure(target: Path, error: Exception, groups: Groups | None = None) -> Failure:
    """What went wrong as a class and one line, so that it can be sent as text."""
    if isinstance(error, UserError):
        return type(error).__name__, str(error)
    reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
    fact = f"snapshot {target} could not be written: {' '.join(reason.split())}; the previous snapshot is kept"
    if not isinstance(error, OSError):
        return "RunError", f"{fact}; remove the cause, then resume"
    remedy = remedy_for(error, "make the folder writable")
    if error.errno == errno.ENOSPC and groups:
        num_bytes = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
        remedy += f" in {target.parent} (this worker's part takes {size_text(num_bytes)})"
    return from_system(error, RunError).__name__, f"{fact}; {remedy}, then resume"
