"""Stub."""

from __future__ import annotations

import csv
import io

import pandas as pd

from carrywave.data.files.source import Source
from carrywave.spec.data_spec import DataSpec


def read_frame(source: Source, data: DataSpec, as_text: bool = True) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Stub."""
    text = "".join(source.texts())
    tabs = text.split("\n", 1)[0].count("\t")
    commas = text.split("\n", 1)[0].count(",")
    sep = "\t" if tabs and tabs >= commas else ","
    first = next(csv.reader(io.StringIO(text), delimiter=sep))
    header = None if any(len(c) > 30 or c.replace(".", "").replace("-", "").isdecimal() for c in first) else 0
    quoting = csv.QUOTE_NONE if sep == "\t" else csv.QUOTE_MINIMAL
    frame = pd.read_csv(io.StringIO(text), sep=sep, header=header, dtype=str, keep_default_na=False, quoting=quoting, names=None)
    frame.columns = [str(c) for c in frame.columns]
    return frame, () if header == 0 else (f"{source.name}: no header",)
