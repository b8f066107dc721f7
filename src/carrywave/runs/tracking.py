"""Copies of a run's metrics for others: TensorBoard's events in `tb/`, and the records of MLflow and Weights & Biases (`train.track`).

A tracker that fails is given up with a line: metrics.jsonl has every row. Rows that a resume takes back and writes again are sent again,
with the same values.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from carrywave import __version__
from carrywave.errors import SpecError, one_line
from carrywave.runs.event_file import EventFile
from carrywave.spec.spec import Spec

EVENTS, FOLDER = "tb", "tracking"  # within the run's

Row = Mapping[str, float | int | str | bool | None]
TrackerEnding = Literal["finished", "stopped", "failed"]


class Tracker(Protocol):
    """A record of one run, elsewhere. Any exception ends the record, not the run."""

    def open(self, after: int | None) -> None:
        """Begin a record, or continue the one that an earlier process of this run began: everything after this step comes again."""

    def add(self, row: Row) -> None:
        """Add a row of metrics.jsonl."""

    def close(self, how: TrackerEnding) -> None:
        """Complete the record: the run has ended, or goes back."""


class TensorBoard:
    """The floats of each row, by split and name."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder = folder / EVENTS
        self._file: EventFile | None = None

    def open(self, after: int | None) -> None:
        self._folder.mkdir(exist_ok=True)
        self._file = EventFile(self._folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}")
        if after is not None:
            self._file.restart(after + 1)

    def add(self, row: Row) -> None:
        assert self._file is not None
        step = row["step"]
        assert isinstance(step, int)
        self._file.scalars(step, {f"{row['split']}/{name}": value for name, value in row.items() if isinstance(value, float)})

    def close(self, how: TrackerEnding) -> None:
        if self._file is not None:
            self._file.close()


class Mlflow:
    """A run of MLflow, in the experiment that its own environment variables name, or in `carrywave`; where to is MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder, self._settings = folder, settings
        self._client: Any = None
        self._id = ""

    def open(self, after: int | None) -> None:
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

    def close(self, how: TrackerEnding) -> None:
        self._client.set_terminated(self._id, status={"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[how])


class Wandb:
    """A run of Weights & Biases, in the project that WANDB_PROJECT names, or in `carrywave`; its files are in the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self._folder, self._settings = folder, settings
        self._run: Any = None

    def open(self, after: int | None) -> None:
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

    def close(self, how: TrackerEnding) -> None:
        self._run.finish(exit_code={"finished": 0, "stopped": 130, "failed": 1}[how])


TRACKERS: dict[str, Callable[[Path, Mapping[str, str]], Tracker]] = {"mlflow": Mlflow, "wandb": Wandb}


def check_installed(wanted: Sequence[str]) -> None:
    """Refuse a tracker whose package is missing, before anything is trained."""
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise SpecError(f"train.track lists {name}, which is not installed; install it with: pip install 'carrywave[{name}]'")


class Tracking:
    """The trackers of one run, as a context; each is opened by its first row."""

    def __init__(self, trackers: Mapping[str, Tracker], say: Callable[[str], None]) -> None:
        self._trackers, self._open = dict(trackers), set[str]()
        self._after: int | None = None  # the step that the run goes on from
        self._say = say
        self.how: TrackerEnding = "finished"  # how the run ended

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
        for name in list(self._trackers):
            with self._given_up(name) as tracker:
                if name not in self._open:
                    tracker.open(self._after)
                    self._open.add(name)
                tracker.add(row)

    def go_back(self, step: int) -> None:
        """The run continues from this step."""
        self._close("stopped")
        self._after = step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(self.how if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed")

    def _close(self, how: TrackerEnding) -> None:
        for name in sorted(self._open):
            with self._given_up(name) as tracker:
                self._open.discard(name)
                tracker.close(how)

    @contextmanager
    def _given_up(self, name: str) -> Iterator[Tracker]:
        """Give a tracker up if it fails, even by sys.exit: whatever goes wrong in somebody else's package is no reason to end the run."""
        try:
            yield self._trackers[name]
        except (Exception, SystemExit) as error:
            del self._trackers[name]
            self._open.discard(name)
            line = one_line(error)
            why = f"{type(error).__name__}: {line}" if line else type(error).__name__
            self._say(f"{name} no longer records this run: {why}; training goes on, and metrics.jsonl has every row")


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
