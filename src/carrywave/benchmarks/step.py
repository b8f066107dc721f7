"""Claim: a whole training step (embedding, stack, softmax, loss, clipping, optimizer) takes a fraction of the plain PyTorch loop's time.

Two models: the WikiText-2 recipe with two layers of 650 units, and eight layers of 1,024. All loops start from the same weights, read the
same windows from GPU memory, keep the carry between windows, and compute in bf16 under autocast with float32 weights. They take turns, a
block of steps each, for several rounds; the median over blocks counts:

- carrywave: the trainer with default settings, which captures its steps as CUDA graphs;
- eager: nn.Embedding, nn.LSTM, nn.Linear, the fused optimizer;
- graph: the same loop, with the whole step captured under `torch.cuda.graph`;
- compile: the same loop, with forward and loss under `torch.compile`.

A loop is timed only if its loss is finite and decreases; otherwise, or if it cannot be built, its row has a note instead of figures.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from carrywave.benchmarks.harness import gpu_timing
from carrywave.benchmarks.harness.workers import spread
from carrywave.benchmarks.peers.gpu_loops import CompiledLoop, GraphedLoop, PlainLoop, Recipe, Windows, check_falls
from carrywave.benchmarks.peers.gpu_stacks import DTYPES
from carrywave.data.batch import Batch
from carrywave.errors import UserError
from carrywave.kernels.lstm.dispatch import BACKENDS
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model
from carrywave.step.trainer import Trainer

RECIPES = (
    # WikiText-2. On text its learning rate is 20; on random windows the loss is then too noisy to be seen falling. Step time is unaffected.
    Recipe(2, 650, 20, 35, 33_278, dropout=0.5, tied=True, optimizer="sgd", lr=5.0, clip=0.25),
    Recipe(8, 1024, 64, 128, 10_000),
)
QUICK = (
    Recipe(2, 64, 8, 16, 500, dropout=0.5, tied=True, optimizer="sgd", lr=5.0, clip=0.25),
    Recipe(4, 64, 8, 16, 500, lr=1e-2),
)
TARGETS = {"2x650 B20 T35 V33278 sgd": "over_eager >= 4.0; over_graph >= 1.5"}
LOOPS = ("carrywave", "eager", "graph", "compile")
WINDOWS = 8  # cycled through
CHECKED = 3 * WINDOWS  # steps whose losses are checked; they also serve as warm-up
BLOCK_MS, BUDGET_MS, ROUNDS = 150.0, 5000.0, (5, 9)

Step = Callable[[], Tensor]  # runs one optimizer step and returns its loss


def run(*, quick: bool = False, rows: Sequence[str] = (), loops: Sequence[str] | None = None) -> list[dict[str, object]]:
    """One row per loop and model. `rows` selects models by words of their names, such as 2x650; `loops` selects loops by name."""
    device = gpu_timing.cuda_device("step")
    recipes = chosen(QUICK if quick else RECIPES, rows)
    # Skipped in the quick form, where compiling would take longer than everything else.
    names = loops if loops is not None else LOOPS[:-1] if quick else LOOPS
    if unknown := [name for name in names if name not in LOOPS]:
        raise UserError(f"bench step has no loop {unknown[0]}; use some of {', '.join(LOOPS)}")
    budget_ms = BUDGET_MS / 20 if quick else BUDGET_MS
    return [row for recipe in recipes for row in compare(recipe, device, names, budget_ms=budget_ms)]


def chosen(recipes: Sequence[Recipe], rows: Sequence[str]) -> list[Recipe]:
    """The models selected by `rows`."""
    kept = [recipe for recipe in recipes if not rows or any(set(words.split()) <= set(recipe.name.split()) for words in rows)]
    if not kept:
        names = ", ".join(recipe.name.split()[0] for recipe in recipes)
        raise UserError(f"no model of bench step matches {' or '.join(rows)}; use one of {names}")
    return kept


def compare(recipe: Recipe, device: torch.device, names: Sequence[str], *, budget_ms: float) -> list[dict[str, object]]:
    """Build the loops, check their losses, and time those that train."""
    model, windows = recipe.model(), recipe.windows(WINDOWS, device)
    steps: dict[str, Step] = {}
    losses: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for name in names:
        try:
            steps[name] = build(name, recipe, model, windows)
            losses[name] = [float(loss) for loss in [steps[name]() for _ in range(CHECKED)]]
            notes[name] = check_falls(losses[name], WINDOWS)
        except Exception as error:
            torch.cuda.synchronize()
            notes[name] = gpu_timing.one_line(error)
    timed = {name: step for name, step in steps.items() if not notes[name]}
    ms = gpu_timing.time_calls(timed, block_ms=min(BLOCK_MS, budget_ms / 20), budget_ms=budget_ms, rounds=ROUNDS)
    rows = rows_of(recipe, torch.cuda.get_device_name(device), names, ms, losses, notes)
    del steps, timed
    gc.collect()
    torch.cuda.empty_cache()  # graphs hold private memory pools
    return rows


def rows_of(
    recipe: Recipe,
    device: str,
    names: Sequence[str],
    ms: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
    notes: Mapping[str, str],
) -> list[dict[str, object]]:
    """One row per loop; those that were not timed have a note."""
    medians = {name: statistics.median(values) for name, values in ms.items()}
    rows: list[dict[str, object]] = []
    for name in names:
        step_ms = medians.get(name)
        row: dict[str, object] = {"case": recipe.name, "device": device, "loop": name}
        row["kernel"] = kernel_of(recipe) if name == "carrywave" else "cuDNN"
        row["tokens_per_second"] = None if step_ms is None else round(1e3 * recipe.lanes * recipe.steps / step_ms)
        row["step_ms"] = None if step_ms is None else round(step_ms, 3)
        row["spread"] = None if step_ms is None else round(spread(list(ms[name])), 3)
        for other in LOOPS[1:]:
            row[f"over_{other}"] = None if step_ms is None or other not in medians else round(medians[other] / step_ms, 2)
        seen = losses.get(name)
        row["first_loss"], row["last_loss"] = (None, None) if not seen else (round(seen[0], 4), round(seen[-1], 4))
        row["target"] = TARGETS.get(recipe.name, "") if name == "carrywave" else ""
        row["note"] = notes[name]
        rows.append(row)
    return rows


def kernel_of(recipe: Recipe) -> str:
    """The backend our trainer chooses for the layers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = torch.empty((), dtype=DTYPES[recipe.precision], device=device)
    layer = LSTM(recipe.hidden, recipe.hidden, device=device).weights(0)
    return BACKENDS.in_use("auto", one.expand(recipe.steps, recipe.lanes, recipe.hidden), layer)


def build(name: str, recipe: Recipe, model: Model, windows: Windows) -> Step:
    """Build a loop by name, starting from the weights of this model."""
    if name == "carrywave":
        return ours(recipe, deepcopy(model), windows)
    kind = GraphedLoop if name == "graph" else CompiledLoop if name == "compile" else PlainLoop
    loop: PlainLoop = kind(recipe, model.state_dict(), windows)
    return loop.step


def ours(recipe: Recipe, model: Model, windows: Windows) -> Step:
    """Our trainer, cycling through these windows."""
    how = {"optimizer": recipe.optimizer, "lr": recipe.lr, "clip": recipe.clip, "precision": recipe.precision}
    trainer = Trainer(model, how, device=windows[0][0].device, keep_state=True)
    batches = itertools.cycle([Batch.of(x_TB, target_TB, fresh=False) for x_TB, target_TB in windows])
    return lambda: trainer.step(next(batches))
