"""A worker of test_train.py: trains, stops, resumes and evaluates on the plans that its job file lists, one after the other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from carrywave.errors import UserError
from carrywave.spec.load import parse
from carrywave.train.fit import train
from carrywave.train.predict import predict
from carrywave.train.saved import evaluate_run


def carry_out(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    try:
        if "evaluate" in job:
            told["row"] = evaluate_run(folder / job["evaluate"], device="cpu")
        elif "predict" in job:
            told["rows"] = predict(folder / job["predict"], folder / job["data"], device="cpu")
        else:
            if job.get("alien") == int(os.environ["RANK"]):
                job["spec"]["train"]["lr"] = 0.125
            result = train(parse(job["spec"]), run=folder / job["run"], resume=job.get("resume", False), device="cpu")
            told = {"ending": result.ending, "metrics": result.metrics}
    except UserError as error:
        told["error"] = f"{type(error).__name__}: {error}"
    return told


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    told = [carry_out(folder, job) for job in json.loads((folder / name).read_text())]
    (folder / f"{name}.{os.environ['RANK']}.out").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
