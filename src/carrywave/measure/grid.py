"""Measures a device on a grid of sizes, for a profile to be shared: `python -m carrywave.measure.grid FILE NAME [cpu|cuda]`.

A machine's own profile holds only the sizes of the models planned on it; a shared profile has to cover all models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from carrywave.measure.profiles import MEASURED_BY, empty, merged, threads
from carrywave.parallel import worker_pool
from carrywave.plan.cost.profile import Profile
from carrywave.plan.cost.sample_requests import Ask
from carrywave.plan.cost.shipped_profiles import LINKS

HIDDEN, LANES, STEPS = (128, 256, 512, 1024, 2048), (16, 64), (8, 32, 128)
OTHER_INPUTS = ((256, 1024), (1024, 256))  # (inputs, hidden) of layers whose input width differs from their own
WIDTHS, WORDS = (256, 1024), (2_000, 10_000, 50_000)
TOGETHER = ((256, 16, 4), (512, 16, 8), (1024, 64, 4))  # (hidden, lanes, layers in one call)
PRECISIONS = ("bf16", "fp32", "tf32")
OPTIMIZERS = ("adam", "sgd")
DEVICES_PER_HOST = 8


def grid(precision: str) -> Iterator[Ask]:
    """The calls to time in one precision."""
    for hidden in HIDDEN:
        for lanes in LANES:
            for steps in STEPS:
                yield Ask("lstm", hidden, hidden, lanes, steps, precision=precision)
    for inputs, hidden in OTHER_INPUTS:
        yield Ask("lstm", inputs, hidden, 32, 64, precision=precision)
    for hidden, lanes, layers in TOGETHER:
        yield Ask("lstm", hidden, hidden, lanes, 64, precision=precision, layers=layers)
    for width in WIDTHS:
        for words in WORDS:
            for lanes, steps in ((16, 8), (32, 64)):
                yield Ask("softmax", width, words, lanes, steps, precision=precision)
                yield Ask("embedding", words, width, lanes, steps, precision=precision)
        for lanes, steps in ((16, 8), (32, 64)):
            yield Ask("linear", width, 24, lanes, steps, precision=precision)
            yield Ask("dropout", width, width, lanes, steps, precision=precision)
            yield Ask("norm", width, width, lanes, steps, precision=precision)


def measure(name: str, kind: str) -> Profile:
    """Measure this machine's devices. For GPUs, hosts of eight are assumed, with the usual links, since none are measured here."""
    found = empty(kind)
    for precision in PRECISIONS if kind == "cuda" else ("fp32",):
        asks = [ask.to_json() for ask in grid(precision)]
        optimizers = OPTIMIZERS if precision == "bf16" or kind == "cpu" else ()
        job = {"device": kind, "precision": precision, "asks": asks, "optimizers": optimizers, "links": False}
        found = merged(found, worker_pool.start(MEASURED_BY, job, 1, threads=threads(1), name="the measurement"), 1)
    if kind == "cuda":
        overheads = replace(found.overheads, message_seconds=20e-6)  # one kernel launch each; assumed, as there was no second GPU
        found = replace(found, within=LINKS["nvlink4"], between=LINKS["infiniband-ndr"], overheads=overheads)
        found = replace(found, devices_per_host=DEVICES_PER_HOST)
    return replace(found, name=name)


if __name__ == "__main__":
    measure(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "cuda").write(Path(sys.argv[1]))
