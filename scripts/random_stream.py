#!/usr/bin/env python
"""Pipes carrywave's random words, in a named order, into a statistical test battery; docs/architecture.md#randomness has the results.

    scripts/random_stream.py                              list the orders
    scripts/random_stream.py units dieharder -a -g 200    pipe the words of one order into this command
    scripts/random_stream.py units --keys 3 …             use keys derived from seed 3

Needs a C compiler (cc, or the one named by CC).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from carrywave.kernels import random

SOURCE = Path(__file__).with_name("random_stream.c")
KEYS = 1 << 16


class Order(NamedTuple):
    """The arguments of `random_stream.c`: the function, its coordinates, the loops over them (innermost first), and the bits taken."""

    function: str
    coordinates: str
    order: str
    part: str = "0:32"

    def taking(self, part: str) -> Order:
        return self._replace(part=part)


DROPOUT, LOCKED, WEIGHTS, WORDS = "key,layer,time,lane,unit", "key,layer,lane,unit", "key,row,column", "key,layer,token"
_UNITS = Order("keyed", DROPOUT, "unit=650,lane=20,time=35,layer=4,key=65536")
_LANES = Order("keyed", DROPOUT, "lane=64,unit=650,time=35,layer=4,key=65536")
_TIMES = Order("keyed", DROPOUT, "time=128,unit=650,lane=20,layer=4,key=65536")
_STEPS = Order("keyed", DROPOUT, "key=65536,unit=650,lane=20,time=35,layer=4")
_ROWS = Order("keyed", WEIGHTS, "column=1024,row=4096,key=65536")
_COLUMNS = Order("keyed", WEIGHTS, "row=4096,column=1024,key=65536")
_ORDER = "seed,epoch,site,index"

ORDERS = {
    # The order in which masks are drawn: units of a lane, then the next lane, time, layer and step.
    "units": _UNITS,
    "units-reversed": _UNITS.taking("reversed"),
    "units-low": _UNITS.taking("0:8"),
    "units-high": _UNITS.taking("24:8"),
    "units-mask": _UNITS.taking("31:1"),
    # One unit across lanes, times, layers or steps: the sequence a unit sees.
    "lanes": _LANES,
    "lanes-reversed": _LANES.taking("reversed"),
    "lanes-mask": _LANES.taking("31:1"),
    "times": _TIMES,
    "times-mask": _TIMES.taking("31:1"),
    "layers": Order("keyed", DROPOUT, "layer=8,unit=650,lane=20,time=35,key=65536"),
    "sites": Order("keyed", "key,site,time,lane,unit", "site=65536,unit=650,lane=20,time=35"),
    "steps": _STEPS,
    "steps-mask": _STEPS.taking("31:1"),
    # Few units, so that rows change often; and single units over very many lanes or times.
    "short-rows": Order("keyed", DROPOUT, "unit=4,lane=4096,time=4096,layer=4,key=65536"),
    "first-unit-of-lanes": Order("keyed", DROPOUT, "lane=65536,time=65536,layer=4"),
    "first-unit-of-times": Order("keyed", DROPOUT, "time=65536,lane=65536,layer=4"),
    "pairs-of-layers": Order("keyed", DROPOUT, "layer=2,time=65536,lane=65536"),
    # Locked masks (lane, unit), weights (row, column), embeddings (token).
    "locked": Order("keyed", LOCKED, "unit=650,lane=64,layer=4,key=65536"),
    "locked-lanes": Order("keyed", LOCKED, "lane=64,unit=650,layer=4,key=65536"),
    "rows": _ROWS,
    "rows-reversed": _ROWS.taking("reversed"),
    "columns": _COLUMNS,
    "columns-reversed": _COLUMNS.taking("reversed"),
    "words": Order("keyed", WORDS, "token=10000,key=65536,layer=8"),
    # The words behind `normal`, which combines those of sites 1 and 2 into one number.
    "normal": Order("keyed", "key,site,row,column", "site=3,column=1024,row=4096,key=65536"),
    # The order of the data: over the indices of an epoch, over epochs, over seeds, over sites.
    "order-indices": Order("order", _ORDER, "index=100000,site=7,epoch=1000,seed=1000"),
    "order-epochs": Order("order", _ORDER, "epoch=1000,index=100000,site=7,seed=1000"),
    "order-seeds": Order("order", _ORDER, "seed=100000,index=100000,epoch=1000"),
    "order-sites": Order("order", _ORDER, "site=7,index=100000,epoch=1000,seed=1000"),
}


def build(folder: Path) -> Path:
    """Compile the C program and return its path."""
    program = folder / "random_stream"
    subprocess.run([os.environ.get("CC", "cc"), "-O3", "-o", str(program), str(SOURCE)], check=True)
    return program


def keys(seed: int, count: int = KEYS) -> bytes:
    """The keys of consecutive steps of an epoch, as the trainer derives them."""
    return b"".join(random.key(seed, 0, step).numpy().tobytes() for step in range(count))


def main(words: list[str]) -> int:
    if not words:
        print("\n".join(f"{name:20} {' '.join(order)}" for name, order in ORDERS.items()))
        return 0
    name, command = words[0], words[1:]
    seed = 1
    if command[:1] == ["--keys"]:
        seed, command = int(command[1]), command[2:]
    with tempfile.TemporaryDirectory() as folder:
        program, key_file = build(Path(folder)), Path(folder) / "keys"
        key_file.write_bytes(keys(seed))
        with key_file.open("rb") as given, subprocess.Popen([program, *ORDERS[name]], stdin=given, stdout=subprocess.PIPE) as stream:
            battery = subprocess.run(command, stdin=stream.stdout)
            stream.kill()
    return battery.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
