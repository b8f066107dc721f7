"""Makes one table of the files of CAMELS, river basins with their weather and their discharge, for regression at every step.

    python examples/streamflow.py FOLDER data/streamflow.parquet
    carrywave train examples/streamflow.yaml data.train=data/streamflow.parquet --run runs/streamflow

FOLDER has the files as they are published (ral.ucar.edu/solutions/products/camels): basin_mean_forcing/…/*_forcing_leap.txt,
usgs_streamflow/…/*_streamflow_qc.txt and camels_attributes_v2.0/camels_*.txt; all basins, or some of them. The table has a row for each
basin and day of 20 hydrological years, from October 1993: weather, the attributes of the basin, and its discharge in mm per day, empty
where it was not measured. The data is not ours to pass on; cite those who made it (Newman et al., 2015; Addor et al., 2017).
"""

from __future__ import annotations

import csv
import datetime as dt
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pa_parquet

FIRST, LAST = dt.date(1993, 10, 1), dt.date(2013, 9, 30)
WEATHER = {"PRCP(mm/day)": "rain", "SRAD(W/m2)": "sun", "Tmax(C)": "warmest", "Tmin(C)": "coldest", "Vp(Pa)": "vapour"}
MISSING = -999.0
CUBIC_FOOT = 0.3048**3  # m³
# Those that Kratzert et al. (2019) read.
ATTRIBUTES = (
    *("p_mean", "pet_mean", "aridity", "p_seasonality", "frac_snow", "high_prec_freq", "high_prec_dur", "low_prec_freq", "low_prec_dur"),
    *("elev_mean", "slope_mean", "area_gages2", "frac_forest", "lai_max", "lai_diff", "gvf_max", "gvf_diff"),
    *("soil_depth_pelletier", "soil_depth_statsgo", "soil_porosity", "soil_conductivity", "max_water_content"),
    *("sand_frac", "silt_frac", "clay_frac", "carbonate_rocks_frac", "geol_permeability"),
)


def main(folder: str, output: str) -> None:
    """Write the table of all basins that have weather, discharge and attributes."""
    root, target = Path(folder), Path(output)
    known = attributes(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with pa_parquet.ParquetWriter(target, schema()) as file:
        for forcing in sorted(root.glob("basin_mean_forcing/**/*_forcing_leap.txt")):
            basin = forcing.name.partition("_")[0]
            flows = next(root.glob(f"usgs_streamflow/**/{basin}_streamflow_qc.txt"), None)
            if flows is not None and basin in known:
                file.write_table(pa.table(rows(basin, forcing, flows, known[basin]), schema()))
                written += 1
    print(f"{target}: {written} basins, {(LAST - FIRST).days + 1:,} days each")


def schema() -> pa.Schema:
    numbers = [(name, pa.float32()) for name in (*WEATHER.values(), *ATTRIBUTES, "flow")]
    return pa.schema([("basin", pa.string()), ("date", pa.date32()), *numbers])


def attributes(root: Path) -> dict[str, dict[str, float]]:
    """The attributes of each basin, of those that have all of them."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(root.glob("camels_attributes_v2.0/camels_*.txt")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter=";"):
                numbers = {name: float(row[name]) for name in ATTRIBUTES if row.get(name)}
                found.setdefault(row["gauge_id"], {}).update(numbers)
    return {basin: values for basin, values in found.items() if values.keys() >= set(ATTRIBUTES)}


def rows(basin: str, forcing: Path, flows: Path, known: dict[str, float]) -> dict[str, list[Any]]:
    """The columns of one basin, a value for every day."""
    lines = forcing.read_text().splitlines()
    area = float(lines[2])  # m²
    names = lines[3].replace("Year Mnth Day Hr", "year month day hour").split()
    weather = {}
    for line in lines[4:]:
        year, month, day, _, *values = line.split()
        weather[dt.date(int(year), int(month), int(day))] = dict(zip(names[4:], map(float, values), strict=True))
    flow = {}
    for line in flows.read_text().splitlines():
        _, year, month, day, value, *_ = line.split()
        if float(value) != MISSING:
            flow[dt.date(int(year), int(month), int(day))] = float(value) * CUBIC_FOOT * 86_400 / area * 1000  # mm per day
    days = [FIRST + dt.timedelta(number) for number in range((LAST - FIRST).days + 1)]
    return {
        "basin": [basin] * len(days),
        "date": days,
        **{ours: [weather.get(day, {}).get(theirs) for day in days] for theirs, ours in WEATHER.items()},
        **{name: [known[name]] * len(days) for name in ATTRIBUTES},
        "flow": [flow.get(day) for day in days],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
