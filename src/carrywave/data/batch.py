"""A `Batch` holds the data of one training step: tensors [time, lane, …], the length of each lane, and where lanes start a new sequence.

Padding is marked in the targets: -100 for integer targets, NaN for float targets. The mask can therefore be derived from the
targets, and a loss needs no other argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    >>> batch.steps, round(batch.waste, 3)
    (12, 0.208)
    """

    inputs: Tensor  # [T, B] int64 tokens, or [T, B, F] float32
    targets: Tensor | None  # per step [T, B, …]; pooled [B, …], with resets at the last step of each sequence; None in prediction
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
    sequences: int | None = None  # with resets: the most sequences of a lane, or a bound of it; None: unknown

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
        with this step, from the initial carry; targets of a head that pools then are [T, B, …], one at the last step of each sequence.
        `weights`, numbers from 0 on, [T, B] for targets per step or [B] for each lane: the loss of a target is multiplied by its weight,
        and a mean divided by the sum of all.
        """
        if isinstance(inputs, PackedSequence) or isinstance(targets, PackedSequence):
            inputs, targets, lengths = _unpacked(inputs, targets, lengths)
        inputs = _tensor(inputs, "inputs")
        history = None if history is None else _tensor(history, "history")
        if inputs.dim() < 2 or 0 in inputs.shape[:2]:
            raise UserError(f"batch inputs have shape {list(inputs.shape)}; pass [time, lane, …] with at least one step and one lane")
        steps, count = inputs.shape[:2]
        inputs = inputs if inputs.is_floating_point() else inputs.to(torch.int64)
        device = inputs.device
        if history is not None and (history.dim() != 3 or history.shape[0] < steps or history.shape[1] != count):
            raise UserError(
                f"history has shape {list(history.shape)} for {steps} steps, {count} lanes; pass [past - 1 + {steps}, {count}, columns], "
                "the values before the first step, and then that of each step"
            )
        lengths_B = _one_a_lane(steps if lengths is None else lengths, "lengths", count, torch.int64, device)
        real = steps * count
        if lengths is not None:
            padded = torch.arange(steps, device=device)[:, None] >= lengths_B
            # Overwrite padding, whatever it holds: NaN times a mask of zeros would still be NaN in a gradient.
            inputs = inputs.masked_fill(padded.reshape(steps, count, *[1] * (inputs.dim() - 2)), 0)
            low, high, real = (int(value) for value in (lengths_B.min(), lengths_B.max(), lengths_B.sum()))
            if low < 0 or high > steps:
                raise UserError(f"lengths range from {low} to {high}; they must be between 0 and the {steps} steps of the inputs")
        begun = None if lengths is None else int((lengths_B > 0).sum())
        sequences = None
        if resets is not None:
            resets, inside = _resets(resets, lengths_B, steps, count)
            begun, sequences = (count if begun is None else begun) + inside, int(resets.sum(0).max()) + 1
        reading = pooled
        if targets is not None:
            targets = _tensor(targets, "targets").to(device)
            each_step, each_lane = _readings(targets, steps, count)
            reading = each_lane if pooled is None and each_step != each_lane and resets is None else pooled
            by_lane = pooled if resets is None else False
            targets = _targets(targets, None if lengths is None else lengths_B, steps, count, by_lane)
            if pooled and resets is not None:
                check_ends(targets, resets, lengths_B)
        if weights is not None:
            weights = _weights(weights, targets, None if lengths is None else lengths_B, steps, count, by_lane=reading and resets is None)
        numbers_B = torch.arange(count, device=device)
        lanes_B = numbers_B if lanes is None else _one_a_lane(lanes, "lanes", count, torch.int64, device)
        return Batch(
            inputs=inputs,
            targets=targets,
            lengths=lengths_B,
            fresh=_one_a_lane(True if fresh is None else fresh, "fresh", count, torch.bool, device),
            lanes=lanes_B,
            sequence=torch.where(lengths_B > 0, numbers_B, -1),
            offset=torch.zeros_like(numbers_B),
            epoch=epoch,
            step=-1 if step is None else step,
            real=real,
            begun=begun,
            goes_on=fresh is not None and not bool(torch.as_tensor(fresh).all()),
            numbers=None if lanes is None else tuple(lanes_B.tolist()),
            pooled=reading,
            history=history,
            resets=resets,
            weights=weights,
            sequences=sequences,
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
    def all_lanes(self) -> tuple[int, ...]:
        """The numbers of all lanes of the full batch, even if this is only some of them, without reading from a device."""
        return tuple(range(self.cells[1] // self.steps)) if self.numbers is None else self.numbers

    @property
    def changes(self) -> int:
        """Number of real steps of the full batch that follow another one of their sequence."""
        real, cells = self.cells
        return real - (cells // self.steps if self.begun is None else self.begun)

    @property
    def idle(self) -> bool:
        """True if this part is known to have no real step: it is a placeholder on a worker that has no lanes, and is not scored."""
        return self.real == 0 and self.part_of is not None

    @property
    def waste(self) -> float:
        """Fraction of the full batch that is padding."""
        real, total = self.cells
        return 1.0 - real / total if total else 0.0

    def take(self, low: int, high: int, *, pooled: bool) -> Batch:
        """Return lanes `low` to `high` (exclusive); an empty range gives one idle lane that adds nothing. `pooled`: one target per lane."""
        if low == high:
            return self._idle(pooled)
        total = self.lanes.shape[0]
        if (low, high) == (0, total):
            return self
        targets = self.targets
        if targets is not None:
            targets = targets[low:high] if pooled and self.resets is None else targets[:, low:high]
        weights = self.weights
        if weights is not None:
            weights = weights[low:high] if weights.dim() == 1 else weights[:, low:high]
        full = self.real == self.steps * total
        return replace(
            self,
            inputs=self.inputs[:, low:high],
            targets=targets,
            lengths=self.lengths[low:high],
            fresh=self.fresh[low:high],
            lanes=self.lanes[low:high],
            sequence=self.sequence[low:high],
            offset=self.offset[low:high],
            history=None if self.history is None else self.history[:, low:high],
            resets=None if self.resets is None else self.resets[:, low:high],
            weights=weights,
            # The number of real steps in a subset of lanes is not known on the host.
            real=self.steps * (high - low) if full else -1,
            part_of=self.part_of or (self.real, total),
        )

    def without(self, *, inputs: bool, targets: bool) -> Batch:
        """Drop the inputs, the targets or both: a worker that holds only middle layers reads neither. Weights and past values go with the
        targets.
        """
        empty = self.inputs.new_empty((*self.inputs.shape[:2], 0)) if inputs else self.inputs
        left = replace(self, inputs=empty)
        return replace(left, targets=None, weights=None, history=None) if targets else left

    def _idle(self, pooled: bool) -> Batch:
        one = self.take(0, 1, pooled=pooled)
        targets = one.targets
        if targets is not None:
            targets = torch.full_like(targets, torch.nan if targets.is_floating_point() else IGNORED)
        return replace(
            one,
            inputs=torch.zeros_like(one.inputs),
            targets=targets,
            lengths=torch.zeros_like(one.lengths),
            fresh=torch.ones_like(one.fresh),
            sequence=torch.full_like(one.sequence, -1),
            offset=torch.zeros_like(one.offset),
            real=0,
            part_of=one.part_of or (self.real, self.lanes.shape[0]),
            history=None if one.history is None else torch.zeros_like(one.history),
            resets=None if one.resets is None else torch.zeros_like(one.resets),
            weights=None if one.weights is None else torch.zeros_like(one.weights),
        )

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; copies from pinned memory do not block."""
        to_device = device.type != "cpu"  # a non-blocking copy from GPU to CPU would return before the data has arrived
        moved = {
            name: getattr(self, name).to(device, non_blocking=to_device)
            for name in ("inputs", "targets", "lengths", "fresh", "lanes", "sequence", "offset", "history", "resets", "weights")
            if getattr(self, name) is not None
        }
        return replace(self, **moved)


