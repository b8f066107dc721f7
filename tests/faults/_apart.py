"""`python _apart.py train …`: the command line, with a ledger, whose workers beyond rank 0 are on a host of their own.

What makes it a host of its own here is another working folder, in which relative paths lead to other files, and another cache.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import _ledger as ledger

if os.environ.get("RANK", "0") != "0":
    place = Path(f"host-{os.environ['RANK']}")
    place.mkdir(exist_ok=True)
    shutil.copyfile("rows.jsonl", place / "rows.jsonl")
    os.chdir(place)
    os.environ["CARRYWAVE_CACHE"] = str(Path("cache").absolute())
ledger.main()
