"""A `Batch` holds the data of one training step: tensors [time, lane, …], the length of each lane, and where lanes start a new sequence.

Padding is marked in the targets: -100 for integer targets, NaN for float targets. The mask can therefore be derived from the
targets, and a loss needs no other argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from carrywave.errors import UserError, one_line

IGNORED = -100  # integer target that is left out of the loss; the counterpart of NaN among float targets


@dataclass(frozen=True)
class Batch:
    """One window of every lane. Lane numbers are global, even if this process holds only some of the lanes.

    >>> import torch
    >>> import carrywave as cw
    >>> batch = cw.Batch.of(torch.zeros(12, 4, 3), torch.zeros(12, 4, dtype=torch.long), lengths=[12, 12, 9, 5])  # time first
    >>> batch.steps, batch.cells
    (12, (38, 48))
    """

    inputs: Tensor  # [T, B] int64 tokens, or [T, B, F] float32
    targets: Tensor | None  # per step [T, B, …]; pooled [B, …]; None in prediction
    lengths: Tensor  # [B] int64, real steps of each lane in this window; 0 for an idle lane
    fresh: Tensor  # [B] bool, True if the lane starts a new sequence in this window
    lanes: Tensor  # [B] int64, global lane number
    sequence: Tensor  # [B] int64, index of the sequence in each lane; -1 for an idle lane
    offset: Tensor  # [B] int64, first step of the window within its sequence
    epoch: int = 0
    step: int = 0  # position in the epoch; (epoch, step) is the cursor and keys the randomness; -1: the trainer counts steps
    real: int = 0  # number of real steps (sum of lengths), known on the host; -1: unknown
    begun: int | None = None  # real steps of the full batch that come first in their lane or at a reset; None: one in every lane
    goes_on: bool = False  # the caller asked for some lanes to continue from a carry
    pooled: bool | None = None  # whether the targets are one per lane; None: the model knows
    unsure: bool = False  # targets fit both readings, per step and several per lane, and `lengths` masks different ones in each
    numbers: tuple[int, ...] | None = None  # `lanes` of the full batch as the user gave them, on the host; None: 0, 1, …
    part_of: tuple[int, int] | None = None  # (real steps, lanes) of the full batch if this is a share of it; None: this is the full batch
    history: Tensor | None = None  # [N - 1 + T, B, C] past values that a head reads: N up to each step; rows before the first repeat it
    resets: Tensor | None = None  # [T, B] bool, True where a lane starts a new sequence at a step; None: no lane does inside the window
    weights: Tensor | None = None  # of the targets: [T, B, …], the first of their dimensions, or [B]; None: all are 1
    linear: Tensor | None = None  # [B, answers + 1] what a linear part says of each lane, and how much the network weighs beside it

    @staticmethod
    def of(
        inputs: Tensor | PackedSequence,
        targets: Tensor | PackedSequence | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        fresh: Tensor | Sequence[bool] | bool | None = None,
        *,
        epoch: int = 0,
        step: int | None = None,
        lanes: Tensor | Sequence[int] | None = None,
        pooled: bool | None = None,
        history: Tensor | None = None,
        resets: Tensor | None = None,
        weights: Tensor | Sequence[float] | None = None,
    ) -> Batch:
        """Make a batch from time-first tensors: inputs [T, B] of tokens or [T, B, F] of numbers.

        Targets are per step [T, B, …] or per lane [B, …]; pass `pooled=True` if both readings fit. Targets beyond a lane's length
        are masked. Without `lengths` every step is real. Every lane starts a new sequence unless `fresh` says otherwise:
        `fresh=False` continues from the carry that the trainer keeps. Dropout is keyed by (epoch, step) and by the numbers in `lanes`, by
        default 0, 1, …; if `step` is omitted, the trainer counts. Lanes that continue must be where they were in the previous batch.
        A PackedSequence is unpacked, and its lanes are in the order in which they were before they were packed. `history` [N - 1 + T, B, C]
        holds past values for a head that reads the last N at every step. `resets` [T, B], true or false: a new sequence starts in the lane
        with this step, from the initial carry; a head that pools reads each lane as one sequence, and takes none.
        `weights`, numbers from 0 on, [T, B] for targets per step or [B] for each lane: the loss of a target is multiplied by its weight,
        and a mean divided by the sum of all.
        """
        if isinstance(inputs, PackedSequence) or isinstance(targets, PackedSequence):
            inputs, targets, lengths = _unpacked(inputs, targets, lengths)
        inputs = _tensor(inputs, "inputs")
        if inputs.dim() < 2 or 0 in inputs.shape[:2]:
            raise UserError(f"batch inputs have shape {list(inputs.shape)}; pass [time, lane, …] with at least one step and one lane")
        steps, count = inputs.shape[:2]
        inputs = inputs if inputs.is_floating_point() else inputs.to(torch.int64)
        device = inputs.device
        history = None if history is None else _tensor(history, "history")
        if history is not None and (history.dim() != 3 or history.shape[0] < steps or history.shape[1] != count):
            raise UserError(
                f"history has shape {list(history.shape)}; pass [past - 1 + {steps}, {count}, columns]: from the past of the first step"
            )
        if lengths is None:
            lengths_B = torch.full((count,), steps, device=device)
        else:
            lengths_B = _fitting(lengths, "lengths", (count,), torch.int64, device)
        limits_B = None if lengths is None else lengths_B
        real, begun, reading = steps * count, None, pooled
        if limits_B is not None:
            # Overwrite padding, whatever it holds: NaN times a mask of zeros would still be NaN in a gradient.
            inputs = _masked(inputs, limits_B, 0)
            low, high, real, begun = (int(value) for value in (lengths_B.min(), lengths_B.max(), lengths_B.sum(), (lengths_B > 0).sum()))
            if low < 0 or high > steps:
                raise UserError(f"lengths range from {low} to {high}; they must be between 0 and the {steps} steps of the inputs")
        if resets is not None:
            resets = _masked(_fitting(resets, "resets", (steps, count), torch.bool, device), limits_B, False)
            begun = (count if begun is None else begun) + int(resets[1:].sum())
        if targets is not None:
            targets = _tensor(targets, "targets").to(device)
            each_step, each_lane = targets.shape[:2] == (steps, count), targets.shape[:1] == (count,)
            if pooled is None and each_step != each_lane:
                reading = each_lane
            # [lane, time] is more likely a batch that was not transposed than one with as many numbers per lane as there are steps.
            guess = each_lane and not each_step and targets.shape[1:2] != (steps,)
            by_lane = guess if pooled is None else pooled
            if not (each_lane if by_lane else each_step):
                raise UserError(
                    f"targets have shape {list(targets.shape)} for {steps} steps and {count} lanes; pass [{steps}, {count}, …] "
                    f"(one per step, time first), or [{count}, …] with pooled=True (one per lane)"
                )
            targets = targets if targets.is_floating_point() else targets.to(torch.int64)
            targets = _masked(targets, limits_B, torch.nan if targets.is_floating_point() else IGNORED, by_lane=by_lane)
        if weights is not None:
            weights = _weights(weights, targets, limits_B, (steps, count), by_lane=reading)
        if fresh is None or isinstance(fresh, bool):
            fresh_B = torch.full((count,), fresh is not False, device=device)
        else:
            fresh_B = _fitting(fresh, "fresh", (count,), torch.bool, device)
        numbers_B = torch.arange(count, device=device)
        lanes_B = numbers_B if lanes is None else _fitting(lanes, "lanes", (count,), torch.int64, device)
        return Batch(
            inputs=inputs,
            targets=targets,
            lengths=lengths_B,
            fresh=fresh_B,
            lanes=lanes_B,
            sequence=torch.where(lengths_B > 0, numbers_B, -1),
            offset=torch.zeros_like(numbers_B),
            epoch=epoch,
            step=-1 if step is None else step,
            real=real,
            begun=begun,
            goes_on=fresh is False or not (fresh is None or fresh is True or bool(torch.as_tensor(fresh).all())),
            numbers=None if lanes is None else tuple(lanes_B.tolist()),
            pooled=reading,
            history=history,
            resets=resets,
            weights=weights,
            unsure=pooled is None
            and resets is None
            and lengths is not None
            and targets is not None
            and targets.shape[:2] == (steps, count) == (count, count),
        )

    @property
    def steps(self) -> int:
        """Number of steps in the window, including padding."""
        return self.inputs.shape[0]

    @property
    def cells(self) -> tuple[int, int]:
        """(Real steps, steps including padding) of the full batch, even if this is only some of its lanes."""
        real, lanes = self.part_of or (self.real, self.lanes.shape[0])
        return real, lanes * self.steps

    @property
    def changes(self) -> int:
        """Number of real steps of the full batch that follow another one of their sequence."""
        real, cells = self.cells
        return real - (cells // self.steps if self.begun is None else self.begun)

    @property
    def idle(self) -> bool:
        """True if this part is known to have no real step: it is a placeholder on a worker that has no lanes, and is not scored."""
        return self.real == 0 and self.part_of is not None

    def take(self, low: int, high: int, *, pooled: bool) -> Batch:
        """Return lanes `low` to `high` (exclusive); an empty range gives one idle lane that adds nothing. `pooled`: one target per lane."""
        total = self.lanes.shape[0]
        if low == high:
            return self.take(0, 1, pooled=pooled)._idle(self.part_of or (self.real, total))
        if (low, high) == (0, total):
            return self
        by_lane = {"lengths", "fresh", "lanes", "sequence", "offset", "linear"}
        by_lane |= {"targets"} if pooled else set()
        by_lane |= {"weights"} if self.weights is not None and self.weights.dim() == 1 else set()
        part = self.each_tensor(lambda name, tensor: tensor[low:high] if name in by_lane else tensor[:, low:high])
        # The number of real steps in a subset of lanes is not known on the host.
        real = self.steps * (high - low) if self.real == self.steps * total else -1
        return replace(part, real=real, part_of=self.part_of or (self.real, total))

    def without(self, *, inputs: bool, targets: bool) -> Batch:
        """Drop the inputs, the targets or both: a worker that holds only middle layers reads neither. Weights, past values and the answers
        of a linear part go with the targets.
        """
        empty = self.inputs.new_empty((*self.inputs.shape[:2], 0)) if inputs else self.inputs
        left = replace(self, inputs=empty)
        return replace(left, targets=None, weights=None, history=None, linear=None) if targets else left

    def _idle(self, part_of: tuple[int, int]) -> Batch:
        """The same lanes without a step."""
        marks = {
            "fresh": True,
            "sequence": -1,
            "targets": IGNORED if self.targets is None or not self.targets.is_floating_point() else torch.nan,
        }
        idle = self.each_tensor(lambda name, tensor: tensor if name == "lanes" else torch.full_like(tensor, marks.get(name, 0)))
        return replace(idle, real=0, part_of=part_of)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; copies from pinned memory do not block."""
        to_device = device.type != "cpu"  # a non-blocking copy from GPU to CPU would return before the data has arrived
        return self.each_tensor(lambda _, tensor: tensor.to(device, non_blocking=to_device))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def each_tensor(self, change: Callable[[str, Tensor], Tensor]) -> Batch:
        """The batch with each tensor, of which the name is told as well, changed."""
        changed: dict[str, Any] = {name: change(name, tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)


def _unpacked(inputs: Any, targets: Any, lengths: Any) -> tuple[Any, Any, Any]:
    """Padded inputs and targets, and their lengths."""
    if not isinstance(inputs, PackedSequence) or lengths is not None:
        raise UserError("a PackedSequence has its own lengths; pack the inputs, or both alike, and remove lengths")
    inputs, lengths = pad_packed_sequence(inputs)
    if isinstance(targets, PackedSequence):
        targets, theirs = pad_packed_sequence(targets)
        if not torch.equal(lengths, theirs):
            raise UserError(f"the targets are packed with lengths {theirs.tolist()}, the inputs with {lengths.tolist()}; pack both alike")
    return inputs, targets, lengths


def _tensor(content: Any, name: str) -> Tensor:
    """A tensor of what was given; refuses what has no numbers in a fixed shape."""
    try:
        tensor = torch.as_tensor(content)
        if tensor.is_complex():
            raise TypeError("complex numbers")
        return tensor
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the {name} of a batch are a {type(content).__name__}, not numbers in a fixed shape ({one_line(error, 100)}); "
            "pass one tensor or array, in which several parts are side by side"
        ) from None


