"""A `Run` is a folder: spec, plan, codec, metrics, events, weights, snapshots, logs. It is created at the first write, not before.

`metrics.jsonl` holds nothing that depends on the clock, so that equal runs give equal bytes; timings go to `timing.jsonl`. Both are
truncated to the snapshot on resume; `history.jsonl` (see `history`) is not. What cannot be written, on a full disk for example, ends the
run, which then resumes from its last snapshot. While a run is trained its folder has one owner (`owner`), from `hold` or the first write to
the end of the context.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from torch import Tensor

from carrywave.errors import DataError, PlanError, RunError, SpecError, UserError, option
from carrywave.launch import launch_record
from carrywave.runs import owner
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.atomic_files import HashedLog
from carrywave.runs.checkpoint.snapshot import NONE_YET, POINTER, refuse_not_finite, write_weights
from carrywave.runs.history import HISTORY, drop_torn
from carrywave.runs.run_place import (
    LINEAR,
    MADE,
    METRICS,
    TIMING,
    WEIGHTS,
    check_name,
    check_place,
    clear,
    free_place,
    never_began,
    refuse_occupied,
    remove_empty,
)
from carrywave.runs.tracking import Row, Tracking
from carrywave.spec.spec import Spec

FIRST = ("split", "epoch", "step", "loss")
Value = float | int | str | bool | None


class Run:
    """The folder of one run, and the files that are open in it."""

    def __init__(self, path: Path, *, new: bool, anew: bool = False) -> None:
        self.path = path
        self._anew = anew
        self._made = not new
        self._founded: list[Path] | None = None  # folders that this run created, innermost first; None: it is not new
        self._logs: dict[str, IO[bytes]] = {}
        self._hashed: HashedLog | None = None
        self._claim: owner.Claim | None = None
        self.tracking: Tracking | None = None  # who else records the metrics

    @classmethod
    def create(cls, path: Path | None, task: str) -> Self:
        """A new run in this folder, or in runs/TASK-NUMBER with the first free number. Nothing is written yet."""
        if path is None:
            path = free_place(task)
        check_name(path)
        refuse_occupied(path)
        check_place(path)
        return cls(path, new=True)

    @classmethod
    def begin_anew(cls, path: Path) -> Self:
        """A run that an earlier attempt of this launch started and left without a snapshot; the first write removes what it wrote."""
        return cls(path, new=True, anew=True)

    def start_over(self) -> None:
        """The same for a run that is already open."""
        self._made, self._anew = False, True

    def expect_snapshot(self, init: str | None) -> None:
        """Record that a new run's first snapshot is pending, before its spec.yaml is written; `init` names the weights it starts from."""
        self.make()
        with self._writing(str(self.snapshots)):
            self.snapshots.mkdir(exist_ok=True)
            atomic_files.write_bytes(self.snapshots / NONE_YET, json.dumps({"init": init}).encode())

    @property
    def began_with(self) -> dict[str, Any] | None:
        """What `expect_snapshot` recorded, if the run has had no snapshot since; None: it has had one, or that is not known."""
        if (self.snapshots / POINTER).exists():
            return None
        try:
            recorded = json.loads((self.snapshots / NONE_YET).read_bytes())
            return {"init": recorded["init"]}
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run."""
        check_name(path)
        if not path.is_dir():
            raise RunError(f"{path} is not a run: folder not found; pass a run folder such as runs/language-1")
        if not (path / "spec.yaml").is_file():
            raise RunError(f"{path} is not a run: it has no spec.yaml; pass a run folder such as runs/language-1")
        return cls(path, new=False)

    @property
    def snapshots(self) -> Path:
        """The folder of snapshots."""
        return self.path / "snapshots"

    @property
    def weights(self) -> Path:
        """The file of the best weights."""
        return self.path / WEIGHTS

    def hold(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Become the owner of the run, to train it; raises if another process is. `say` is called if this has to wait."""
        if self._claim is None:
            with atomic_files.writing(str(self.path)):
                self._claim = owner.take(self.path, say)

    def release(self) -> None:
        """Give up ownership of the run."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def make(self) -> None:
        """Create the folder if it does not exist, and become its owner; every write does this by itself."""
        if self._made:
            if self._claim is not None:
                self._claim.check()
            return
        founded: list[Path] = []  # folders that do not exist yet, innermost first
        if not self._anew:
            refuse_occupied(self.path)  # another run may have taken the name since
            founded = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with atomic_files.writing(str(self.path)):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.hold()
            except (OSError, UserError):
                remove_empty(founded)
                raise
            if not self._anew and not never_began(self.path):
                raise RunError(f"{self.path} was just filled by another process; use another {option('run')}")
            clear(self.path, start_over=self._anew)
            self._founded = None if self._anew else founded
            launch_record.note(self.path)
        self._made = True

    def write_spec(self, spec: Spec) -> None:
        """Write the resolved spec as spec.yaml."""
        from carrywave.spec.load import dump

        self._write("spec.yaml", dump(spec))

    def write_json(self, name: str, value: Any) -> None:
        """Write a small object, such as plan.json or codec.json."""
        self._write(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Read an object that `write_json` wrote."""
        path = self.path / name
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is not a regular file; pass a complete run folder")
        try:
            return json.loads(path.read_bytes())
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}; pass a complete run folder") from error
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is damaged: it is not JSON; pass a complete run folder") from error

    def read_object(self, name: str) -> dict[str, Any]:
        """Read an object that must be a mapping."""
        content = self.read_json(name)
        if not isinstance(content, dict):
            raise RunError(f"{self.path / name} is damaged: it is not a JSON object; pass a complete run folder")
        return content

    def write_metrics(self, row: Mapping[str, Value]) -> None:
        """Append a line to metrics.jsonl: split, epoch, step and loss first, then the rest by name. Trackers get it too."""
        ordered = {key: row[key] for key in FIRST} | {key: row[key] for key in sorted(row.keys() - set(FIRST))}
        self._append(METRICS, ordered)
        if self.tracking is not None:
            self.tracking.add(ordered)

    def write_timing(self, row: Mapping[str, Value]) -> None:
        """Append a line to timing.jsonl, for everything that depends on the clock, with the time of day."""
        self._append(TIMING, {**row, "time": time.time()})

    def write_history(self, row: Mapping[str, Value]) -> None:
        """Append a line to history.jsonl."""
        if row["event"] == "start":
            drop_torn(self.path)
        self._append(HISTORY, row)

    def write_weights(self, parameters: Mapping[str, Tensor], step: int, share: float | None = None) -> None:
        """Replace weights.safetensors; no snapshot is published before.

        Its metadata holds spec and codec, so that the file is self-contained, and the step; `share` is how much of the head was left when
        training ended.
        """
        self.make()
        refuse_not_finite(self.weights, parameters)
        beside = {"spec": self.path / "spec.yaml", "codec": self.path / "codec.json"}
        metadata = {"format": "pt", "step": str(step)} | ({} if share is None else {"share": str(share)})
        metadata |= {name: path.read_text("utf-8") for name, path in beside.items() if path.is_file()}
        with self._writing(str(self.weights)):
            write_weights(self.weights, parameters, metadata)

    def write_linear(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the file of the linear part."""
        self.make()
        with self._writing(str(self.path / LINEAR)):
            write_weights(self.path / LINEAR, tensors, {"format": "pt"})

    def sizes(self) -> tuple[int, int, str]:
        """The sizes of both logs in bytes, and the SHA-256 of metrics.jsonl as this run wrote it, for the next snapshot."""
        metrics = self._metrics()
        return metrics.num_bytes, _size(self.path / TIMING), metrics.digest.hexdigest()

    def sync(self) -> None:
        """Bring to disk what a snapshot relies on, after checking that this process still owns the run; can be called from any thread."""
        self._look()
        with self._writing(str(self.path / METRICS)):
            for name in (METRICS, TIMING):
                if (self.path / name).is_file():
                    atomic_files.sync_path(self.path / name)

    def cut_back(self, metrics_bytes: int, timing_bytes: int, sha256: str, step: int) -> None:
        """Before resuming: truncate both logs to a snapshot, and have trackers discard what came after its step.

        `sha256` is that of metrics.jsonl up to there.
        """
        present = _size(self.path / METRICS)
        if present < metrics_bytes:
            had = f"{self.path / METRICS} has {present} bytes, but had {metrics_bytes} when the snapshot was made"
            raise RunError(f"{had}; restore the file, or start a new run with {option('init')}")
        if HashedLog.of(self.path / METRICS, metrics_bytes).digest.hexdigest() != sha256:
            fact = f"{self.path / METRICS} was changed: its first {metrics_bytes} bytes differ from what the run wrote"
            raise RunError(f"{fact}; restore the file, or start a new run with {option('init')}")
        self.close()
        self._hashed = None
        with self._writing(str(self.path / METRICS)):
            for name, kept in ((METRICS, metrics_bytes), (TIMING, timing_bytes)):
                # A shorter timing.jsonl is accepted: lost timings do not harm the run.
                if _size(self.path / name) > kept:
                    os.truncate(self.path / name, kept)
        if self.tracking is not None:
            self.tracking.go_back(step)

    def close(self) -> None:
        """Close all open files; a later write opens them again."""
        while self._logs:
            self._logs.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with nullcontext() if error is None else suppress(OSError):
                self.close()
        finally:
            withdrawn = isinstance(error, UserError | OSError | KeyboardInterrupt) and self._withdraw(error)
            self.release()
            if withdrawn:
                remove_empty(self._founded or [])

    def _withdraw(self, error: BaseException) -> bool:
        """Remove a new run that failed before it had anything to resume from, so that the same command can be given again.

        Rows of metrics stay unless the data, the spec or the plan was wrong: a full disk, say, does not make them less true.
        """
        if self._founded is None or self.weights.is_file() or (self.snapshots / POINTER).is_file() or self._claim is None:
            return False
        with suppress(RunError):
            self._claim.look()
        if self._claim.lost:
            return False  # the folder is another process's
        if _size(self.path / METRICS) and not isinstance(error, DataError | SpecError | PlanError):
            return False
        with suppress(OSError):  # a folder that cannot be cleared must not hide the original error
            for entry in (self.path / name for name in MADE):
                atomic_files.remove(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
        return True

    def _look(self) -> None:
        """Raise if this process no longer owns the run: what is opened by name now would be another's."""
        if self._claim is not None:
            self._claim.look()

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turn disk errors into one line; if the run is gone, or another process owns it, that is the error."""
        try:
            with atomic_files.writing(what):
                yield
        except RunError:
            self._look()
            raise

    def _write(self, name: str, text: str) -> None:
        self.make()
        self._look()
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            around = text[max(0, error.start - 20) : error.end + 20]
            fact = f"{self.path / name} would contain {around!r}, which is not valid text: it has an unpaired surrogate"
            raise DataError(f"{fact}; fix it in the data, most likely in a label or a name") from None
        with self._writing(str(self.path / name)):
            atomic_files.write_bytes(self.path / name, data)

    def _append(self, name: str, row: Row) -> None:
        plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}  # for JSON
        line = (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
        self.make()
        with self._writing(str(self.path / name)):
            if name not in self._logs:
                self._look()
                _size(self.path / name)
                # Unbuffered, so that the file on disk ends with a complete line.
                self._logs[name] = (self.path / name).open("ab", buffering=0)
            left = line
            while left:  # a nearly full disk accepts a part, and refuses the rest
                left = left[self._logs[name].write(left) :]
        if name == METRICS:
            self._metrics(before=line).add(line)

    def _metrics(self, before: bytes = b"") -> HashedLog:
        """Length and hash of metrics.jsonl, without a line at its end that is to be added."""
        if self._hashed is None:
            path = self.path / METRICS
            self._hashed = HashedLog.of(path, max(0, _size(path) - len(before)))
        return self._hashed


class NullRun(Run):
    """A run that another worker writes: anything written here is discarded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, new=False)

    def make(self) -> None:
        """Do nothing."""

    def expect_snapshot(self, init: str | None) -> None:
        """Do nothing."""

    def write_history(self, row: Mapping[str, Value]) -> None:
        """Do nothing."""

    def write_weights(self, parameters: Mapping[str, Tensor], step: int, share: float | None = None) -> None:
        """Do nothing."""

    def write_linear(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""

    def cut_back(self, metrics_bytes: int, timing_bytes: int, sha256: str, step: int) -> None:
        """Do nothing."""

    def _write(self, name: str, text: str) -> None:
        """Do nothing."""

    def _append(self, name: str, row: Row) -> None:
        """Do nothing."""


def _size(path: Path) -> int:
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is not a regular file; restore the one that the run wrote, or start a new run with {option('init')}")
    return path.stat().st_size if path.is_file() else 0
