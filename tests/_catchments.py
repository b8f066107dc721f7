"""Synthetic catchments: rain runs off through two linear reservoirs, a quick one and a slow one, of a size of its own in each."""

from __future__ import annotations

import numpy as np
import pandas as pd


def catchments(basins: int, days: int, *, seed: int = 0, holes: float = 0.1) -> pd.DataFrame:
    """A table with a row for each basin and day: weather, attributes of the basin, and its discharge, of which a share is missing."""
    draw = np.random.default_rng(seed)
    parts = []
    for number in range(basins):
        quick, fast, slow = draw.uniform(0.2, 0.9), draw.uniform(2, 6), draw.uniform(20, 60)
        rain = draw.gamma(0.4, 8.0, days) * (draw.random(days) < 0.4)
        warmth = 10 + 10 * np.sin(2 * np.pi * np.arange(days) / 365) + draw.normal(0, 1, days)
        wet = np.maximum(rain - 0.1 * np.maximum(warmth, 0), 0)
        flow = np.zeros(days)
        for share, time in ((quick, fast), (1 - quick, slow)):
            store = 5.0
            for day in range(days):
                store += share * wet[day]
                flow[day] += store / time
                store -= store / time
        flow[draw.random(days) < holes] = np.nan
        weather = {"rain": rain, "warmth": warmth, "quick": quick, "fast": fast, "slow": slow}
        parts.append(pd.DataFrame({"basin": f"b{number}", "date": pd.date_range("2000-01-01", periods=days), **weather, "flow": flow}))
    return pd.concat(parts, ignore_index=True)