def _unpacked(inputs: Any, targets: Any, lengths: Any) -> tuple[Any, Any, Any]:
    """Padded inputs and targets, and their lengths."""
    if not isinstance(inputs, PackedSequence):
        raise UserError("the targets are a PackedSequence, but the inputs are not; pack both, or pass padded ones and lengths")
    if lengths is not None:
        raise UserError("a PackedSequence has its own lengths; remove lengths")
    inputs, lengths = pad_packed_sequence(inputs)
    if isinstance(targets, PackedSequence):
        targets, theirs = pad_packed_sequence(targets)
        if not torch.equal(lengths, theirs):
            raise UserError(f"the targets are packed with lengths {theirs.tolist()}, the inputs with {lengths.tolist()}; pack both alike")
    return inputs, targets, lengths


def _one_a_lane(value: Any, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one value per lane, broadcasting a scalar."""
    value_B = _tensor(value, name)
    if value_B.dim() == 0:
        value_B = value_B.expand(count)
    if value_B.shape != (count,) or value_B.is_floating_point() or (value_B.dtype == torch.bool) != (dtype == torch.bool):
        kind = "true or false" if dtype == torch.bool else "a whole number"
        raise UserError(f"{name} has shape {list(value_B.shape)} and dtype {value_B.dtype}; pass {kind} for each of the {count} lanes")
    return value_B.to(device, dtype)


def _resets(resets: Any, lengths_B: Tensor, steps: int, count: int) -> tuple[Tensor, int]:
    """Resets at real steps, on the device of the lengths, and how many of them come after a lane's first step."""
    resets_TB = _tensor(resets, "resets")
    if resets_TB.shape != (steps, count) or resets_TB.dtype != torch.bool:
        raise UserError(
            f"resets has shape {list(resets_TB.shape)} and dtype {resets_TB.dtype}; pass true or false for each of the {steps} steps of "
            f"each of the {count} lanes, [{steps}, {count}]"
        )
    resets_TB = resets_TB.to(lengths_B.device) & (torch.arange(steps, device=lengths_B.device)[:, None] < lengths_B)
    return resets_TB, int(resets_TB[1:].sum())


def check_ends(targets: Tensor, resets_TB: Tensor, lengths_B: Tensor) -> None:
    """Refuse targets of sequences, of which several lie in a lane, that are not at their last steps."""
    present_TB = targets.isfinite() if targets.is_floating_point() else targets != IGNORED
    present_TB = present_TB.flatten(2).any(2) if present_TB.dim() > 2 else present_TB
    ends_TB = torch.arange(len(targets), device=targets.device)[:, None] == lengths_B - 1
    ends_TB[:-1] |= resets_TB[1:]
    if bool((present_TB & ~ends_TB).any()):
        step, lane = (int(each) for each in (present_TB & ~ends_TB).nonzero()[0])
        raise UserError(
            f"a head that pools has one target for each sequence, at its last step, but there is one at step {step} of lane {lane}, before "
            f"its end; set those of other steps to {'NaN' if targets.is_floating_point() else IGNORED}"
        )


def _tensor(content: Any, name: str) -> Tensor:
    """A tensor of what was given; refuses what has no numbers in a fixed shape."""
    try:
        tensor = torch.as_tensor(content)
        if tensor.is_complex():
            raise TypeError("complex numbers")
        return tensor
    except (TypeError, ValueError, RuntimeError) as error:
        several = "put the parts side by side in one tensor, and have the encoder take them apart" if isinstance(content, Mapping) else ""
        raise UserError(
            f"the {name} of a batch are a {type(content).__name__}, not numbers in a fixed shape ({one_line(error, 100)}); "
            f"{several or f'pass the {name} as one tensor or array'}"
        ) from None


def _weights(weights: Any, targets: Tensor | None, lengths_B: Tensor | None, steps: int, count: int, *, by_lane: bool | None) -> Tensor:
    """Weights as floats on the device of the targets, 0 where there is only padding."""
    if targets is None:
        raise UserError("weights are those of targets, but the batch has none; pass Batch.of(inputs, targets, weights=...)")
    tensor = _tensor(weights, "weights")
    floats = tensor.to(targets.device, tensor.dtype if tensor.is_floating_point() else torch.float32)
    shape = tuple(floats.shape)
    if shape != (count,) and (by_lane or shape[:2] != (steps, count) or shape != targets.shape[: floats.dim()]):
        form = f"one for each of the {count} lanes, [{count}]" + ("" if by_lane else f", or for each step of each lane, [{steps}, {count}]")
        raise UserError(f"weights have shape {list(shape)} for targets {list(targets.shape)}; pass {form}")
    if not bool((floats.isfinite() & (floats >= 0)).all()):
        raise UserError("weights must be finite numbers from 0 on, and some are not; use 0 for a target that is not to be learned")
    if lengths_B is None:
        return floats
    padded = lengths_B == 0 if floats.dim() == 1 else torch.arange(steps, device=floats.device)[:, None] >= lengths_B
    return floats.masked_fill(padded.reshape(*padded.shape, *[1] * (floats.dim() - padded.dim())), 0.0)


def _readings(targets: Tensor, steps: int, count: int) -> tuple[bool, bool]:
    """Whether the shape of targets fits one per step, and one per lane."""
    return targets.shape[:2] == (steps, count), targets.shape[:1] == (count,)


def _targets(targets: Tensor, lengths_B: Tensor | None, steps: int, count: int, pooled: bool | None) -> Tensor:
    """Convert targets to a dtype that losses accept, and mask those of padding and of idle lanes."""
    each_step, each_lane = _readings(targets, steps, count)
    if pooled is None:
        # [lane, time] is more likely a batch that was not transposed than one with as many numbers per lane as there are steps.
        pooled = each_lane and not each_step and targets.shape[1:2] != (steps,)
    if not (each_lane if pooled else each_step):
        raise UserError(
            f"targets have shape {list(targets.shape)} for {steps} steps and {count} lanes; pass [{steps}, {count}, …] "
            f"(one per step, time first), or [{count}, …] with pooled=True (one per lane)"
        )
    targets = targets if targets.is_floating_point() else targets.to(torch.int64)
    if lengths_B is None:
        return targets
    padded = lengths_B == 0 if pooled else torch.arange(steps, device=targets.device)[:, None] >= lengths_B
    padded = padded.reshape(*padded.shape, *[1] * (targets.dim() - padded.dim()))
    return torch.where(padded, torch.nan if targets.is_floating_point() else IGNORED, targets)
