"""Claim: on one thread of a CPU, a call of a small stack takes no longer than torch's module does: training and forward without gradients
at most 1.1 times as long, a single step 1.2, and training through 50 steps of one call each, as char-rnn does it, 1.05. A stepper answers a
client of a trained run (1 x 128) in well under a millisecond.

The same random inputs and weights in float32, 2 layers of equal width. Both take turns, round by round, and the medians over all calls
count; the loop through 50 calls has an embedding before the layers and a linear layer after them, as the program has. `stepper` is
`step_rows` of a tagger with 16 numbers a step for so many clients: rows are checked and standardised, carries are looked up and kept, and
probabilities of 8 labels come out; torch's module with a linear layer is given ready tensors, keeps one carry and checks nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.harness.command import main
from benchmarks.harness.timing import one_thread, spread, take_turns
from carrywave.data.codec import Codec
from carrywave.model.lstm import class_of
from carrywave.parallel.worker_pool import Row
from carrywave.prediction.stepper import Stepper
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.tasks.task import Task

KINDS = ("lstm", "gru", "rnn")
CASES = ((64, 32, 20), (64, 20, 35), (128, 20, 35), (200, 20, 35))  # units, lanes, steps
QUICK = ((8, 2, 3),)
CLIENTS = ((1, 128, 1), (1, 128, 16), (1, 128, 256), (2, 512, 1), (2, 512, 64))  # layers, units, clients of a stepper
QUICK_CLIENTS = ((1, 16, 3),)
TARGETS = {"training": 1.1, "forward": 1.1, "step": 1.2, "step by step": 1.05}  # times torch's, at most
ROUNDS, SECONDS, SYMBOLS = 15, 0.1, 100
FEATURES, LABELS = 16, 8

Calls = Mapping[str, Callable[[], Any]]


def run(*, quick: bool = False, kinds: Sequence[str] = KINDS) -> list[Row]:
    """One row for each cell, size and kind of call, then one for each number of clients."""
    rows: list[Row] = []
    with one_thread():
        for kind, (units, lanes, steps), name in itertools.product(kinds, QUICK if quick else CASES, TARGETS):
            many = "" if name == "step" else f" x {50 if name == 'step by step' else steps} steps"
            calls = calls_of(kind, units, lanes, steps)[name]
            rows.append(_row(f"{kind} 2 x {units}, {lanes} lanes{many}", name, calls, TARGETS[name], quick=quick))
        for layers, units, clients in QUICK_CLIENTS if quick else CLIENTS:
            many = f"lstm {layers} x {units}, {clients} client{'s' * (clients > 1)}"
            rows.append(_row(many, "stepper", stepper_calls(layers, units, clients), None, quick=quick))
    return rows


def _row(case: str, name: str, calls: Calls, target: float | None, *, quick: bool) -> Row:
    def block(call: Callable[[], object]) -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + (0.0 if quick else SECONDS)
        while not times or time.perf_counter() < end:
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        return times

    blocks = take_turns({who: lambda call=call: block(call) for who, call in calls.items()}, 2 if quick else ROUNDS)  # type: ignore[misc]
    ms = {who: [statistics.median(each) for each in found[1:]] for who, found in blocks.items()}  # the first round warms up
    ours = sorted(each for one in blocks["ours"][1:] for each in one)
    return {
        "case": case,
        "call": name,
        **{f"{who}_ms": round(statistics.median(each), 4) for who, each in ms.items()},
        "worst_ms": round(ours[int(0.99 * len(ours))], 4),
        "ratio": round(statistics.median(ms["ours"]) / statistics.median(ms["torch"]), 3),
        "target": target,
        "spread": {who: spread(each) for who, each in ms.items()},
    }


def calls_of(kind: str, units: int, lanes: int, steps: int) -> Mapping[str, Calls]:
    """What is timed, by the kind of call, of torch's module and of ours; each returns its outputs."""
    torch.manual_seed(0)
    ours: Any = class_of(kind)(units, units, 2)
    theirs = getattr(nn, kind.upper())(units, units, 2)
    theirs.load_state_dict(ours.state_dict())
    rows, out = nn.Embedding(SYMBOLS, units), nn.Linear(units, SYMBOLS)
    x, text = torch.randn(steps, lanes, units), torch.randint(SYMBOLS, (51, lanes))

    def training(layers: nn.Module) -> Tensor:
        layers.zero_grad()
        y: Tensor = layers(x)[0]
        y.sum().backward()  # type: ignore[no-untyped-call]
        return y.detach()

    @torch.no_grad()
    def forward(layers: nn.Module) -> Any:
        return layers(x)

    with torch.no_grad():
        state = theirs(x)[1]

    @torch.no_grad()
    def step(layers: nn.Module) -> Any:
        return layers(x[:1], state)

    def step_by_step(layers: nn.Module) -> Tensor:
        layers.zero_grad()
        losses, before = [], state
        for now, after in itertools.pairwise(text):
            y, before = layers(rows(now)[None], before)
            losses.append(cross_entropy(out(y[0]), after))
        loss = torch.stack(losses).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    every = zip(TARGETS, (training, forward, step, step_by_step), strict=True)
    return {name: {"torch": lambda call=call: call(theirs), "ours": lambda call=call: call(ours)} for name, call in every}  # type: ignore[misc]


def stepper_calls(layers: int, hidden: int, clients: int) -> Calls:
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

    return {"torch": plain, "ours": lambda: stepper.step_rows(names, rows_BF)}


if __name__ == "__main__":
    main("benchmarks.calls")
