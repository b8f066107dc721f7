"""Claim: on one thread of a CPU, a call of a small stack takes no longer than torch's module does: training and forward without gradients
at most 1.1 times as long, a single step 1.2, and training through 50 steps of one call each, as char-rnn does it, 1.05.

The same random inputs and weights in float32, 2 layers of equal width. Both take turns, round by round, and the medians over all calls
count; the loop through 50 calls has an embedding before the layers and a linear layer after them, as the program has.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.harness.command import main
from benchmarks.harness.timing import one_thread, spread, take_turns
from carrywave.model.lstm import class_of
from carrywave.parallel.worker_pool import Row

KINDS = ("lstm", "gru", "rnn")
CASES = ((64, 32, 20), (64, 20, 35), (128, 20, 35), (200, 20, 35))  # units, lanes, steps
QUICK = ((8, 2, 3),)
TARGETS = {"training": 1.1, "forward": 1.1, "step": 1.2, "step by step": 1.05}  # times torch's, at most
ROUNDS, SECONDS, SYMBOLS = 15, 0.1, 100


def run(*, quick: bool = False, kinds: Sequence[str] = KINDS) -> list[Row]:
    """One row for each cell, size and kind of call."""
    with one_thread():
        return [_row(kind, case, name, quick=quick) for kind in kinds for case in (QUICK if quick else CASES) for name in TARGETS]


def _row(kind: str, case: tuple[int, int, int], name: str, *, quick: bool) -> Row:
    calls = calls_of(kind, *case)[name]

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
    units, lanes, steps = case
    return {
        "case": f"{kind} 2 x {units}, {lanes} lanes" + ("" if name == "step" else f" x {50 if name == 'step by step' else steps} steps"),
        "call": name,
        **{f"{who}_ms": round(statistics.median(each), 4) for who, each in ms.items()},
        "ratio": round(statistics.median(ms["ours"]) / statistics.median(ms["torch"]), 3),
        "target": TARGETS[name],
        "spread": {who: spread(each) for who, each in ms.items()},
    }


def calls_of(kind: str, units: int, lanes: int, steps: int) -> Mapping[str, Mapping[str, Callable[[], Any]]]:
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


if __name__ == "__main__":
    main("benchmarks.calls")
