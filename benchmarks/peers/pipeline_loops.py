"""The peers of `pipeline`: plain PyTorch language models, serial, data parallel, and pipeline parallel.

They are as fast as plain PyTorch gets: the fastest LSTM available (`fastest_lstm`), the fused optimizer, gradients as views of DDP's
buckets, static shapes for torch.distributed.pipelining (which would otherwise infer them in an extra step), and a single scalar
all-reduced for gradient clipping. All of them compute what one worker would: the same loss and the same next weights.

Shapes: T time, B lane, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.shapes import BATCHES, LanguageShape
from benchmarks.harness.workers import TimedWorkers
from benchmarks.peers.plain_loops import descend
from carrywave.kernels.torch_kernels import without_onednn
from carrywave.model.lstm import LSTM

LR, CLIP = 1e-3, 1.0
LSTMS = NATIVE, ONEDNN, OURS = "nn.LSTM native", "nn.LSTM oneDNN", "cw.LSTM"
CPU = torch.device("cpu")

Step = Callable[[int], Tensor | None]  # runs one optimizer step; returns its loss on the workers that have it


def balanced_cuts(case: LanguageShape, stages: int, *, share_head: bool = False) -> tuple[int, ...]:
    """The cuts that minimise the load of the slowest stage, used for ours and for the peers: the first unit of each stage but the first.

    With `share_head` the head costs every stage the same, so it has no influence on the cuts.
    """
    # A recurrent matmul rereads its weights at every step and takes about 3 times as long as one matmul over all steps.
    layer, head = 4 * case.hidden * (1 + 3), case.vocabulary
    loads = [0, *[layer] * case.layers, 0 if share_head else head]

    def slowest(cuts: tuple[int, ...]) -> int:
        return max(sum(loads[first:end]) for first, end in itertools.pairwise((0, *cuts, case.units)))

    # The encoder always shares a stage with a layer: alone, it would leave its worker idle.
    return min(itertools.combinations(range(2, case.layers + 1 if share_head else case.units), stages - 1), key=slowest)


def ranges(cuts: Sequence[int], units: int) -> list[range]:
    """The units of each stage."""
    return [range(first, end) for first, end in itertools.pairwise((0, *cuts, units))]


class PlainStage(nn.Module):
    """A subset of the units: embedding (unit 0), layers, linear (the last unit). With all units it is the whole model."""

    def __init__(self, case: LanguageShape, lstm: str, units: Sequence[int]) -> None:
        super().__init__()
        layers = [unit - 1 for unit in units if 0 < unit <= case.layers]
        self.embedding = nn.Embedding(case.vocabulary, case.hidden) if 0 in units else None
        self.lstm = (LSTM if lstm == OURS else nn.LSTM)(case.hidden, case.hidden, len(layers)) if layers else None
        self.linear = nn.Linear(case.hidden, case.vocabulary) if case.layers + 1 in units else None
        weights = case.model().state_dict()
        wanted = {"embedding.weight": "encoder.weight", "linear.weight": "head.weight", "linear.bias": "head.bias"}
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            wanted |= {f"lstm.{part}_l{here}": f"lstm.{part}_l{layer}" for here, layer in enumerate(layers)}
        self.load_state_dict({mine: weights[ours] for mine, ours in wanted.items() if mine in self.state_dict()})

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [T, B], or the output [T, B, H] of the previous stage, to [T, B, H] or logits [T, B, V]."""
        x = x if self.embedding is None else self.embedding(x)
        x = x if self.lstm is None else self.lstm(x)[0]
        return x if self.linear is None else self.linear(x)


def mean_loss(logits_TBV: Tensor, target_TB: Tensor) -> Tensor:
    """Mean cross entropy over all targets; none of them is padding here."""
    return cross_entropy(logits_TBV.flatten(0, 1), target_TB.flatten())


def arithmetic(lstm: str) -> AbstractContextManager[object]:
    """The context for a peer's whole step: oneDNN is switched off for the native LSTM."""
    return without_onednn() if lstm == NATIVE else nullcontext()


def fastest_lstm(crew: TimedWorkers, case: LanguageShape, lanes: int, candidates: Sequence[str] = LSTMS) -> str:
    """The LSTM that trains one layer on this many lanes fastest, as measured by worker 0 while the others wait. Collective."""
    number = candidates.index(_fastest(case, lanes, candidates)) if crew.rank == 0 else 0
    return candidates[int(crew.sum(number))]


