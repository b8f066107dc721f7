"""One cell of `bench quality` that is not carrywave's: plain PyTorch or the simple baselines, in a process of its own.

`python -m carrywave.benchmarks.quality_runs.peer_worker JOB.json RESULT.json`. The data is read by carrywave, and so are batches, targets
and metrics, so that what is trained on and what is scored is the same to the last row.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from carrywave.benchmarks.peers import simple_baselines, torch_defaults
from carrywave.benchmarks.quality_runs.data_sets import HIGHER
from carrywave.data.files.arrays import MemoryAppender
from carrywave.data.prepare import prepare
from carrywave.data.python_inputs import series_of
from carrywave.data.tables import series
from carrywave.spec.defaults import fitted
from carrywave.spec.load import load
from carrywave.tasks.task import Part, Task

# How data is read for plain PyTorch and simple baselines, whatever carrywave's defaults are: values in units of train's deviations, and
# forecasts of the values themselves.
PLAIN = {
    "language": (),
    **dict.fromkeys(("classification", "tagging", "regression"), ("data.standardize=true",)),
    "forecasting": ("data.standardize=true", "data.residual=none", "data.channels=joint", "model.linear=0", "batch.windows=contiguous"),
}


def main(job_file: str, result_file: str) -> None:
    """Do what the job says, and write what came of it."""
    Path(result_file).write_text(json.dumps(done(json.loads(Path(job_file).read_text()))))


def done(job: dict[str, Any]) -> dict[str, Any]:
    """The figure of a job, its seconds and a note; a job has `column`, `words`, `metric`, `part`, `lags`, `steps` and `follows`."""
    task, parts = read(job["words"], job["follows"])
    begin = time.perf_counter()
    if job["column"] == "torch":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        reached = torch_defaults.train(task, parts, job["part"], steps=job["steps"], device=device)
        return {"figure": reached.values[job["metric"]], "seconds": reached.seconds, "note": f"{reached.steps} steps"}
    found = simple_baselines.baselines(task, parts, job["part"], job["metric"], job["lags"])
    name = (max if job["metric"] in HIGHER else min)(found, key=lambda each: found[each])
    others = ", ".join(f"{other} {figure:.4g}" for other, figure in found.items() if other != name)
    note = f"{name}; {others}" if others else name
    return {"figure": found[name], "seconds": time.perf_counter() - begin, "note": note}


def read(words: Sequence[str], follows: str | None = None) -> tuple[Task, dict[str, Part]]:
    """The task and the parts of its data; `follows`: a file of train's series whose last horizon is the test."""
    spec = load(None, [*words, *PLAIN[load(None, words).task]])
    prepared = prepare(spec)
    spec = fitted(spec, prepared.facts)
    task = Task.of(spec, prepared.codec, prepared.facts, prepared.train)
    found = {"train": prepared.train, "valid": prepared.valid, "test": prepared.test}
    if follows is not None:
        whole = series.encoded(series_of(follows, prepared.codec, spec, labelled=True), prepared.codec, MemoryAppender)
        found["test"] = replace(whole, warm=whole.lengths - spec.data.horizon)
    return task, {name: task.part(name, data) for name, data in found.items() if data is not None}


if __name__ == "__main__":
    main(*sys.argv[1:])
