"""`Model(encoder, lstm, head)`: checks a user's modules and makes them safe to split across workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from carrywave.errors import UserError
from carrywave.kernels.lengths import for_each_lane
from carrywave.model.arguments import check_shapes, checked_lengths, checked_resets
from carrywave.model.dropout import Dropout, check_unwrapped, keyed
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import Pooled
from carrywave.model.over_time.front import Front, shorter
from carrywave.model.over_time.global_norm import has_norms
from carrywave.model.recurrent import Recurrent
from carrywave.model.stage import Stage
from carrywave.model.state import Chunk, State

__all__ = ["Chunk", "Model", "State"]


class Model(nn.Module):
    """Any per-step encoder, a stack of LSTM or other recurrent layers, any head.

    The encoder maps a chunk's inputs [T, B, …] to [T, B, I]; a `cw.Front` makes [T / stride, B, I] of whole sequences. A head has
    `loss(y, target) -> (sum, count)`; one with `pooled = True` also has `start(lanes, dtype, device) -> acc` and
    `pool(y, lengths, acc) -> acc`, and its loss reads the accumulator, a tuple of tensors [B, …]. One with `reads_whole = True` needs
    whole sequences at once, as a CRF or CTC does: it has `loss(y, target, lengths)` and `forward(y, lengths)`, is never given a part of a
    sequence, and with `pooled = True` its targets are one row per lane. Every nn.Dropout in them becomes a keyed one.

    >>> import torch
    >>> from torch import nn
    >>> import carrywave as cw
    >>> class Head(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.out = nn.Linear(8, 1)
    ...     def forward(self, y):
    ...         return self.out(y)
    ...     def loss(self, y, target):
    ...         return (self(y) - target).square().sum(), torch.tensor(target.numel())
    >>> model = cw.Model(nn.Linear(3, 4), cw.LSTM(4, 8), Head())
    >>> y, state = model(torch.zeros(5, 2, 3))
    >>> tuple(model.output(y, state).shape)
    (5, 2, 1)
    """

    def __init__(
        self,
        encoder: nn.Module,
        lstm: Recurrent,
        head: nn.Module,
        *,
        dropout_in: nn.Module | None = None,
        dropout_out: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for part, module in (("encoder", encoder), ("head", head)):
            if not isinstance(module, nn.Module):
                raise UserError(f"the {part} of a model must be an nn.Module, got {type(module).__name__}; wrap it in one")
            check_unwrapped(module)
        if not isinstance(lstm, Recurrent):
            raise UserError(
                f"the layers of a model must be carrywave's, as in cw.LSTM, got {type(lstm).__name__}; build them and use load_state_dict"
            )
        for part, dropout in (("dropout_in", dropout_in), ("dropout_out", dropout_out)):
            if dropout is not None and type(dropout) not in (Dropout, nn.Dropout, nn.Identity):
                where = "encoder" if part == "dropout_in" else "head"
                raise UserError(f"{part} is a {type(dropout).__name__}, but only dropout belongs there; make it a part of the {where}")
        if isinstance(head, Forecast) and head.past_steps and not type(head).__module__.startswith("carrywave."):
            raise UserError(
                f"{type(head).__name__} is a subclass of a head that reads past values; use one of your own, without past_steps"
            )
        if has_norms(head):
            raise UserError(f"the head {type(head).__name__} has a GlobalNorm, but scores only lanes of its own; put it into the encoder")
        if lstm.batch_first:
            raise UserError("the layers of a model must be time first; build them without batch_first")
        if not callable(getattr(head, "loss", None)):
            raise UserError(f"the head {type(head).__name__} has no loss; define loss(y, target) -> (sum, count)")
        self.pooled = bool(getattr(head, "pooled", False))
        self.whole_head = bool(getattr(head, "reads_whole", False))
        missing = [name for name in ("start", "pool") if not callable(getattr(head, name, None))]
        if self.pooled and missing and not self.whole_head:
            raise UserError(f"the pooled head {type(head).__name__} has no {missing[0]}; define start, pool and loss")
        if isinstance(head, Pooled):
            # Pooling depends on where the reverse half of the output ends, and only here are head and LSTM both known.
            head.bidirectional = lstm.bidirectional
        self.stride = encoder.stride if isinstance(encoder, Front) else 1
        if self.stride > 1 and not self.pooled and not self.whole_head:
            raise UserError(
                f"a front of stride {self.stride} leaves fewer steps than there are targets, but the head {type(head).__name__} "
                "scores every step; use strides of 1, or a head that pools"
            )
        self.encoder = keyed(encoder, "encoder")
        self.dropout_in = None if dropout_in is None else keyed(dropout_in, "dropout_in")
        self.lstm = lstm
        self.dropout_out = None if dropout_out is None else keyed(dropout_out, "dropout_out")
        self.head = keyed(head, "head")
        self.drawn = False  # True: every worker has drawn the weights of its own units by their key, and has no memory for the others
        self.rounded_by_host: frozenset[str] = frozenset()  # of those drawn, the names of weights whose last bits depend on the host

    @property
    def has_output(self) -> bool:
        """True if the head has a `forward`, which metrics and predictions need; training needs only a loss."""
        return type(self.head).forward is not nn.Module.forward

    @property
    def reads_whole(self) -> bool:
        """True if a front, bidirectional layers or the head need the whole sequence at once."""
        return self.has_front or self.lstm.bidirectional or self.whole_head

    def output_steps(self, steps: int) -> int:
        """At how many steps the head answers, for a sequence of this many steps."""
        return shorter(steps, self.stride) * (self.head.upsample if isinstance(self.head, Ctc) else 1)

    @property
    def has_norms(self) -> bool:
        """True if the encoder has norms over the global batch."""
        return has_norms(self.encoder)

    @property
    def has_front(self) -> bool:
        """True if the encoder reads over time."""
        return isinstance(self.encoder, Front)

    @property
    def units(self) -> int:
        """Number of units that stages are cut from: encoder, layers and head."""
        return self.lstm.num_layers + 2

    def start(self, lanes: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> State:
        """The state before the first step."""
        return Stage(self).start(lanes, device, dtype)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        key: Tensor | None = None,
        *,
        fresh: Tensor | Sequence[bool] | None = None,
        resets: Tensor | None = None,
        lanes: Tensor | Sequence[int] | None = None,
        start: int = 0,
        full: bool = False,
    ) -> tuple[Tensor, State]:
        """The head's input for x [T, B, …], and the state after it; `output` returns the head's result.

        `lengths`, `fresh` and `lanes` are [B]. Lengths are those of x, also if a front shortens it. `fresh` lanes start from the initial
        state instead of the given one. `resets` [T, B], true or false: a new sequence starts with this step.
        """
        if isinstance(x, PackedSequence):
            raise UserError("a model reads padded inputs, not a PackedSequence; pad_packed_sequence gives these, and their lengths")
        steps, count = x.shape[:2]
        if state is not None and not torch.compiler.is_compiling():  # a program for any number of lanes knows none
            check_shapes(self.lstm, state.carries, count, range(self.lstm.num_layers))
        lengths_B = None if lengths is None else checked_lengths(lengths, steps, count, x.device)
        fresh_B = None if fresh is None else for_each_lane(fresh, "fresh", count, torch.bool).to(x.device)
        lanes_B = None if lanes is None else for_each_lane(lanes, "lanes", count, torch.int64).to(x.device)
        resets_TB = None if resets is None else checked_resets(self, resets, x.shape[:2], x.device)
        state = self.start(count, x.device) if state is None else state
        y, _, state = Stage(self)(x, state, Chunk(lengths_B, fresh_B, lanes_B, start, key, full, resets=resets_TB))
        return y, state

    def output(
        self,
        y: Tensor,
        state: State,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        past: Tensor | None = None,
        linear: Tensor | None = None,
    ) -> Any:
        """The head's result: per step of y, or per lane from the accumulator if the head is pooled. `lengths` [B], as in `forward`, are for
        one that reads whole sequences, `past` [T, B, C, N] for one with `past_steps` N, `linear` [B, answers + 1] (`Batch.linear`) for one
        that is mixed with a linear part.
        """
        if not self.whole_head:
            beside = past if linear is None else linear
            return self.head(state.acc if self.pooled else y, *([] if beside is None else [beside]))
        steps, count = y.shape[:2]
        if lengths is not None:
            lengths = shorter(torch.as_tensor(lengths), self.stride)
        lengths_B = checked_lengths([steps] * count if lengths is None else lengths, steps, count, y.device)
        return self.head(y, lengths_B, *([] if past is None else [past]))
