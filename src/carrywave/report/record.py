"""A `RunRecord` is what a run's folder says about it, read without torch. What is missing or damaged is left out and named, never an error:
a run may be older than a file, still in training, or stopped at any instant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from carrywave.errors import RunError, UserError
from carrywave.runs import owner
from carrywave.runs.history import HISTORY, TIMELINE
from carrywave.spec.train_spec import score
from carrywave.spec.yaml_text import parse_yaml
from carrywave.tasks.baselines import PREFIXES

Row = dict[str, Any]  # a line of a log
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
SPEC, PLAN, FACTS, WEIGHTS = "spec.yaml", "plan.json", "facts.json", "weights.safetensors"
LOGS = (METRICS, TIMING, HISTORY, TIMELINE)  # what a report needs besides what prediction needs
FIRST = ("perplexity", "accuracy", "micro_f1", "mae", "rmse", "mase", "pinball")  # of the metrics that are shown
NOT_METRICS = ("split", "epoch", "step", "loss", "weights_step", "lr", "norm", "waste", "steps", "targets", "skipped", "train_loss")


@dataclass(frozen=True)
class RunRecord:
    """The files of a run as data; empty where there is no such file."""

    folder: Path
    name: str  # as the user named it
    spec_text: str
    spec: Mapping[str, Any]
    plan: Mapping[str, Any]
    facts: Mapping[str, Any]
    metrics: Sequence[Row]
    timing: Sequence[Row]
    history: Sequence[Row]
    timeline: Mapping[str, Any]
    trained_now: bool  # by a process that has left its name in the folder

    def rows(self, split: str) -> list[Row]:
        """The rows of one part of the data: train, valid or test."""
        return [row for row in self.metrics if row.get("split") == split]

    @property
    def best(self) -> Row | None:
        """The evaluation whose weights were kept: the best by `train.best`, the first of equal ones, or the last; None if there is none."""
        judged = [row for row in self.rows("valid") if is_number(row.get("loss")) and is_number(row.get(self.best_metric))]
        if judged and self.keeps_last:
            return judged[-1]
        return min(judged, key=lambda row: score(self.best_metric, row[self.best_metric]), default=None)

    @property
    def keeps_last(self) -> bool:
        """True if the weights after the last step were kept, however good others had been (`train.weights`)."""
        return self._of_train("weights") == "last"

    @property
    def best_metric(self) -> str:
        """The metric that picks the best weights (`train.best`)."""
        return str(self._of_train("best") or "loss")

    def _of_train(self, key: str) -> object:
        train = self.spec.get("train")
        return train.get(key) if isinstance(train, Mapping) else None

    @property
    def metric_names(self) -> list[str]:
        """The task's metrics, the best known first; those of simple forecasts (`naive_…`) are shown beside them."""
        columns = dict.fromkeys(name for row in self.metrics if row.get("split") != "train" for name in row)
        names = [name for name in columns if name not in NOT_METRICS and not name.startswith(PREFIXES)]
        return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))

    @property
    def task(self) -> str:
        """The task of the spec."""
        return str(self.spec.get("task", "unknown"))


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read a run's folder; raises only if it is no run."""
    if not folder.is_dir():
        raise RunError(f"{name or folder} is not a run: folder not found; pass a run folder such as runs/language-1")
    if not (folder / SPEC).is_file():
        raise RunError(f"{name or folder} is not a run: it has no spec.yaml; pass a run folder such as runs/language-1")
    text = _text(folder / SPEC)
    return RunRecord(
        folder,
        name or str(folder),
        text,
        _spec_of(text),
        _object(folder / PLAN),
        _object(folder / FACTS),
        _rows(folder / METRICS),
        _rows(folder / TIMING),
        _rows(folder / HISTORY),
        _object(folder / TIMELINE),
        owner.beats(folder),
    )


def stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """The size and time of the files that a report is made from: it changes when they do."""
    marks = []
    for name in (SPEC, PLAN, FACTS, *LOGS, WEIGHTS):
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        marks.append((name, status.st_size, status.st_mtime_ns))
    return tuple(marks)


def is_number(value: object) -> TypeGuard[float]:
    """True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _spec_of(text: str) -> Mapping[str, Any]:
    try:
        spec = parse_yaml(text, SPEC)
    except UserError:
        return {}
    return spec if isinstance(spec, dict) else {}


def _object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _rows(path: Path) -> list[Row]:
    """The lines that are whole objects: the last one of a running or killed run may be cut off."""
    rows = []
    for line in _text(path).splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
