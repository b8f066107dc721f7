"""A `Run` is a folder: spec, plan, codec, metrics, events, weights, snapshots, logs. It is made at the first write, not before.

`metrics.jsonl` holds nothing that depends on the clock, so that equal runs give equal bytes; what does goes to `timing.jsonl`.
Both are cut back to the snapshot on resume. While a run is trained its folder has one owner (`owner`), from `hold` or the first
write to the end of the context.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from torch import Tensor

from carrywave.errors import DataError, PlanError, RunError, SpecError, UserError, option
from carrywave.launch import launch_record
from carrywave.runs import owner
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.snapshot import NONE_YET, POINTER, save_weights
from carrywave.spec.spec import Spec

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FIRST = ("split", "epoch", "step", "loss")
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
MADE = (
    "spec.yaml",
    "plan.json",
    "codec.json",
    "facts.json",
    METRICS,
    TIMING,
    "tb",
    "snapshots",
    launch_record.NOTE,
)  # before it is trained
WEIGHTS = "weights.safetensors"
Value = float | int | str | bool | None


class _Hashed:
    """How long metrics.jsonl is, and its SHA-256, as far as it was written: counted on with every row, not read again."""

    def __init__(self) -> None:
        self.num_bytes, self.digest = 0, hashlib.sha256()

    @classmethod
    def of(cls, path: Path, num_bytes: int | None = None) -> Self:
        """Of what is there, or of the first of its bytes."""
        found = cls()
        if path.is_file():
            with path.open("rb") as file:
                left = _size(path) if num_bytes is None else num_bytes
                while block := file.read(min(left, atomic_files.BLOCK_BYTES)):
                    found.add(block)
                    left -= len(block)
        return found

    def add(self, data: bytes) -> None:
        """Count what is written next."""
        self.num_bytes += len(data)
        self.digest.update(data)


class Run:
    """One run's folder, and the files that are open in it."""

    def __init__(self, path: Path, *, new: bool, events: bool = True, anew: bool = False) -> None:
        self.path = path
        self._anew = anew
        self._made = not new
        self._founded: list[Path] | None = None  # folders that were not there before this run, the innermost first; None: it is no new one
        self._with_events = events
        self._files: dict[str, IO[bytes]] = {}
        self._events: SummaryWriter | None = None
        self._purge_step: int | None = None
        self._hashed: _Hashed | None = None
        self._claim: owner.Claim | None = None

    @classmethod
    def create(cls, path: Path | None, task: str, *, events: bool = True) -> Self:
        """A new run in this folder, or in runs/TASK-NUMBER with the first number that is free. Nothing is written yet."""
        if path is None:
            path = next(free for number in count(1) if not (free := Path("runs") / f"{task}-{number}").exists())
        _check_name(path)
        _refuse_occupied(path)
        return cls(path, new=True, events=events)

    @classmethod
    def begin_anew(cls, path: Path) -> Self:
        """A run that an earlier attempt of this launch began and left without a snapshot; what it wrote goes with the first write."""
        return cls(path, new=True, anew=True)

    def start_over(self) -> None:
        """The same for a run that is opened."""
        self._made, self._anew = False, True

    def expect_snapshot(self, init: str | None) -> None:
        """All that a new run begins with is written; `init` are the weights that it starts from."""
        self.make()
        with self._writing(str(self.snapshots)):
            self.snapshots.mkdir(exist_ok=True)
            atomic_files.write_bytes(self.snapshots / NONE_YET, json.dumps({"init": init}).encode())

    @property
    def began_with(self) -> dict[str, Any] | None:
        """What `expect_snapshot` noted of a run that has had no snapshot ever since; None: it has had one, or that is not known."""
        if (self.snapshots / POINTER).exists():
            return None
        try:
            told = json.loads((self.snapshots / NONE_YET).read_bytes())
            return {"init": told["init"]}
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def open(cls, path: Path, *, events: bool = True) -> Self:
        """A run that is already there."""
        _check_name(path)
        if not path.is_dir():
            raise RunError(f"{path} is no run: there is no such folder; give the folder of a run, such as runs/language-1")
        if not (path / "spec.yaml").is_file():
            raise RunError(f"{path} is no run: it has no spec.yaml; give the folder of a run, such as runs/language-1")
        return cls(path, new=False, events=events)

    @property
    def snapshots(self) -> Path:
        """The folder of snapshots."""
        return self.path / "snapshots"

    @property
    def weights(self) -> Path:
        """The file of the best weights."""
        return self.path / WEIGHTS

    def hold(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Take the run for this process, to train it; refused where another does. What waits for an answer says so."""
        if self._claim is None:
            with atomic_files.writing(str(self.path)):
                self._claim = owner.take(self.path, say)

    def release(self) -> None:
        """Let go of the run."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def make(self) -> None:
        """Make the folder, where it is not there yet, and take it; every write does so by itself."""
        if self._made:
            if self._claim is not None:
                self._claim.check()
            return
        founded: list[Path] = []  # folders that are not there yet, the innermost first
        if not self._anew:
            _refuse_occupied(self.path)  # another run may have taken the name since
            founded = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with atomic_files.writing(str(self.path)):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.hold()
            except (OSError, UserError):
                _remove_empty(founded)
                raise
            if self._anew:
                self._clear()
            elif any(entry.name != owner.FILE for entry in self.path.iterdir()):
                raise RunError(f"{self.path} was filled by another process just now; use another {option('run')}")
            else:
                self._founded = founded
            launch_record.note(self.path)
        self._made = True

    def write_spec(self, spec: Spec) -> None:
        """The resolved spec, as spec.yaml."""
        from carrywave.spec.load import dump

        self._write("spec.yaml", dump(spec))

    def write_json(self, name: str, value: Any) -> None:
        """A small object, such as plan.json or codec.json."""
        self._write(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """An object that `write_json` wrote."""
        path = self.path / name
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is not a plain file; give the folder of a whole run")
        try:
            return json.loads(path.read_bytes())
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}; give the folder of a whole run") from error
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is damaged: it is not JSON; give the folder of a whole run") from error

    def read_object(self, name: str) -> dict[str, Any]:
        """The same where it must be a mapping."""
        found = self.read_json(name)
        if not isinstance(found, dict):
            raise RunError(f"{self.path / name} is damaged: it holds no mapping; give the folder of a whole run")
        return found

    def write_metrics(self, row: Mapping[str, Value]) -> None:
        """Add a line to metrics.jsonl: split, epoch, step and loss first, then the rest by name; and the same to TensorBoard."""
        ordered = {key: row[key] for key in FIRST} | {key: row[key] for key in sorted(row.keys() - set(FIRST))}
        self._append(METRICS, ordered)
        if not self._with_events:
            return
        with self._writing(str(self.path / "tb")):
            events, step = self._open_events(), row["step"]
            for key, value in ordered.items():
                if isinstance(value, float):
                    events.add_scalar(f"{row['split']}/{key}", value, step)

    def write_timing(self, row: Mapping[str, Value]) -> None:
        """Add a line to timing.jsonl, for all that depends on the clock."""
        self._append(TIMING, row)

    def write_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Replace weights.safetensors; the spec and the codec go along in its metadata, so that the file can stand alone."""
        self.make()
        if self._claim is not None:
            self._claim.look()
        beside = {"spec": self.path / "spec.yaml", "codec": self.path / "codec.json"}
        metadata = {name: path.read_text("utf-8") for name, path in beside.items() if path.is_file()}
        with self._writing(str(self.weights)):
            save_weights(self.weights, parameters, {"format": "pt", **metadata})

    def sizes(self) -> tuple[int, int, str]:
        """Bytes of both logs, and the SHA-256 of metrics.jsonl as this run wrote it, for the snapshot that is written next."""
        with self._writing(str(self.path / "tb")):
            if self._events is not None:
                self._events.flush()
        metrics = self._metrics()
        return metrics.num_bytes, _size(self.path / TIMING), metrics.digest.hexdigest()

    def sync(self) -> None:
        """Bring both logs to the disk, of a run that is still this process's; from any thread."""
        if self._claim is not None:
            self._claim.look()
        with self._writing(str(self.path / METRICS)):
            for name in (METRICS, TIMING):
                if (self.path / name).is_file():
                    atomic_files.sync_path(self.path / name)

    def cut_back(self, metrics_bytes: int, timing_bytes: int, sha256: str | None = None, step: int | None = None) -> None:
        """Before resuming: cut both logs back to a snapshot, and have TensorBoard forget what came after its optimizer step.

        `sha256`: of metrics.jsonl up to there; None where the snapshot is older than that check.
        """
        present = _size(self.path / METRICS)
        if present < metrics_bytes:
            had = f"{self.path / METRICS} has {present} bytes, the snapshot was made after {metrics_bytes}"
            raise RunError(f"{had}; put the file back, or start a new run with {option('init')}")
        if sha256 is not None and _Hashed.of(self.path / METRICS, metrics_bytes).digest.hexdigest() != sha256:
            fact = f"{self.path / METRICS} was changed: its first {metrics_bytes} bytes are not those that the run wrote"
            raise RunError(f"{fact}; put the file back, or start a new run with {option('init')}")
        self.close()
        self._hashed = None
        with self._writing(str(self.path / METRICS)):
            for name, kept in ((METRICS, metrics_bytes), (TIMING, timing_bytes)):
                # Lost timings are no loss to the run: that file is only ever shortened.
                if _size(self.path / name) > kept:
                    os.truncate(self.path / name, kept)
        self._purge_step = None if step is None else step + 1

    def close(self) -> None:
        """Close what is open; a later write opens it again."""
        with self._writing(str(self.path)):
            while self._files:
                self._files.popitem()[1].close()
            if self._events is not None:
                events, self._events = self._events, None
                events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        finally:
            withdrawn = isinstance(error, UserError | OSError | KeyboardInterrupt) and self._withdraw(error)
            self.release()
            if withdrawn:
                _remove_empty(self._founded or [])

    def _clear(self) -> None:
        """Remove what an earlier attempt wrote, and nothing else that may lie there."""
        for entry in (self.path / name for name in (*MADE, WEIGHTS) if name not in launch_record.KEPT):
            atomic_files.remove(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)

    def _withdraw(self, error: BaseException) -> bool:
        """Take back a new run that was refused before it had anything to go on from: the same command can then be given again.

        What was trained is no less true because of a disk that is full: then the rows that there are stay.
        """
        if self._founded is None or self.weights.is_file() or (self.snapshots / POINTER).is_file():
            return False
        if self._claim is None or self._claim.lost:
            return False  # what is there is another's
        if _size(self.path / METRICS) and not isinstance(error, DataError | SpecError | PlanError):
            return False
        with suppress(OSError):  # a folder that cannot be cleared is no reason to hide the error that led here
            for entry in (self.path / name for name in MADE):
                atomic_files.remove(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
        return True

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turns a failure of the disk into one line; of a run that is gone, or another's, that is the one."""
        try:
            with atomic_files.writing(what):
                yield
        except RunError:
            if self._claim is not None:
                self._claim.look()
            raise

    def _write(self, name: str, text: str) -> None:
        self.make()
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            around = text[max(0, error.start - 20) : error.end + 20]
            fact = f"{self.path / name} would hold {around!r}, where half of a pair of surrogates stands alone, which is no text"
            raise DataError(f"{fact}; mend it in the data, most likely in a label or a name") from None
        with self._writing(str(self.path / name)):
            atomic_files.write_bytes(self.path / name, data)

    def _append(self, name: str, row: Mapping[str, Value]) -> None:
        # JSON has no infinity and no NaN.
        plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"
        self.make()
        with self._writing(str(self.path / name)):
            written = self._metrics() if name == METRICS else None
            if name not in self._files:
                # Unbuffered: one write a line, so what is on the disk ends with a whole line.
                self._files[name] = (self.path / name).open("ab", buffering=0)
            data = line.encode()
            if written is not None:
                written.add(data)
            while data:  # a disk that is nearly full takes a part of it, and refuses the rest
                data = data[self._files[name].write(data) :]

    def _metrics(self) -> _Hashed:
        if self._hashed is None:
            self._hashed = _Hashed.of(self.path / METRICS)
        return self._hashed

    def _open_events(self) -> SummaryWriter:
        if self._events is None:
            self.make()
            with warnings.catch_warnings():
                # TensorBoard's imports warn about themselves; a user can do nothing about it.
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter

                _hush_events()
                self._events = SummaryWriter(str(self.path / "tb"), purge_step=self._purge_step)
                self._purge_step = None
        return self._events


class NullRun(Run):
    """A run that another worker writes: what is written to it here goes nowhere."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, new=False)

    def make(self) -> None:
        """Nothing."""

    def expect_snapshot(self, init: str | None) -> None:
        """Nothing."""

    def write_metrics(self, row: Mapping[str, Value]) -> None:
        """Nothing."""

    def write_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Nothing."""

    def cut_back(self, metrics_bytes: int, timing_bytes: int, sha256: str | None = None, step: int | None = None) -> None:
        """Nothing."""

    def _write(self, name: str, text: str) -> None:
        """Nothing."""

    def _append(self, name: str, row: Mapping[str, Value]) -> None:
        """Nothing."""


def _check_name(path: Path) -> None:
    """Names go into JSON, to other workers and to TensorBoard: all of that is UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise RunError(f"the name of the folder {path} is not UTF-8 text; use another {option('run')}, or rename the folder") from None


def _refuse_occupied(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file, and a run is a folder; use another {option('run')}")
    # A process that was killed at its start may have left its name and no more.
    if not path.is_dir() or all(entry.name == owner.FILE for entry in path.iterdir()):
        return
    there = owner.read(path)
    if there is not None and not owner.is_gone(there, owner.this_process()):
        raise RunError(f"{path} is being trained by {there}; use another {option('run')}")
    if (path / "spec.yaml").is_file() and not (path / "snapshots" / POINTER).is_file():
        known = (path / "snapshots" / NONE_YET).is_file()
        remedy = f"use {option('resume')} to start it over" if known else "remove the folder"
        raise RunError(f"{path} holds a run that ended before its first snapshot; {remedy}, or use another {option('run')}")
    raise RunError(f"{path} is already there and not empty; use {option('resume')} to go on with it, or another {option('run')}")


def _hush_events() -> None:
    """What fails in TensorBoard's thread is raised at the next write too, and said there; not beside it, with a traceback."""
    before = threading.excepthook
    if getattr(before, "hushes_events", False):
        return

    def hook(failed: threading.ExceptHookArgs, /) -> None:
        writes_events = type(failed.thread).__module__ == "tensorboard.summary.writer.event_file_writer"
        if not writes_events or not issubclass(failed.exc_type, OSError):
            before(failed)

    hook.hushes_events = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
