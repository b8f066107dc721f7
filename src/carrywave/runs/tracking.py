"""Copies of a run's metrics for others: TensorBoard's events in `tb/`, and the records of MLflow and Weights & Biases (`train.track`).

Each tracker works in a thread of its own, so a slow one does not delay the run, and one that fails is given up with a line: metrics.jsonl
has every row. Rows that a resume takes back and writes again are sent again, with the same values.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from carrywave import __version__
from carrywave.errors import SpecError, one_line
from carrywave.spec.spec import Spec

EVENTS, FOLDER = "tb", "tracking"  # within the run's
CLOSE_SECONDS = 60.0  # that the end of a run waits for trackers, of which some take long to begin

Row = Mapping[str, float | int | str | bool | None]
Ending = Literal["finished", "stopped", "failed"]


class Tracker(Protocol):
    """A record of one run, elsewhere. All of it is called from one thread, and any exception ends the record, not the run."""

    def open(self) -> None:
        """Begin a record, or continue the one that an earlier process of this run began."""

    def add(self, row: Row) -> None:
        """Add a row of metrics.jsonl."""

    def go_back(self, step: int) -> None:
        """Everything after this step will come again."""

    def close(self, how: Ending) -> None:
        """Complete the record: the run has ended."""


class TensorBoard:
    """The floats of each row, by split and name."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder = folder / EVENTS
        self._writer: Any = None
        self._after: int | None = None  # TensorBoard discards what an earlier file has from this step on

    def open(self) -> None:
        """Nothing yet: a run without rows has no events."""

    def add(self, row: Row) -> None:
        if self._writer is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of TensorBoard's own imports, about which a user can do nothing
                from torch.utils.tensorboard import SummaryWriter
            threading.excepthook = _without_events(threading.excepthook)
            self._writer = SummaryWriter(str(self._folder), purge_step=self._after)
        for name, value in row.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{row['split']}/{name}", value, row["step"])

    def go_back(self, step: int) -> None:
        self.close("stopped")
        self._after = step + 1

    def close(self, how: Ending) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Mlflow:
    """A run of MLflow, in the experiment that its own environment variables name, or in `carrywave`; where to is MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder, self._settings = folder, settings
        self._client: Any = None
        self._id = ""

    def open(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody asked to be counted by MLflow's makers
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client = MlflowClient()
        if (before := read_id(self._folder, "mlflow")) is not None:
            try:
                self._client.update_run(before, status="RUNNING")
                self._id = before
                return
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "carrywave"
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if not experiment:
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {"carrywave.version": __version__, "carrywave.run": str(self._folder.absolute())}
        self._id = self._client.create_run(str(experiment), run_name=self._folder.name, tags=tags).info.run_id
        write_id(self._folder, "mlflow", self._id)
        parameters = [Param(key, value[:500]) for key, value in self._settings.items()]  # longer ones are refused
        for first in range(0, len(parameters), 100):
            self._client.log_batch(self._id, params=parameters[first : first + 100])

    def add(self, row: Row) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, row["step"]) for name, value in numbers_of(row)])

    def go_back(self, step: int) -> None:
        """Nothing: the same values come again."""

    def close(self, how: Ending) -> None:
        self._client.set_terminated(self._id, status={"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[how])


class Wandb:
    """A run of Weights & Biases, in the project that WANDB_PROJECT names, or in `carrywave`; its files are in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder, self._settings = folder, settings
        self._run: Any = None

    def open(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nobody asked for its crashes to be reported
        import wandb

        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.api.api_key:
            # It would ask for one on the terminal, and wait.
            raise RuntimeError("there is no API key, so run wandb login, or set WANDB_MODE=offline")
        known = read_id(self._folder, "wandb") or secrets.token_hex(4)
        write_id(self._folder, "wandb", known)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "carrywave"),
            id=known,
            resume="allow" if mode == "online" else None,  # offline, the id alone tells `wandb sync` which run it is
            name=self._folder.name,
            dir=str(self._folder / FOLDER),
            config={**self._settings, "carrywave": __version__},
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        # Steps of ours, not W&B's own count of calls, which cannot go back when a run resumes from a snapshot.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, row: Row) -> None:
        self._run.log({"step": row["step"], **dict(numbers_of(row))})

    def go_back(self, step: int) -> None:
        """Nothing: the same values come again."""

    def close(self, how: Ending) -> None:
        self._run.finish(exit_code={"finished": 0, "stopped": 130, "failed": 1}[how])


