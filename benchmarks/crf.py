"""Claim: the loss of a CRF with its gradients, and its best paths, take at most a fifth of the time that they take in pytorch-crf.

A call is the loss of a batch with the gradients of emissions and transitions (`loss`), or the best path of every lane (`paths`). Peers run
in the same process and take turns; the median over rounds counts. `torchcrf` is pytorch-crf if it is installed, whose paths are lists on
the host; `loop` is a loop over steps as it is usually written, launched and as a CUDA graph. The error is the largest relative one of the
loss or a gradient against float64, and for paths the share of steps whose label is not the loop's. `ratio` is torchcrf's time, or without
it the loop's, relative to ours when both are launched.

Shapes: T time, B lane, V labels.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import timing
from benchmarks.harness.command import main
from carrywave.kernels.crf import definition, dispatch
from carrywave.kernels.crf.definition import Chain


@dataclass(frozen=True)
class ChainCase:
    """Sizes of a batch; lanes are between half as long as the longest and as long."""

    labels: int
    lanes: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.labels} labels B{self.lanes} T{self.steps}"


class Chains:
    """Emissions, labels and the scores of a chain on a device. Every loss is a sum over lanes, and comes with its gradients."""

    def __init__(self, case: ChainCase, device: torch.device | str) -> None:
        draw = torch.Generator().manual_seed(1)
        self.lengths_B = torch.randint((case.steps + 1) // 2, case.steps + 1, (case.lanes,), generator=draw)
        self.lengths_B[0] = case.steps
        self.real_TB = (torch.arange(case.steps)[:, None] < self.lengths_B).to(device)
        self.lengths_B = self.lengths_B.to(device)
        self.tags_TB = torch.randint(case.labels, (case.steps, case.lanes), generator=draw).to(device)
        sizes = ((case.steps, case.lanes, case.labels), (case.labels,), (case.labels, case.labels), (case.labels,))
        self.leaves = [torch.randn(size, generator=draw).to(device).requires_grad_() for size in sizes]
        self.torchcrf = self._torchcrf(case, device)

    def _torchcrf(self, case: ChainCase, device: torch.device | str) -> Any:
        """pytorch-crf with these scores; None if it is not installed."""
        try:
            model = importlib.import_module("torchcrf").CRF(case.labels).to(device)
        except ImportError:
            return None
        with torch.no_grad():
            for name, leaf in zip(("start_transitions", "transitions", "end_transitions"), self.leaves[1:], strict=True):
                getattr(model, name).copy_(leaf)
        return model

    def ours(self) -> list[Tensor]:
        """By our kernels, on a GPU."""
        emissions, *chain = self.leaves
        return self._with_slopes(dispatch.summed(emissions, self.tags_TB, self.lengths_B, Chain(*chain)), self.leaves)

    def loop(self) -> list[Tensor]:
        """By a loop with a logsumexp at every step."""
        emissions_TBV, start_V, transitions_VV, end_V = self.leaves
        lanes_B = torch.arange(emissions_TBV.shape[1], device=emissions_TBV.device)
        alpha_BV = start_V + emissions_TBV[0]
        tag_B = self.tags_TB[0]
        score_B = start_V[tag_B] + emissions_TBV[0, lanes_B, tag_B]
        for t in range(1, len(emissions_TBV)):
            real_B, now_B = self.real_TB[t], self.tags_TB[t]
            next_BV = torch.logsumexp(alpha_BV[:, :, None] + transitions_VV + emissions_TBV[t, :, None], dim=1)
            alpha_BV = torch.where(real_B[:, None], next_BV, alpha_BV)
            score_B = score_B + torch.where(real_B, transitions_VV[tag_B, now_B] + emissions_TBV[t, lanes_B, now_B], 0.0)
            tag_B = torch.where(real_B, now_B, tag_B)
        total = (torch.logsumexp(alpha_BV + end_V, dim=1) - score_B - end_V[tag_B]).sum()
        return self._with_slopes(total, self.leaves)

    def theirs(self) -> list[Tensor]:
        """By pytorch-crf."""
        model = self.torchcrf
        leaves = [self.leaves[0], model.start_transitions, model.transitions, model.end_transitions]
        return self._with_slopes(-model(self.leaves[0], self.tags_TB, mask=self.real_TB), leaves)

    def exact(self) -> list[Tensor]:
        """By the definition in float64."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        return self._with_slopes(definition.losses(leaves[0], self.tags_TB, self.lengths_B, Chain(*leaves[1:])).sum(), leaves)

    def _with_slopes(self, total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        return [total.detach(), *torch.autograd.grad(total, leaves)]

    def our_paths(self) -> Tensor:
        """The best paths by our kernels, on a GPU."""
        return dispatch.best_paths(self.leaves[0].detach(), self.lengths_B, Chain(*(leaf.detach() for leaf in self.leaves[1:])))

    def loop_paths(self) -> Tensor:
        """The best paths by a loop, whose look back stays on the device."""
        return definition.best_paths(self.leaves[0].detach(), self.lengths_B, Chain(*(leaf.detach() for leaf in self.leaves[1:])))

    def their_paths(self) -> list[list[int]]:
        """The best paths by pytorch-crf, as lists."""
        with torch.no_grad():
            found: list[list[int]] = self.torchcrf.decode(self.leaves[0], mask=self.real_TB)
        return found


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
    device = timing.cuda_device()
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


def _timed(calls: Mapping[str, timing.Call], budget_ms: float) -> dict[str, float]:
    ready = {f"{name}_eager": timing.warmed_up(call) for name, call in calls.items()}
    ready |= {f"{name}_graph": timing.graphed(call) for name, call in calls.items() if name != "torchcrf"}  # it reads the host
    timed = timing.time_calls(ready, block_ms=BLOCK_MS, budget_ms=budget_ms, rounds=ROUNDS)
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


if __name__ == "__main__":
    main("benchmarks.crf")