def _fastest(case: LanguageShape, lanes: int, candidates: Sequence[str]) -> str:
    x_TBH = torch.randn(case.steps, lanes, case.hidden)
    best: dict[str, float] = {}
    for lstm in candidates:
        layer = (LSTM if lstm == OURS else nn.LSTM)(case.hidden, case.hidden)
        seconds = []
        with arithmetic(lstm):
            for _ in range(4):
                begin = time.perf_counter()
                layer(x_TBH)[0].sum().backward()
                seconds.append(time.perf_counter() - begin)
        best[lstm] = min(seconds)
    return min(best, key=best.__getitem__)


class Serial:
    """The whole model on one worker."""

    def __init__(self, case: LanguageShape, lstm: str) -> None:
        self.lstm, self.batches = lstm, case.batches()
        self.model: nn.Module = PlainStage(case, lstm, range(case.units))
        self.optimizer = torch.optim.Adam(self.model.parameters(), LR, fused=True)

    def step(self, number: int) -> Tensor:
        """One optimizer step; returns the mean loss over this worker's lanes."""
        x_TB, target_TB = self.batches[number % BATCHES]
        with arithmetic(self.lstm):
            self.optimizer.zero_grad()
            loss = mean_loss(self.model(x_TB), target_TB)
            descend(loss, self.model, self.optimizer, CLIP)
        return loss.detach()


class DataParallel(Serial):
    """DDP: every worker holds the whole model and an equal share of the lanes, so the mean of means is the true mean."""

    def __init__(self, case: LanguageShape, lstm: str, rank: int, size: int, bucket_mb: int = 25) -> None:
        super().__init__(case, lstm)
        if case.lanes % size:
            raise ValueError(f"{case.lanes} lanes cannot be divided evenly among {size} workers")
        share = case.lanes // size
        self.batches = [
            (x[:, rank * share :][:, :share].contiguous(), y[:, rank * share :][:, :share].contiguous()) for x, y in self.batches
        ]
        self.model = DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True)


def update_together(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Clip gradients by their norm over all workers' parameters, and step the optimizer."""
    squared = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
    dist.all_reduce(squared)
    nn.utils.clip_grads_with_norm_(parameters, CLIP, squared.sqrt())
    optimizer.step()


class TorchPipeline:
    """torch.distributed.pipelining over manually split stages; a micro-batch is a subset of the lanes."""

    def __init__(self, case: LanguageShape, lstm: str, rank: int, size: int, schedule: str, micro_batches: int) -> None:
        # Imported here because it takes as long to load as torch itself, and most workers do not need it.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        self.lstm, self.first, self.last = lstm, rank == 0, rank == size - 1
        module = PlainStage(case, lstm, ranges(balanced_cuts(case, size), case.units)[rank])
        self.parameters = list(module.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, LR, fused=True)
        lanes = case.lanes // micro_batches
        between = torch.empty(case.steps, lanes, case.hidden, requires_grad=True)
        entering = torch.empty(lanes, case.steps, dtype=torch.int64) if self.first else between
        leaving = torch.empty(case.steps, lanes, case.vocabulary) if self.last else between
        # Both shapes are given, so nothing is inferred at run time. A separate process group keeps messages of different loops apart.
        stage = PipelineStage(
            _LanesFirst(module) if self.first else module,
            rank,
            size,
            CPU,
            input_args=(entering,),
            output_args=(leaving,),
            group=dist.new_group(),
        )
        kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[schedule]

        def loss(logits_TBV: Tensor, target_BT: Tensor) -> Tensor:
            # Divide here, one scalar per micro-batch, instead of dividing every gradient afterwards.
            return mean_loss(logits_TBV, target_BT.t()) / micro_batches

        self.schedule: Any = kind(stage, micro_batches, loss_fn=loss, scale_grads=False)
        self.batches = [(x_TB.t().contiguous(), y_TB.t().contiguous()) for x_TB, y_TB in case.batches()]

    def step(self, number: int) -> Tensor | None:
        """One optimizer step; returns the mean loss on the last worker."""
        x_BT, target_BT = self.batches[number % BATCHES]
        losses: list[Tensor] = []
        with arithmetic(self.lstm):
            self.optimizer.zero_grad()
            given = (x_BT,) if self.first else ()
            wanted = {"target": target_BT, "losses": losses} if self.last else {}
            self.schedule.step(*given, **wanted, return_outputs=False)
            update_together(self.parameters, self.optimizer)
        return torch.stack(losses).sum().detach() if losses else None


class _LanesFirst(nn.Module):
    """Adapts the first stage to the library, which splits along the first dimension, so that must be the lanes."""

    def __init__(self, stage: PlainStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x_BT: Tensor) -> Tensor:
        return cast(Tensor, self.stage(x_BT.t()))
