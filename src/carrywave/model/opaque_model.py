"""`OpaqueModel`: wraps any nn.Module as a model in one piece, which replicas can share by lanes but stages and time chunks cannot split."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarries
from carrywave.model.dropout import check_unwrapped, keyed
from carrywave.model.heads.scoring import check_weights, for_each_target
from carrywave.model.over_time.global_norm import has_norms, real_lanes
from carrywave.model.stage import checked_score
from carrywave.model.state import Chunk, State

# (module output, targets) -> loss summed over targets, number of targets; with a keyword `weights` if batches have some
Loss = Callable[..., tuple[Tensor, Tensor]]


class OpaqueModel(nn.Module):
    """A module that maps inputs [T, B, …] to whatever its loss reads; it also receives `lengths` [B] if its forward takes them.

    The loss, `loss(out, target) -> (sum, count)`, is passed in or a method of the module; if batches have weights, it takes them as a
    keyword `weights`. `pooled`, passed in or an attribute of the
    module, means one target per lane; if neither says so, the batches do. Every nn.Dropout becomes a keyed one. Parameters keep
    their names in the module.
    """

    reads_whole = True
    stride = 1  # it may do with time what it likes
    has_front = False
    has_encoder = has_head = scores = True
    width_in = width_out = width_head = 0
    layers = range(0)
    parts: Sequence[tuple[int, str]] = ()  # of a carry, which it has not

    def __init__(self, module: nn.Module, loss: Loss | None = None, *, pooled: bool | None = None) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise UserError(f"a trainer needs a cw.Model or an nn.Module, got {type(module).__name__}; wrap it in one")
        check_unwrapped(module)
        module_loss = getattr(module, "loss", None)
        if loss is None and not callable(module_loss):
            raise UserError(
                f"the module {type(module).__name__} has no loss; pass loss=..., a function (out, target) -> (sum, count), "
                "or wrap your modules: cw.Model(encoder, lstm, head)"
            )
        self._given_pooled = getattr(module, "pooled", None) if pooled is None else pooled
        self.pooled = bool(self._given_pooled)
        self.module = keyed(module, "module")
        self.has_norms = has_norms(module)
        self.given_loss: Any = loss or module_loss
        self.takes_lengths = "lengths" in inspect.signature(module.forward).parameters

    def expect(self, pooled: bool | None) -> None:
        """Take it from a batch whether targets are one per lane, unless the module or the caller has decided it."""
        if self._given_pooled is None and pooled is not None:
            self.pooled = pooled

    @property
    def has_output(self) -> bool:
        """Always true: the loss reads its output."""
        return True

    @property
    def separate_loss(self) -> dict[str, object]:
        """The loss, by its name in messages, if it is not the module's own."""
        return {} if getattr(self.given_loss, "__self__", None) is self.module else {"loss": self.given_loss}

    @property
    def head(self) -> nn.Module:
        """The module itself, for error messages."""
        return self.module

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(self.module.parameters()).dtype

    def start(self, lanes: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> State:
        """An empty state: the module keeps none."""
        return State(())

    def carries(self, tensors: Sequence[Tensor]) -> AnyCarries:
        """None: the module keeps none."""
        return ()

    def forward(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Any, Any, State]:
        """The module's output, with no separate raw output, and the unchanged state."""
        x = x.to(self.dtype) if x.is_floating_point() else x
        with random.Scope(chunk.key, chunk.lanes, chunk.start, whole=chunk.whole), real_lanes(chunk.lengths):
            out = self.module(x, lengths=chunk.lengths) if self.takes_lengths else self.module(x)
        return out, out, state

    def loss(self, y: Any, state: State, target: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Loss sum and count."""
        with random.Scope(chunk.key, chunk.lanes, chunk.start, pooled=self.pooled, whole=chunk.whole, part="loss"):
            score = self.given_loss(y, target.to(self.dtype) if target.is_floating_point() else target, **self._weights(target, chunk))
        return checked_score(score, self.module)

    def _weights(self, target: Tensor, chunk: Chunk) -> dict[str, Tensor]:
        """The weights of the targets, by the name of the argument of a loss; none if all are 1."""
        if chunk.weights is None:
            return {}
        check_weights(chunk.weights, self.given_loss, f"the module {type(self.module).__name__}", by_lane=self.pooled)
        return {"weights": for_each_target(chunk.weights.to(self.dtype), target, pooled=self.pooled)}

    def output(self, y: Any, state: State, chunk: Chunk) -> Any:
        """The output that metrics read."""
        return y

    def score(self, out: Any, y: Any, state: State, target: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Loss sum and count, from the output."""
        return self.loss(out, state, target, chunk)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)
