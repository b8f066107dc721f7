"""The lines of code that docs/architecture.md quotes are in the source, in this order."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_quoted_lines_are_those_of_the_engine() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    quoted, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    source = [line.strip() for line in (ROOT / "src/carrywave/step/engine.py").read_text().splitlines()]
    places = [source.index(line.strip()) for line in quoted.splitlines() if line.strip() != "…"]
    runs = [[source.index(line.strip()) for line in part.strip().splitlines()] for part in quoted.split("…")]
    assert len(places) > 4
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)  # nothing is left out without a word
