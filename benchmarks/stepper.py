"""Claim: a trained run answers a step of a client on a CPU in well under a millisecond (1 x 128), and many clients in one batch.

`stepper.step_rows` of a tagger with 16 numbers a step: rows are checked and standardised, the carries of the clients are looked up and
kept, and the probabilities of 8 labels come out. The peer is the plain program, `nn.LSTM` one step at a time and a linear layer, which is
given ready tensors, keeps the carry of all clients as one, and checks nothing. Both take turns, on one thread, in float32; `worst_ms` is
the 99th percentile of the stepper.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks.harness.command import main
from benchmarks.harness.timing import one_thread, spread, take_turns
from carrywave.data.codec import Codec
from carrywave.parallel.worker_pool import Row
from carrywave.prediction.stepper import Stepper
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.tasks.task import Task

FEATURES, LABELS = 16, 8
CASES = ((1, 128, 1), (1, 128, 16), (1, 128, 256), (2, 512, 1), (2, 512, 64))  # layers, units, clients
QUICK = ((1, 16, 1), (2, 16, 3))
BOUND_MS = {(1, 128, 1): 1.0}
ROUNDS, STEPS, WARM_UP = 9, 200, 20


def run(*, quick: bool = False) -> list[Row]:
    """One row for each case."""
    with one_thread():
        return [_row(*case, steps=5 if quick else STEPS) for case in (QUICK if quick else CASES)]


def _row(layers: int, hidden: int, clients: int, *, steps: int) -> Row:
    loops = loops_of(layers, hidden, clients)
    for loop in loops.values():
        for _ in range(WARM_UP):
            loop()

    def block(loop: Callable[[], object]) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(steps):
            loop()
            times.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]

    ms = take_turns({name: lambda loop=loop: block(loop) for name, loop in loops.items()}, ROUNDS)  # type: ignore[misc]
    medians = {name: [statistics.median(each) for each in blocks] for name, blocks in ms.items()}
    ours, plain = (statistics.median(medians[name]) for name in ("stepper", "plain"))
    return {
        "case": f"{layers} x {hidden}",
        "clients": clients,
        "stepper_ms": round(ours, 4),
        "worst_ms": round(sorted(each for one in ms["stepper"] for each in one)[int(0.99 * ROUNDS * steps)], 4),
        "plain_ms": round(plain, 4),
        "ratio": round(plain / ours, 2),
        "spread": f"{max(spread(each) for each in medians.values()):.1%}",
        "bound_ms": BOUND_MS.get((layers, hidden, clients)),
    }


def loops_of(layers: int, hidden: int, clients: int) -> dict[str, Callable[[], torch.Tensor]]:
    """A step of all clients by the stepper, and by the plain program with the same weights."""
    labels, columns = tuple(f"label {place}" for place in range(LABELS)), tuple(f"column {place}" for place in range(FEATURES))
    codec = Codec("tagging", "steps", labels=labels, columns=columns, mean=(0.0,) * FEATURES, std=(1.0,) * FEATURES)
    spec = parse({"task": "tagging", "model": {"hidden": hidden, "layers": layers, "bidirectional": False, "crf": False}})
    task = Task(spec, codec, DataFacts(features=FEATURES, labels=labels))
    model = task.model()
    stepper, names = Stepper(model, task), [f"client {place}" for place in range(clients)]
    rows_BF = np.random.default_rng(1).normal(size=(clients, FEATURES)).astype(np.float32)

    lstm = nn.LSTM(FEATURES, hidden, layers)
    lstm.load_state_dict(model.lstm.state_dict())
    x_1BF, head, carry = torch.from_numpy(rows_BF)[None], model.head, None

    @torch.inference_mode()
    def plain() -> torch.Tensor:
        nonlocal carry
        y_1BH, carry = lstm(x_1BF, carry)
        return nn.functional.linear(y_1BH[0], head.weight, head.bias).softmax(-1)  # type: ignore[arg-type]

    return {"stepper": lambda: stepper.step_rows(names, rows_BF), "plain": plain}


if __name__ == "__main__":
    main("benchmarks.stepper")
