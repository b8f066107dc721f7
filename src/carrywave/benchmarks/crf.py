"""Claim: the loss of a CRF with its gradients, and its best paths, take at most a fifth of the time that they take in pytorch-crf.

A call is the loss of a batch with the gradients of emissions and transitions (`loss`), or the best path of every lane (`paths`). Peers run
in the same process and take turns; the median over rounds counts. `torchcrf` is pytorch-crf if it is installed, whose paths are lists on
the host; `loop` is a loop over steps as it is usually written, launched and as a CUDA graph. The error is the largest relative one of the
loss or a gradient against float64, and for paths the share of steps whose label is not the loop's. `ratio` is torchcrf's time, or without
it the loop's, relative to ours when both are launched.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from carrywave.benchmarks.harness import gpu_timing
from carrywave.benchmarks.peers.crf_loops import ChainCase, Chains
from carrywave.measure.timing import Call

CASES = (
    ChainCase(9, 32, 32),  # CoNLL-2003
    ChainCase(9, 128, 128),
    ChainCase(72, 128, 32),  # SNIPS
    ChainCase(127, 128, 32),  # ATIS
    ChainCase(127, 340, 12),
    ChainCase(17, 16, 1024),
)
QUICK = (ChainCase(5, 4, 8),)
RATIO = 5.0
BLOCK_MS, BUDGET_MS, ROUNDS = 20.0, 3000.0, (3, 15)


def run(*, quick: bool = False) -> list[dict[str, object]]:
    """Two rows for each case: the loss and the paths."""
    device = gpu_timing.cuda_device("crf")
    rows = []
    for case in QUICK if quick else CASES:
        chains = Chains(case, device)
        calls: dict[str, Callable[[], object]] = {"ours": chains.ours, "loop": chains.loop, "torchcrf": chains.theirs}
        paths: dict[str, Callable[[], object]] = {"ours": chains.our_paths, "loop": chains.loop_paths, "torchcrf": chains.their_paths}
        budget_ms = BUDGET_MS / 10 if quick else BUDGET_MS
        known = ["ours", "loop", *(["torchcrf"] if chains.torchcrf is not None else [])]
        rows.append(row_of(case, "loss", _timed({name: calls[name] for name in known}, budget_ms), largest_error(chains)))
        other = float((chains.our_paths() != chains.loop_paths())[chains.real_TB].double().mean())
        rows.append(row_of(case, "paths", _timed({name: paths[name] for name in known}, budget_ms), other))
        del chains
        torch.cuda.empty_cache()  # graphs hold private memory pools
    return rows


def _timed(calls: Mapping[str, Call], budget_ms: float) -> dict[str, float]:
    ready = {f"{name}_eager": gpu_timing.warmed_up(call) for name, call in calls.items()}
    ready |= {f"{name}_graph": gpu_timing.graphed(call) for name, call in calls.items() if name != "torchcrf"}  # it reads the host
    timed = gpu_timing.time_calls(ready, block_ms=BLOCK_MS, budget_ms=budget_ms, rounds=ROUNDS)
    return {name: statistics.median(values) for name, values in timed.items()}


def largest_error(chains: Chains) -> float:
    """The largest relative error of our loss and gradients against float64."""
    return max(_relative(own, exact) for own, exact in zip(chains.ours(), chains.exact(), strict=True))


def _relative(own: Tensor, exact: Tensor) -> float:
    return float((own.double() - exact).norm() / exact.norm().clamp(min=1e-12))


def row_of(case: ChainCase, what: str, ms: Mapping[str, float], error: float) -> dict[str, object]:
    """The row of a case."""
    peer = ms.get("torchcrf_eager", ms["loop_eager"])
    names = ("torchcrf_eager", "loop_eager", "loop_graph", "ours_eager", "ours_graph")
    return {
        "case": case.name,
        "what": what,
        **{f"{name}_ms": None if name not in ms else round(ms[name], 4) for name in names},
        "ratio": round(peer / ms["ours_eager"], 1),
        "graph_ratio": round(ms["loop_graph"] / ms["ours_graph"], 1),
        "error": float(f"{error:.1e}"),
        "target": f"ratio >= {RATIO:g}",
    }