def _without_events(before: Callable[[threading.ExceptHookArgs], object]) -> Callable[[threading.ExceptHookArgs], object]:
    """A hook that prints no traceback of a full disk in TensorBoard's own thread: its next call raises the same error."""
    if getattr(before, "without_events", False):
        return before

    def hook(failed: threading.ExceptHookArgs, /) -> None:
        if not (type(failed.thread).__module__.startswith("tensorboard.") and issubclass(failed.exc_type, OSError)):
            before(failed)

    hook.without_events = True  # type: ignore[attr-defined]
    return hook


TRACKERS: dict[str, Callable[[Path, Mapping[str, str]], Tracker]] = {"mlflow": Mlflow, "wandb": Wandb}


def check_installed(wanted: Sequence[str]) -> None:
    """Refuse a tracker whose package is missing, before anything is trained."""
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise SpecError(f"train.track lists {name}, which is not installed; install it with: pip install 'carrywave[{name}]'")


class Tracking:
    """The trackers of one run, as a context; without any, all of this does nothing."""

    def __init__(self, trackers: Mapping[str, Tracker], say: Callable[[str], None]) -> None:
        self._copies = [_Copy(name, tracker) for name, tracker in trackers.items()]
        self._say = say
        self.how: Ending = "finished"  # how the run ended

    @staticmethod
    def of(spec: Spec, folder: Path, say: Callable[[str], None]) -> Tracking:
        """TensorBoard, and the trackers that a spec asks for."""
        flat: dict[str, str] = {}
        for section, value in spec.model_dump(mode="json").items():
            pairs = {f"{section}.{key}": setting for key, setting in value.items()} if isinstance(value, dict) else {section: value}
            flat |= {name: setting if isinstance(setting, str) else json.dumps(setting) for name, setting in pairs.items()}
        return Tracking({"tensorboard": TensorBoard(folder, flat)} | {name: TRACKERS[name](folder, flat) for name in spec.train.track}, say)

    def add(self, row: Row) -> None:
        """Send a row to each of them."""
        for copy in self._copies:
            copy.work.put(lambda tracker: tracker.add(row))
        self._tell()

    def go_back(self, step: int) -> None:
        """The run continues from this step."""
        for copy in self._copies:
            copy.work.put(lambda tracker: tracker.go_back(step))

    def __enter__(self) -> Self:
        for copy in self._copies:
            copy.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        how: Ending = self.how if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        for copy in self._copies:
            copy.work.put(lambda tracker: tracker.close(how))
            copy.work.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for copy in self._copies:
            copy.thread.join(max(0.0, deadline - time.monotonic()))
            if copy.thread.is_alive():
                copy.failure = copy.failure or f"it did not take the last rows within {CLOSE_SECONDS:g} seconds"
        self._tell()

    def _tell(self) -> None:
        """Say, once, that a tracker is not getting what it should."""
        for copy in [copy for copy in self._copies if copy.failure is not None]:
            self._copies.remove(copy)
            self._say(f"{copy.name} no longer records this run: {copy.failure}; training goes on, and metrics.jsonl has every row")


class _Copy:
    """One tracker, what it still has to do, and why it ended before the run did."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self.failure: str | None = None
        self.work: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"carrywave-{name}", daemon=True)

    def _run(self) -> None:
        try:
            self.tracker.open()
            while (work := self.work.get()) is not None:
                work(self.tracker)
        except BaseException as error:  # even sys.exit: whatever goes wrong in somebody else's package is no reason to end the run
            line = one_line(error)
            self.failure = f"{type(error).__name__}: {line}" if line else type(error).__name__


def numbers_of(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row, by names such as `valid/loss`."""
    for name, value in row.items():
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{row['split']}/{name}", float(value)


def read_id(folder: Path, name: str) -> str | None:
    """The id of the record that an earlier process of this run began."""
    with suppress(OSError, UnicodeDecodeError):
        return (folder / FOLDER / f"{name}.id").read_text("utf-8").strip() or None
    return None


def write_id(folder: Path, name: str, value: str) -> None:
    """Note the id of a record."""
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / f"{name}.id").write_text(f"{value}\n", encoding="utf-8")
