"""Claim: a whole training step (embedding, stack, softmax, loss, clipping, optimizer) takes a fraction of the plain PyTorch loop's time.

Two models: the WikiText-2 recipe with two layers of 650 units, and eight layers of 1,024. All loops start from the same weights, read the
same windows from GPU memory, keep the carry between windows, and compute in bf16 under autocast with float32 weights. They take turns, a
block of steps each, for several rounds; the median over blocks counts:

- carrywave: the trainer with default settings, which captures its steps as CUDA graphs;
- eager: nn.Embedding, nn.LSTM, nn.Linear, the fused optimizer;
- graph: the same loop, with the whole step captured under `torch.cuda.graph`;
- compile: the same loop, with forward and loss under `torch.compile`.

A loop is timed only if its loss is finite and decreases; otherwise, or if it cannot be built, its row has a note instead of figures.
`--rows 2x650` picks models, `--loops carrywave --loops graph` loops.

Shapes: T time, B lane, H hidden, L layer, V vocabulary.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.harness import timing
from benchmarks.harness.command import main
from benchmarks.harness.shapes import LanguageShape
from benchmarks.peers.plain_loops import PlainLanguageModel, descend
from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.model.model import Model
from carrywave.step.trainer import Trainer

LOOPS = ("carrywave", "eager", "graph", "compile")
WINDOWS = 8  # cycled through
CHECKED = 3 * WINDOWS  # steps whose losses are checked; they also serve as warm-up
BLOCK_MS, BUDGET_MS, ROUNDS = 150.0, 5000.0, (5, 9)

Windows = Sequence[tuple[Tensor, Tensor]]  # inputs and targets, both [T, B]
Step = Callable[[], Tensor]  # runs one optimizer step and returns its loss


@dataclass(frozen=True)
class Recipe(LanguageShape):
    """A language model and its training settings."""

    optimizer: str = "adam"
    lr: float = 1e-3
    clip: float = 1.0

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"{super().name} {self.optimizer}"

    def windows(self, device: torch.device) -> Windows:
        """Consecutive windows of random tokens. As in text, some tokens are far more frequent than others."""
        draw = torch.Generator().manual_seed(2)
        share = torch.rand(WINDOWS * self.steps + 1, self.lanes, generator=draw, dtype=torch.float64)
        tokens = (share**4 * self.vocabulary).long().to(device)
        edges = [(number * self.steps, (number + 1) * self.steps) for number in range(WINDOWS)]
        return [(tokens[first:end].clone(), tokens[first + 1 : end + 1].clone()) for first, end in edges]


RECIPES = (
    # WikiText-2. On text its learning rate is 20; on random windows the loss is then too noisy to be seen falling. Step time is unaffected.
    Recipe(2, 650, 20, 35, 33_278, dropout=0.5, tied=True, optimizer="sgd", lr=5.0, clip=0.25),
    Recipe(8, 1024, 64, 128, 10_000),
)
QUICK = (
    Recipe(2, 64, 8, 16, 500, dropout=0.5, tied=True, optimizer="sgd", lr=5.0, clip=0.25),
    Recipe(4, 64, 8, 16, 500, lr=1e-2),
)


def run(*, quick: bool = False, rows: Sequence[str] = (), loops: Sequence[str] = ()) -> list[dict[str, object]]:
    """One row per loop and model."""
    device = timing.cuda_device()
    recipes = [
        each for each in (QUICK if quick else RECIPES) if not rows or any(set(row.split()) <= set(each.name.split()) for row in rows)
    ]
    # Skipped in the quick form, where compiling would take longer than everything else.
    names = [name for name in LOOPS if name in loops] if loops else LOOPS[:-1] if quick else LOOPS
    if not recipes or not names:
        raise UserError(f"--rows {' '.join(rows)} --loops {' '.join(loops)} picks nothing; use 2x650 or 8x1024, and {', '.join(LOOPS)}")
    budget_ms = BUDGET_MS / 20 if quick else BUDGET_MS
    return [row for recipe in recipes for row in compare(recipe, device, names, budget_ms=budget_ms)]


def compare(recipe: Recipe, device: torch.device, names: Sequence[str], *, budget_ms: float) -> list[dict[str, object]]:
    """Build the loops, check their losses, and time those that train."""
    model, windows = recipe.model(), recipe.windows(device)
    steps: dict[str, Step] = {}
    losses: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for name in names:
        try:
            steps[name] = build(name, recipe, model, windows)
            losses[name] = [float(loss) for loss in [steps[name]() for _ in range(CHECKED)]]
            notes[name] = check_falls(losses[name])
        except Exception as error:
            torch.cuda.synchronize()
            notes[name] = timing.one_line(error)
    timed = {name: step for name, step in steps.items() if not notes[name]}
    ms = timing.time_calls(timed, block_ms=min(BLOCK_MS, budget_ms / 20), budget_ms=budget_ms, rounds=ROUNDS)
    rows = rows_of(recipe, names, ms, losses, notes)
    del steps, timed
    gc.collect()
    torch.cuda.empty_cache()  # graphs hold private memory pools
    return rows


def rows_of(
    recipe: Recipe,
    names: Sequence[str],
    ms: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
    notes: Mapping[str, str],
) -> list[dict[str, object]]:
    """One row per loop; those that were not timed have a note."""
    medians = {name: statistics.median(values) for name, values in ms.items()}
    rows: list[dict[str, object]] = []
    for name in names:
        row: dict[str, object] = {"case": recipe.name, "loop": name, "note": notes[name]}
        if name in losses:
            row |= {"first_loss": round(losses[name][0], 4), "last_loss": round(losses[name][-1], 4)}
        if name in medians:
            step_ms = medians[name]
            row |= {"tokens_per_second": round(1e3 * recipe.lanes * recipe.steps / step_ms), "step_ms": round(step_ms, 3)}
            row |= {"spread": round(timing.spread(list(ms[name])), 3)}
            row |= {f"over_{other}": round(medians[other] / step_ms, 2) for other in LOOPS[1:] if other in medians}
        rows.append(row)
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def check_falls(losses: Sequence[float]) -> str:
    """Describe what is wrong with the losses of a loop that cycles over the same windows; empty if nothing is."""
    if not all(abs(loss) < float("inf") for loss in losses):  # False for NaN too
        return "its loss is not finite"
    first, last = statistics.median(losses[:WINDOWS]), statistics.median(losses[-WINDOWS:])
    return "" if last < first else f"its loss does not fall: {first:.4f}, then {last:.4f}"


def build(name: str, recipe: Recipe, model: Model, windows: Windows) -> Step:
    """Build a loop by name, starting from the weights of this model."""
    if name == "carrywave":
        how = {"optimizer": recipe.optimizer, "lr": recipe.lr, "clip": recipe.clip, "precision": "bf16"}
        trainer = Trainer(deepcopy(model), how, device=windows[0][0].device, keep_state=True)
        batches = itertools.cycle([Batch.of(x_TB, target_TB, fresh=False) for x_TB, target_TB in windows])
        return lambda: trainer.step(next(batches))
    kind = {"eager": PlainLoop, "graph": GraphedLoop, "compile": CompiledLoop}[name]
    loop: PlainLoop = kind(recipe, model.state_dict(), windows)
    return loop.step


class PlainLoop:
    """The peer: truncated back-propagation in plain PyTorch, with the weights of our model."""

    capturable = False

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor], windows: Windows) -> None:
        self.recipe, self.windows, self.number = recipe, windows, 0
        device = windows[0][0].device
        model = PlainLanguageModel(recipe.vocabulary, recipe.hidden, recipe.layers, recipe.dropout)
        if recipe.tied:
            model.linear.weight = model.embedding.weight
        theirs = {"embedding": "encoder", "linear": "head"}
        names = {name: ".".join(theirs.get(part, part) for part in name.split(".")) for name in model.state_dict()}
        model.load_state_dict({name: weights[ours] for name, ours in names.items()})
        self.model = model.to(device)
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, recipe.lr, fused=True)
            if recipe.optimizer == "sgd"
            else torch.optim.Adam(parameters, recipe.lr, fused=True, capturable=self.capturable)
        )
        start_LBH = torch.zeros(recipe.layers, recipe.lanes, recipe.hidden, dtype=torch.bfloat16, device=device)
        self.carry = (start_LBH, start_LBH.clone())

    def step(self) -> Tensor:
        """One optimizer step on the next window; returns its loss."""
        x_TB, target_TB = self.windows[self.number % len(self.windows)]
        self.number += 1
        return self._train_on(x_TB, target_TB)

    def _train_on(self, x_TB: Tensor, target_TB: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss, h_LBH, c_LBH = self._score(x_TB, target_TB, *self.carry)
        descend(loss, self.model, self.optimizer, self.recipe.clip)
        self._keep(h_LBH.detach(), c_LBH.detach())
        return loss.detach()

    def _score(self, x_TB: Tensor, target_TB: Tensor, h_LBH: Tensor, c_LBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x_TB.device.type, torch.bfloat16):
            logits_TBV, (h_LBH, c_LBH) = self.model(x_TB, (h_LBH, c_LBH))
            return cross_entropy(logits_TBV.flatten(0, 1), target_TB.flatten()), h_LBH, c_LBH

    def _keep(self, h_LBH: Tensor, c_LBH: Tensor) -> None:
        self.carry = (h_LBH, c_LBH)


class CompiledLoop(PlainLoop):
    """The same loop, with forward and loss under torch.compile."""

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor], windows: Windows) -> None:
        super().__init__(recipe, weights, windows)
        self._compiled: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.compile(super()._score, dynamic=False)

    def _score(self, x_TB: Tensor, target_TB: Tensor, h_LBH: Tensor, c_LBH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._compiled(x_TB, target_TB, h_LBH, c_LBH)


class GraphedLoop(PlainLoop):
    """The same loop as a CUDA graph: the whole step is captured, on static tensors."""

    capturable = True

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor], windows: Windows) -> None:
        super().__init__(recipe, weights, windows)
        self._x_TB, self._target_TB = (tensor.clone() for tensor in windows[0])
        self._graph, self._loss = timing.captured(self._again)  # frees the gradients first, so that new ones are of the graph's memory

    def _again(self) -> Tensor:
        return super()._train_on(self._x_TB, self._target_TB)

    def _train_on(self, x_TB: Tensor, target_TB: Tensor) -> Tensor:
        self._x_TB.copy_(x_TB)
        self._target_TB.copy_(target_TB)
        self._graph.replay()
        return self._loss.clone()

    def _keep(self, h_LBH: Tensor, c_LBH: Tensor) -> None:
        for static, new in zip(self.carry, (h_LBH, c_LBH), strict=True):
            static.copy_(new)


if __name__ == "__main__":
    main("benchmarks.step")