def _fitting(value: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whole numbers, or true and false, of a shape; a scalar is the same for all."""
    tensor = _tensor(value, name)
    tensor = tensor.expand(shape) if tensor.dim() == 0 else tensor
    if tensor.shape != shape or tensor.is_floating_point() or (tensor.dtype == torch.bool) != (dtype == torch.bool):
        kind = "true or false" if dtype == torch.bool else "a whole number"
        raise UserError(
            f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}; pass {kind} for each "
            f"{'lane' if len(shape) == 1 else 'step of each lane'}, {list(shape)}"
        )
    return tensor.to(device, dtype)


def _masked(tensor: Tensor, lengths_B: Tensor | None, value: float, *, by_lane: bool = False) -> Tensor:
    """The tensor, [T, B, …] or `by_lane` [B, …], with a value in place of padding and of idle lanes."""
    if lengths_B is None:
        return tensor
    padded = lengths_B == 0 if by_lane else torch.arange(len(tensor), device=tensor.device)[:, None] >= lengths_B
    return tensor.masked_fill(padded.reshape(*padded.shape, *[1] * (tensor.dim() - padded.dim())), value)


def _weights(weights: Any, targets: Tensor | None, lengths_B: Tensor | None, shape: tuple[int, int], *, by_lane: bool | None) -> Tensor:
    """Weights as floats on the device of the targets, 0 where there is only padding."""
    if targets is None:
        raise UserError("weights are those of targets, but the batch has none; pass Batch.of(inputs, targets, weights=...)")
    tensor = _tensor(weights, "weights")
    floats = tensor.to(targets.device, tensor.dtype if tensor.is_floating_point() else torch.float32)
    each_step = not by_lane and floats.shape[:2] == shape and floats.shape == targets.shape[: floats.dim()]
    if floats.shape != shape[1:] and not each_step:
        form = f"one for each lane, {[*shape[1:]]}" + ("" if by_lane else f", or for each step of each lane, {[*shape]}")
        raise UserError(f"weights have shape {list(floats.shape)} for targets {list(targets.shape)}; pass {form}")
    if not bool((floats.isfinite() & (floats >= 0)).all()):
        raise UserError("weights must be finite numbers from 0 on, and some are not; use 0 for a target that is not to be learned")
    return _masked(floats, lengths_B, 0.0, by_lane=floats.dim() == 1)
