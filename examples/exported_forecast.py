"""An exported forecaster without carrywave: reads the series `a` of sales.csv, whose rows go on for a horizon with what is known ahead.

What a step is made of is in model.json, as docs/export.md says. Export first: carrywave export runs/NAME --to torch

    python examples/exported_forecast.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch

folder = Path("exports/NAME-torch")
about = json.loads((folder / "model.json").read_text())
codec, data, step = about["codec"], about["data"], about["step"]

rows = pd.read_csv("sales.csv", parse_dates=["ds"])
rows = rows[rows["unique_id"] == "a"].sort_values("ds", ignore_index=True)
known = int(rows["y"].notna().sum())  # the rows after these are ahead
for name, position, cycle in (("weekday", rows["ds"].dt.day_of_week, 7), ("month", rows["ds"].dt.month - 1, 12)):
    rows[f"{name}_sin"], rows[f"{name}_cos"] = np.sin(2 * np.pi * position / cycle), np.cos(2 * np.pi * position / cycle)

place = codec["names"].index("a") if codec["names"] else None  # several series in train: each has its own scale
mean, std = (codec["mean"], codec["std"]) if place is None else (codec["means"][place], codec["stds"][place])
numbers = {column: (rows[column] - m) / s for column, m, s in zip(codec["columns"], mean, std, strict=True)}
categories = {
    column: rows[column].map({value: code for code, value in enumerate(values, start=1)}).fillna(0)
    for column, values in zip(codec["categorical"], codec["categories"], strict=True)
}


def read(entry, columns):
    values = columns[entry["column"]]
    return (values - values.shift(entry["change"])).fillna(0) if "change" in entry else values.shift(-entry.get("ahead", 0))


x = np.stack([read(entry, numbers) for entry in step["x"]], axis=1)[None, :known].astype(np.float32)
codes = np.stack([read(entry, categories) for entry in step["codes"]], axis=1)[None, :known].astype(np.int64)
program = torch.export.load(folder / "model.pt2").module()  # or, in onnxruntime: session.run(None, {"x": x, "codes": codes})
[out] = program(torch.from_numpy(x), torch.from_numpy(codes))  # without categorical columns there is only x

target = codec["targets"][0]
y = numbers[codec["columns"][target]].to_numpy()
ahead = np.arange(1, data["horizon"] + 1)
# Where the row that "season" reads would lie before the first one, it takes the last value instead.
base = {"none": 0, "last": y[known - 1], "season": y[known - 1 + ahead - data["season"] * -(-ahead // data["season"])]}[data["starts_from"]]
forecast = (out[0, -1, :, 0].detach().numpy() + base) * std[target] + mean[target]
print(forecast)
