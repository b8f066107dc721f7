"""The peers of `bench step`: truncated back-propagation in plain PyTorch on a GPU, eager, compiled, and as a CUDA graph.

Shapes: T time, B lane, H hidden, L layer, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from carrywave.benchmarks.harness.shapes import LanguageShape
from carrywave.benchmarks.peers.gpu_stacks import DTYPES
from carrywave.benchmarks.peers.plain_loops import PlainLanguageModel, descend
from carrywave.measure.timing import captured

Windows = Sequence[tuple[Tensor, Tensor]]  # inputs and targets, both [T, B]


@dataclass(frozen=True)
class Recipe(LanguageShape):
    """A language model and its training settings."""

    optimizer: str = "adam"
    lr: float = 1e-3
    clip: float = 1.0
    precision: str = "bf16"

    @property
    def name(self) -> str:
        """As shown in tables."""
        return f"{super().name} {self.optimizer}"

    def windows(self, count: int, device: torch.device) -> Windows:
        """Consecutive windows of random tokens. As in text, some tokens are far more frequent than others."""
        draw = torch.Generator().manual_seed(2)
        share = torch.rand(count * self.steps + 1, self.lanes, generator=draw, dtype=torch.float64)
        tokens = (share**4 * self.vocabulary).long().to(device)
        edges = [(number * self.steps, (number + 1) * self.steps) for number in range(count)]
        return [(tokens[first:end].clone(), tokens[first + 1 : end + 1].clone()) for first, end in edges]


class PlainLoop:
    """Truncated back-propagation in plain PyTorch: nn.Embedding, nn.LSTM and nn.Linear under autocast, the fused optimizer.

    `weights` is the state dict of our model, under its names; all loops start from the same weights.
    """

    capturable = False

    def __init__(self, recipe: Recipe, weights: Mapping[str, Tensor], windows: Windows) -> None:
        self.recipe, self.windows, self.number = recipe, windows, 0
        self.device = windows[0][0].device
        self.model = _plain_model(recipe, weights).to(self.device)
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer
        if recipe.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, recipe.lr, fused=True)
        else:
            self.optimizer = torch.optim.Adam(parameters, recipe.lr, fused=True, capturable=self.capturable)
        start_LBH = torch.zeros(recipe.layers, recipe.lanes, recipe.hidden, dtype=DTYPES[recipe.precision], device=self.device)
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
        dtype = DTYPES[self.recipe.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
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
        self._graph, self._loss = captured(self._again)  # frees the gradients first, so that new ones are of the graph's memory pool

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


def _plain_model(recipe: Recipe, weights: Mapping[str, Tensor]) -> PlainLanguageModel:
    model = PlainLanguageModel(recipe.vocabulary, recipe.hidden, recipe.layers, recipe.dropout)
    if recipe.tied:
        model.linear.weight = model.embedding.weight
    theirs = {"embedding": "encoder", "linear": "head"}
    names = {name: ".".join(theirs.get(part, part) for part in name.split(".")) for name in model.state_dict()}
    model.load_state_dict({name: weights[ours] for name, ours in names.items()})
    return model


def check_falls(losses: Sequence[float], cycle: int) -> str:
    """Describe what is wrong with the losses of a loop that cycles over the same windows; empty if nothing is."""
    if not all(abs(loss) < float("inf") for loss in losses):  # False for NaN too
        return "its loss is not finite"
    first, last = statistics.median(losses[:cycle]), statistics.median(losses[-cycle:])
    return "" if last < first else f"its loss does not fall: {first:.4f}, then {last:.4f}"
