"""A `Run` is a folder: spec, plan, codec, metrics, events, weights, snapshots, logs. It is created at the first write, not before.

`metrics.jsonl` holds nothing that depends on the clock, so that equal runs give equal bytes; timings go to `timing.jsonl`. Both are
truncated to the snapshot on resume; `history.jsonl`, which tells when the run was started, went back and ended, is not. What cannot be
written, on a full disk for example, ends the run, which then resumes from its last snapshot. While a run is trained its folder has one
owner (`owner`), from `hold` or the first write to the end of the context.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from torch import Tensor

from carrywave.errors import DataError, RunError, option
from carrywave.launch import launch_record
from carrywave.runs import owner
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.weights import write_weights
from carrywave.runs.run_place import (
    HISTORY,
    LINEAR,
    METRICS,
    SNAPSHOTS,
    TIMING,
    WEIGHTS,
    begins_anew,
    check_name,
    check_place,
    clear,
    free_place,
    refuse_occupied,
)
from carrywave.runs.tracking import Row, Tracking
from carrywave.spec.spec import Spec

FIRST = ("split", "epoch", "step", "loss")
Value = float | int | str | bool | None


class Run:
    """The folder of one run, and the files that are open in it. Of several workers, only one writes."""

    def __init__(self, path: Path, *, new: bool = False, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self._new = new  # the first write makes the folder, and removes what an earlier attempt has left in it
        self._anew = False  # whatever that is
        self._logs: dict[str, IO[bytes]] = {}
        self._claim: owner.Claim | None = None
        self.tracking: Tracking | None = None  # who else records the metrics

    @classmethod
    def create(cls, path: Path | None, task: str) -> Self:
        """A new run in this folder, or in runs/TASK-NUMBER with the first free number. Nothing is written yet."""
        path = free_place(task) if path is None else path
        check_name(path)
        refuse_occupied(path)
        check_place(path)
        return cls(path, new=True)

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run."""
        check_name(path)
        if not (path / "spec.yaml").is_file():
            fact = "it has no spec.yaml" if path.is_dir() else "folder not found"
            raise RunError(f"{path} is not a run: {fact}; pass a run folder such as runs/language-1")
        return cls(path)

    @property
    def snapshots(self) -> Path:
        """The folder of snapshots."""
        return self.path / SNAPSHOTS

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

    def begin_anew(self) -> Self:
        """Have the first write remove what an earlier attempt of this very run has left."""
        self._new = self._anew = True
        return self

    def make(self) -> None:
        """Create the folder of a new run and become its owner; every write does this by itself."""
        if not self._new:
            return
        if not self._anew:
            refuse_occupied(self.path)  # another run may have taken the name since
        with atomic_files.writing(str(self.path)):
            self.path.mkdir(parents=True, exist_ok=True)
            self.hold()
            if not (self._anew or begins_anew(self.path)):
                raise RunError(f"{self.path} was just filled by another process; use another {option('run')}")
            clear(self.path)
            launch_record.note(self.path)
        self._new = False

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

    def write_history(self, event: str, **row: Value) -> None:
        """Append a line to history.jsonl: the run is started, goes back to a snapshot, or has come to an end."""
        self._append(HISTORY, {"event": event, "time": time.time(), **row})

    @property
    def ended(self) -> bool:
        """True if the run has recorded that it came to its end, not only a process that was asked to stop."""
        path = self.path / HISTORY
        lines = path.read_text("utf-8").splitlines() if path.is_file() else []
        last = json.loads(lines[-1]) if lines else {}
        return last.get("event") == "end" and last["ending"] not in ("interrupted", "terminated")

    def write_weights(self, parameters: Mapping[str, Tensor], step: int, **said: str) -> None:
        """Replace weights.safetensors. Its metadata holds the step and what is `said`, and spec and codec, so that it stands by itself."""
        beside = {"spec": self.path / "spec.yaml", "codec": self.path / "codec.json"}
        texts = {name: path.read_text("utf-8") for name, path in beside.items() if path.is_file()}
        self._write_tensors(WEIGHTS, parameters, {"format": "pt", "step": str(step)} | texts | said)

    def write_linear(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the file of the linear part."""
        self._write_tensors(LINEAR, tensors, {"format": "pt"})

    def metrics_bytes(self) -> int:
        """The size of metrics.jsonl, all of which is on the disk: what a snapshot cuts it back to."""
        path = self.path / METRICS
        with self._writing(METRICS):
            if not path.is_file():
                return 0
            atomic_files.sync_path(path)
            return path.stat().st_size

    def cut_back(self, metrics_bytes: int, step: int) -> None:
        """Before resuming: truncate the logs to a snapshot of this step, and have trackers discard what came after it."""
        if not self.writes:
            return
        self.close()
        with self._writing(METRICS):
            metrics, timing = self.path / METRICS, self.path / TIMING
            if metrics_bytes and (not metrics.is_file() or metrics.stat().st_size < metrics_bytes):
                fact = f"{metrics} is shorter than when the snapshot was made"
                raise RunError(f"{fact}; restore the file, or start a new run with {option('init')}")
            if metrics.is_file():
                os.truncate(metrics, metrics_bytes)
            if timing.is_file():
                lines = timing.read_bytes().splitlines(keepends=True)
                os.truncate(timing, sum(map(len, takewhile(lambda line: line.endswith(b"\n") and json.loads(line)["step"] <= step, lines))))
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
            self.release()

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Write something by its name, which must be this process's own; turns disk errors into one line."""
        if self._claim is not None:
            self._claim.check()
        try:
            with atomic_files.writing(str(self.path / name)):
                yield
        except RunError:
            if self._claim is not None:
                self._claim.check()  # if the run is gone, that is the error
            raise

    def _write(self, name: str, text: str) -> None:
        if not self.writes:
            return
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            around = text[max(0, error.start - 20) : error.end + 20]
            fact = f"{self.path / name} would contain {around!r}, which is not valid text: it has an unpaired surrogate"
            raise DataError(f"{fact}; fix it in the data, most likely in a label or a name") from None
        self.make()
        with self._writing(name):
            atomic_files.write_bytes(self.path / name, data)

    def _write_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        if self.writes:
            self.make()
            with self._writing(name):
                write_weights(self.path / name, tensors, metadata)

    def _append(self, name: str, row: Row) -> None:
        if not self.writes:
            return
        plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}  # for JSON
        left = (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
        self.make()
        with self._writing(name):
            if name not in self._logs:
                # Unbuffered, so that the file on disk ends with a complete line.
                self._logs[name] = (self.path / name).open("ab", buffering=0)
            while left:  # a nearly full disk accepts a part, and refuses the rest
                left = left[self._logs[name].write(left) :]
