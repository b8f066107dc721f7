"""A `RunRecord` is what a run's folder says about it, read without torch. What is missing or damaged is left out and named, never an error:
a run may still be in training, or may have been stopped at any instant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from carrywave.errors import RunError, UserError
from carrywave.spec.train_spec import score
from carrywave.spec.yaml_text import parse_yaml
from carrywave.tasks.baselines import PREFIXES

LogRow = Mapping[str, Any]  # a line of a log
FIRST = ("perplexity", "accuracy", "micro_f1", "mae", "rmse", "mase", "pinball")  # of the metrics that are shown
NOT_METRICS = ("split", "epoch", "step", "loss", "weights_step", "lr", "norm", "waste", "steps", "targets", "skipped", "train_loss")


@dataclass(frozen=True)
class RunRecord:
    """The files of a run as data; empty where there is no such file."""

    folder: Path
    name: str  # as the user named it
    spec_text: str  # spec.yaml
    spec: Mapping[str, Any]
    plan: Mapping[str, Any]  # plan.json
    facts: Mapping[str, Any]  # facts.json
    metrics: Sequence[LogRow]  # metrics.jsonl
    timing: Sequence[LogRow]  # timing.jsonl
    history: Sequence[LogRow]  # history.jsonl

    def rows(self, split: str) -> list[LogRow]:
        """The rows of one part of the data: train, valid or test."""
        return [row for row in self.metrics if row.get("split") == split]

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the spec."""
        section = self.spec.get(name)
        return section if isinstance(section, Mapping) else {}

    @property
    def best(self) -> LogRow | None:
        """The evaluation whose weights were kept: the best by `train.best`, the first of equal ones, or the last; None if there is none."""
        judged = [row for row in self.rows("valid") if is_number(row.get("loss")) and is_number(row.get(self.best_metric))]
        if judged and self.keeps_last:
            return judged[-1]
        return min(judged, key=lambda row: score(self.best_metric, row[self.best_metric]), default=None)

    @property
    def keeps_last(self) -> bool:
        """True if the weights after the last step were kept, however good others had been (`train.weights`)."""
        return self.section("train").get("weights") == "last"

    @property
    def best_metric(self) -> str:
        """The metric that picks the best weights (`train.best`)."""
        return str(self.section("train").get("best") or "loss")

    @property
    def metric_names(self) -> list[str]:
        """The task's metrics, the best known first; those of baselines (`naive_…`) are shown beside them."""
        columns = dict.fromkeys(name for row in self.metrics if row.get("split") != "train" for name in row)
        names = [name for name in columns if name not in NOT_METRICS and not name.startswith(PREFIXES)]
        return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))

    @property
    def task(self) -> str:
        """The task of the spec."""
        return str(self.spec.get("task", "unknown"))


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read a run's folder; raises only if it is no run."""
    name = name or str(folder)
    if not (folder / "spec.yaml").is_file():
        fact = "it has no spec.yaml" if folder.is_dir() else "folder not found"
        raise RunError(f"{name} is not a run: {fact}; pass a run folder such as runs/language-1")
    text = _text(folder / "spec.yaml")
    try:
        spec = parse_yaml(text, "spec.yaml")
    except UserError:
        spec = {}
    plan, facts = (_object(folder / f"{file}.json") for file in ("plan", "facts"))
    metrics, timing, history = (_rows(folder / f"{file}.jsonl") for file in ("metrics", "timing", "history"))
    spec = spec if isinstance(spec, dict) else {}
    return RunRecord(folder, name, text, spec, plan, facts, metrics, timing, history)


def is_number(value: object) -> TypeGuard[float]:
    """True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _rows(path: Path) -> list[LogRow]:
    """The lines that are whole objects: the last one of a running or killed run may be cut off."""
    rows = list[LogRow]()
    for line in _text(path).splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows
