"""A `Stage` is the units [first, last) of a model (encoder, layers, head) that one worker runs on every chunk.

`y, raw, state = stage(x, state, chunk)`: no state is hidden, so chunks can run anywhere, in any order that the carries allow.

Shapes: T time, B lane, W width of the last layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from carrywave.errors import PlanError, UserError
from carrywave.kernels import random
from carrywave.kernels.carry import AnyCarries
from carrywave.kernels.lengths import real_steps
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.scoring import check_weights, for_each_target
from carrywave.model.over_time.front import shorter
from carrywave.model.over_time.global_norm import has_norms, real_lanes
from carrywave.model.recurrent import Recurrent
from carrywave.model.state import Chunk, State

__all__ = ["Chunk", "Stage", "State", "regularize"]

Score = tuple[Tensor, Tensor]  # (loss sum, count)


class ModelParts(Protocol):
    """What a stage takes its units from: a `Model`."""

    encoder: nn.Module
    dropout_in: nn.Module | None
    lstm: Recurrent
    dropout_out: nn.Module | None
    head: nn.Module
    pooled: bool
    whole_head: bool
    stride: int

    @property
    def has_front(self) -> bool: ...


class Stage(nn.Module):
    """Units of a model, sharing its modules and their parameter names.

    `scores`: True if it runs the head on chunks. The last stage does; with `share_head` every stage does, on chunks from the last one.
    """

    def __init__(self, model: ModelParts, first: int = 0, last: int | None = None, *, share_head: bool = False) -> None:
        super().__init__()
        units = model.lstm.num_layers + 2
        last = units if last is None else last
        if not 0 <= first < last <= units:
            raise PlanError(f"a stage of units {first} to {last} does not fit a model of {units} units; use 0 <= first < last <= {units}")
        self.first, self.last = first, last
        self.layers = range(max(first, 1) - 1, min(last - 1, model.lstm.num_layers))
        self.has_encoder, self.has_head = first == 0, last == units
        self.scores = self.has_head or share_head
        self.parts = [(layer, part) for layer in self.layers for part in model.lstm.cell.parts]  # of its carries, in their order
        self.encoder = model.encoder if self.has_encoder else None
        self.has_norms = has_norms(self.encoder)
        self.dropout_in = model.dropout_in if self.has_encoder else None
        self.lstm = model.lstm
        self._like = (model.lstm.any_parameter,)  # in a tuple, so that it is no parameter of the stage's own
        self._per_layer = len(model.lstm.cell.parts)
        self.dropout_out = model.dropout_out if self.has_head else None
        self.head: Any = model.head if self.scores else None
        self.pooled = self.has_head and model.pooled  # targets are one per lane
        self.whole_head = model.whole_head  # the head reads whole sequences, and their lengths
        # Values, or codes of words, that the head reads beside each step.
        self.past_steps = model.head.past_steps if isinstance(model.head, Forecast | CRF) else 0
        self.has_front, self.stride = model.has_front, model.stride  # the encoder does, and layers and head see n / stride steps
        self.accumulates = self.pooled and not self.whole_head
        self.width_in, self.width_out = _width(model, first), _width(model, last)
        self.width_head = _width(model, units - 1)
        # Modules of torch that write into what they read get a copy: a batch or a layer's output may be read again.
        parts = {"encoder": self.encoder, "dropout_in": self.dropout_in, "dropout_out": self.dropout_out}
        self._spared = {name for name, part in parts.items() if part is not None and _writes(part)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self._like[0].dtype

    def start(self, lanes: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> State:
        """The state before the first chunk: initial carries of this stage's layers, and a pooled head's accumulator."""
        acc = self._accumulator("start", self.head.start(lanes, dtype, device)) if self.accumulates else None
        return State(self.lstm.initial(lanes, dtype, device, self.layers), acc)

    def carries(self, tensors: Sequence[Tensor]) -> AnyCarries:
        """One carry per layer, from the tensors of `parts`."""
        carry, parts = self.lstm.cell.carry, self._per_layer
        return tuple([carry(*tensors[first : first + parts]) for first in range(0, len(tensors), parts)])

    def forward(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, Tensor, State]:
        """Run one chunk: return the input of the next stage or the head, the same before output dropout, and the new state."""
        if chunk.start and (self.lstm.bidirectional or self.has_front or self.whole_head):
            who = "bidirectional layers need" if self.lstm.bidirectional else "the front needs" if self.has_front else "the head needs"
            raise PlanError(f"{who} whole sequences, got a chunk from step {chunk.start}; remove plan.chunk_steps")
        if chunk.resets is not None:
            check_resets(self)
        with random.Scope(chunk.key, chunk.lanes, chunk.start, whole=chunk.whole):
            raw = x
            if self.encoder is not None:
                raw = x.to(self.dtype) if x.is_floating_point() else x  # so that modules of a user need not
                raw = raw.clone() if "encoder" in self._spared else raw
                with real_lanes(chunk.lengths) if self.has_norms else contextlib.nullcontext():
                    raw = self.encoder(raw, chunk.lengths) if self.has_front else self.encoder(raw)
            if self.dropout_in is not None:
                raw = self.dropout_in(raw.clone() if "dropout_in" in self._spared else raw)
            carries = state.carries
            if self.layers:
                fits = isinstance(raw, Tensor) and raw.dim() == 3 and raw.shape[-1] == self.lstm.input_size
                if self.has_encoder and not (fits and (self.has_front or raw.shape[0] == x.shape[0])):
                    raise self._misfit(raw, x.shape[0])
                raw, carries = self.lstm.run(
                    raw,
                    carries,
                    lengths=chunk.lengths if chunk.lengths is None or self.stride == 1 else shorter(chunk.lengths, self.stride),
                    fresh=chunk.fresh,
                    resets=chunk.resets,
                    lanes=chunk.lanes,
                    start=chunk.start,
                    key=chunk.key,
                    full=chunk.full,
                    layers=self.layers,
                    clean=self.first > 1,  # x is the output of a layer
                    chunk=chunk.window,
                )
            y = raw
            if self.dropout_out is not None:
                y = self.dropout_out(raw.clone() if "dropout_out" in self._spared else raw)
            y = y.clone() if y is x else y  # a head may change what it reads in place, but not what a stage has received
        if not self.accumulates:
            return y, raw, State(carries, state.acc)
        return y, raw, State(carries, self._pool(y, state.acc, chunk))

    def _misfit(self, x: Any, steps: int) -> UserError:
        """The error where a user's encoder gives the first layer another form, which a kernel would report in terms of its own."""
        who = f"the encoder {type(self.encoder).__name__}"
        if not self.has_front and isinstance(x, Tensor) and x.dim() == 3 and x.shape[0] != steps:
            return UserError(
                f"{who} makes {x.shape[0]} steps of {steps}, and lengths no longer fit; use cw.Front as the encoder, whose lengths follow"
            )
        return UserError(
            f"{who} gives {_shown(x)}, but the {type(self.lstm).__name__} reads [time, lane, {self.lstm.input_size}]; "
            "let its input_size be what the encoder gives for each step"
        )

    def scope(self, chunk: Chunk) -> contextlib.AbstractContextManager[object]:
        """The random scope to run the head in, so that dropout in a user's head is keyed."""
        start = 0 if self.accumulates else chunk.start
        return random.Scope(chunk.key, chunk.lanes, start, pooled=self.accumulates, whole=chunk.whole, part="head")

    def loss(self, y: Tensor, state: State, target: Tensor, chunk: Chunk) -> Score:
        """Loss sum and count of the chunk; for a pooled head, of whole sequences, called once after the last chunk."""
        given = state.acc if self.accumulates else y
        target = target.to(self.dtype) if target.is_floating_point() else target
        beside = self._beside(y, chunk) if self.whole_head or self.past_steps or chunk.linear is not None else ()
        weights = {} if chunk.weights is None else self._weights(chunk.weights, target)
        with self.scope(chunk):
            score = self.head.loss(given, target, *beside, **weights)
        scored = checked_score(score, self.head)
        if torch.is_grad_enabled() and y.requires_grad and not scored[0].requires_grad and bool(scored[1] > 0):
            raise UserError(
                f"the loss of the head {type(self.head).__name__} does not depend on what it was given, so nothing would be learned; "
                "return it with its graph, without detach(), item() or no_grad()"
            )
        return scored

    def output(self, y: Tensor, state: State, chunk: Chunk) -> Any:
        """The head's result: per step, or per lane from the accumulator if the head is pooled."""
        with self.scope(chunk):
            return self.head(state.acc if self.accumulates else y, *self._beside(y, chunk))

    def score(self, out: Any, y: Tensor, state: State, target: Tensor, chunk: Chunk) -> Score:
        """Loss sum and count, from the head's output if the head is ours and its output has them: a path of labels has not. What a user's
        head calls `score` may be anything, such as an accuracy, so its loss is computed again from y.
        """
        if not _scores_as_it_learns(self.head):
            return self.loss(y, state, target, chunk)
        scored: Score = self.head.score(out, target, **({} if chunk.weights is None else self._weights(chunk.weights, target)))
        return scored

    def _pool(self, y: Tensor, acc: tuple[Tensor, ...], chunk: Chunk) -> tuple[Tensor, ...]:
        """The accumulator of every lane after a chunk."""
        if chunk.fresh is not None:
            acc = restart(acc, self.head.start(y.shape[1], acc[0].dtype, y.device), chunk.fresh)
        with random.Scope(chunk.key, chunk.lanes, chunk.start, whole=chunk.whole, part="head"):
            return self._accumulator("pool", self.head.pool(y, self._lengths(y, chunk), acc))

    def _weights(self, weights: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The weights of the targets, by the name of the argument of a loss."""
        by_lane = self.whole_head or self.pooled
        check_weights(weights, self.head.loss, f"the head {type(self.head).__name__}", by_lane=by_lane)
        return {"weights": for_each_target(weights.to(self.dtype), target, pooled=by_lane)}

    def _beside(self, y: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """What the head reads beside the output of the last layer: lengths of whole sequences, past values [T, B, C, N], what a linear part
        says of each lane, which is not for training, or nothing.
        """
        if chunk.linear is not None and not self.head.training:
            return (chunk.linear.to(self.dtype),)
        lengths = (self._lengths(y, chunk),) if self.whole_head else ()
        if not self.past_steps:
            return lengths
        rows = 0 if chunk.history is None else chunk.history.shape[0]
        if chunk.history is None or rows != y.shape[0] + self.past_steps - 1:
            raise UserError(
                f"the head reads the last {self.past_steps} values at every step, but the history of the batch has {rows} rows; "
                f"pass Batch.of [{self.past_steps - 1} + time, lane, column]"
            )
        history = chunk.history.to(self.dtype) if chunk.history.is_floating_point() else chunk.history
        return *lengths, history.unfold(0, self.past_steps, 1)

    def _lengths(self, y: Tensor, chunk: Chunk) -> Tensor:
        """[B]: the real steps of each lane in the chunk, after a front."""
        steps, lanes = y.shape[:2]
        if chunk.lengths is None:
            return torch.full((lanes,), steps, dtype=torch.int64, device=y.device)
        return shorter(chunk.lengths, self.stride)

    def _accumulator(self, method: str, acc: Any) -> tuple[Tensor, ...]:
        if not isinstance(acc, tuple) or not acc or not all(isinstance(part, Tensor) and part.dim() for part in acc):
            raise UserError(f"{method} of the head {type(self.head).__name__} returned {_shown(acc)}; return a tuple of tensors [lane, …]")
        return acc


def _writes(module: nn.Module) -> bool:
    """True if a module of torch in this one writes into what it reads."""
    return any(getattr(each, "inplace", False) is True for each in module.modules())


def check_resets(model: ModelParts | Stage) -> None:
    """Refuse resets where something reads over the sequences of a lane without knowing where they begin."""
    if model.has_front:
        raise UserError("resets start new sequences inside a lane, but the front reads over their edges; use a model without a front")
    if model.whole_head or model.pooled:
        raise UserError(
            f"resets start new sequences inside a lane, but the head {type(model.head).__name__} reads each lane as one; use one for each "
            "sequence"
        )


def _scores_as_it_learns(head: nn.Module) -> bool:
    """True for a head of ours that scores its output, and of which no method was replaced; a subclass may have another loss."""
    of_ours = type(head).__module__.startswith("carrywave.") and hasattr(head, "score")
    return of_ours and not vars(head).keys() & {"loss", "score", "forward"}


def _width(model: ModelParts, unit: int) -> int:
    """Input width of a unit: 0 for the encoder, which reads the data, and past the head."""
    if unit in (0, model.lstm.num_layers + 2):
        return 0
    return model.lstm.input_size if unit == 1 else model.lstm.outputs(unit - 2)


def checked_score(score: Any, head: nn.Module) -> Score:
    """Check what the loss of a user's head or module returned, and convert it to two scalar tensors."""
    whose = "the loss of " + type(head).__name__
    pair = isinstance(score, tuple) and len(score) == 2 and isinstance(score[0], Tensor) and not score[0].dim()
    if not pair or not isinstance(score[1], Tensor | int | float | np.number) or (isinstance(score[1], Tensor) and score[1].dim()):
        raise UserError(f"{whose} must return (sum over the targets, number of targets), two scalars; it returned {_shown(score)}")
    total, count = score
    if not isinstance(count, Tensor):
        return total, torch.full((), count, dtype=torch.float64, device=total.device)
    if count.requires_grad:
        raise UserError(
            f"{whose} returns a number of targets that requires grad, but the division by it comes after backward, so its gradient would "
            "be missing; detach it"
        )
    return total, count.to(total.device)  # a user's torch.tensor(n) is on the host


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def restart(acc: tuple[Tensor, ...], begin: tuple[Tensor, ...], fresh_B: Tensor) -> tuple[Tensor, ...]:
    """Reset the accumulator of fresh lanes."""
    return tuple(torch.where(fresh_B.reshape(-1, *[1] * (old.dim() - 1)), new, old) for new, old in zip(begin, acc, strict=True))


def regularize(
    y_raw_TBW: Tensor,
    y_dropped_TBW: Tensor,
    previous_BW: Tensor | None,
    alpha: float,
    beta: float,
    lengths_B: Tensor | None,
    per_change: Tensor | None = None,
    resets_TB: Tensor | None = None,
) -> Tensor:
    """Activation penalty, summed over real steps, to be divided by the number of real targets together with the loss.

    alpha scales the mean square of each step's outputs after dropout, beta that of their change from the previous step, without
    dropout. `previous` is the output just before this chunk (None at the start of a window: no change is counted across it, nor across a
    reset).
    `per_change`: real steps for each change in all batches of the step. There are fewer changes than steps, and their mean is over them.
    """
    y_raw_TBW, y_dropped_TBW = (y.to(torch.promote_types(y.dtype, torch.float32)) for y in (y_raw_TBW, y_dropped_TBW))
    real_TB1 = None if lengths_B is None else real_steps(lengths_B, y_raw_TBW.shape[0])

    def total(values_TBW: Tensor, skipped: int) -> Tensor:
        values_TBW = values_TBW if real_TB1 is None else torch.where(real_TB1[skipped:], values_TBW, 0.0)
        return values_TBW.square().sum() / values_TBW.shape[-1]

    result = y_raw_TBW.new_zeros(())
    if alpha:
        result = result + alpha * total(y_dropped_TBW, 0)
    if beta:
        joined = y_raw_TBW if previous_BW is None else torch.cat((previous_BW.to(y_raw_TBW.dtype)[None], y_raw_TBW))
        skipped = 1 if previous_BW is None else 0
        changes_TBW = joined[1:] - joined[:-1]
        changes_TBW = changes_TBW if resets_TB is None else torch.where(resets_TB[skipped:, :, None], 0.0, changes_TBW)
        changed = beta * total(changes_TBW, skipped)
        result = result + (changed if per_change is None else per_change.to(changed.dtype) * changed)
    return result
