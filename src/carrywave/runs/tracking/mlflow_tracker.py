"""MLflow: one of its runs for each run of ours, in the experiment that MLflow's own environment variables name, or in `carrywave`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from carrywave.runs.tracking.tracker import Description, How, NotFound, Row, values_of

EXPERIMENT = "carrywave"
MOST_PARAMETERS, MOST_METRICS = 100, 1000  # in one request
LONGEST_VALUE = 500
STATUS: dict[How, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """Where to is set by MLFLOW_TRACKING_URI, and by MLFLOW_EXPERIMENT_NAME or _ID, as in any program that uses MLflow."""

    def __init__(self, described: Description) -> None:
        self.described = described
        self._client: Any = None
        self._id = ""

    def open(self, record_id: str | None) -> str:
        """Begin a run of MLflow with the spec as its parameters, or continue one."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody asked to be counted by MLflow's makers
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._client = MlflowClient()
        if record_id is not None:
            try:
                self._client.update_run(record_id, status="RUNNING")
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    raise NotFound(record_id) from error
                raise
            self._id = record_id
            return record_id
        tags = {"carrywave.version": self.described.version, "carrywave.run": str(self.described.folder.absolute())}
        self._id = self._client.create_run(self._experiment(), run_name=self.described.folder.name, tags=tags).info.run_id
        self._describe()
        return self._id

    def send(self, rows: Sequence[Row]) -> None:
        """Log the numbers of rows, at their steps."""
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(name, value, now, int(row["step"])) for row in rows for name, value in values_of(row)]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])

    def close(self, how: How) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._id, status=STATUS[how])

    def _experiment(self) -> str:
        if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if experiment is None else experiment.experiment_id)

    def _describe(self) -> None:
        from mlflow.entities import Param

        parameters = [Param(name, value[:LONGEST_VALUE]) for name, value in self.described.settings.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + MOST_PARAMETERS])
