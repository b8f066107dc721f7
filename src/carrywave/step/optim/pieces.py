"""Optimizer state divided over the replicas of a stage: each replica owns a piece of every parameter, and updates it alone.

A parameter's elements are cut into one range for each replica, by its size alone. The optimizer of a replica is an ordinary one over
one-dimensional parameters that share their memory with the owned ranges, so it allocates state for these and leaves the rest alone. After
its step, the replicas exchange the new weights. torch's ZeroRedundancyOptimizer is not used: it deals out whole parameters, which one large
embedding unbalances, reads a skipped step on the host, and gathers its state by pickling.

Every optimizer that `optimizer.build` makes treats each element by itself, so the new weights have the bits of an optimizer over the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from carrywave.errors import UserError
from carrywave.parallel.sums.group_sums import Summing
from carrywave.step.norms import by_dtype
from carrywave.step.optim import weight_average

# Ranges begin at multiples of this: two of the widest vectors that a CPU has. Kernels treat what is left of a tensor after whole pairs of
# vectors by other instructions, which may round differently, so it must be the same elements with and without pieces.
ALIGNED_BYTES = 128
ROUND_BYTES = 8 << 20  # of the weights that are exchanged at once


def share_size(parameter: Tensor, replicas: int) -> int:
    """The number of elements that a replica owns; the last ones may own fewer, or none."""
    aligned = ALIGNED_BYTES // parameter.element_size()
    return -(-parameter.numel() // (replicas * aligned)) * aligned


def bounds(parameter: Tensor, replica: int, replicas: int) -> tuple[int, int]:
    """The half-open range of elements that a replica owns."""
    size, numel = share_size(parameter, replicas), parameter.numel()
    return min(replica * size, numel), min((replica + 1) * size, numel)


@dataclass(frozen=True)
class Piece:
    """The range of a parameter that this replica owns, and the one-dimensional parameter over it that the optimizer sees."""

    name: str  # of the parameter
    whole: nn.Parameter
    first: int
    last: int
    part: nn.Parameter

    def of(self, tensor: Tensor) -> Tensor:
        """The owned range of a tensor that has as many elements as the parameter."""
        return tensor.reshape(-1)[self.first : self.last]

    def take(self) -> None:
        """Give the optimizer this range of the parameter's gradient, and of its values if they have been moved since."""
        grad = self.whole.grad
        self.part.grad = None if grad is None else grad.view(-1)[self.first : self.last]
        now = self.whole.data.view(-1)[self.first : self.last]
        if now.data_ptr() != self.part.data_ptr():
            self.part.data = now


class Pieces:
    """The pieces of one replica. `group` exchanges weights with the other replicas of its stage."""

    def __init__(self, replica: int, replicas: int, group: Summing) -> None:
        self.replica, self.replicas, self.group = replica, replicas, group
        self._wholes: dict[int, nn.Parameter] = {}  # by id, in an order that is the same on all replicas
        self._owned: dict[int, Piece] = {}  # by the parameter's id

    def add(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Cut the parameters that are not known yet."""
        for name, parameter in named:
            if id(parameter) in self._wholes:
                continue
            if not parameter.is_contiguous():
                raise UserError(
                    f"the model's {name} is not contiguous in memory, so train.shard_optimizer cannot divide it; "
                    "create the parameter from tensor.contiguous(), or remove train.shard_optimizer"
                )
            self._wholes[id(parameter)] = parameter
            first, last = bounds(parameter, self.replica, self.replicas)
            if first < last or (self.replica == 0 and not parameter.numel()):
                part = nn.Parameter(parameter.detach().view(-1)[first:last])
                self._owned[id(parameter)] = Piece(name, parameter, first, last, part)

    @property
    def owned(self) -> list[Piece]:
        """Every piece of this replica, trained at the moment or not."""
        return list(self._owned.values())

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer is built over."""
        return [(piece.name, piece.part) for piece in self.owned]

    def of(self, parameter: Tensor) -> Piece | None:
        """The piece of a parameter; None if other replicas own all of it."""
        return self._owned.get(id(parameter))

    def take(self) -> None:
        """Give the optimizer its ranges of the gradients."""
        for piece in self._owned.values():
            piece.take()

    def cut(self, tensor: Tensor) -> list[Tensor]:
        """A contiguous tensor of a parameter's shape and dtype, cut into the ranges that the replicas own."""
        return [tensor.view(-1)[slice(*bounds(tensor, replica, self.replicas))] for replica in range(self.replicas)]

    @torch.no_grad()
    def exchange(self) -> None:
        """Fill every parameter with what its owners have. Collective: every replica of the stage must call it."""
        for part in by_dtype([parameter.detach() for parameter in self._wholes.values()]):
            for ranges in _rounds(part, self.replicas):
                self._exchange(ranges)

    def _exchange(self, ranges: Sequence[_Ranges]) -> None:
        """One round: every replica sends its ranges, one after the other, as a row of a matrix."""
        like = ranges[0].whole
        rows = torch.zeros(self.replicas, sum(each.size for each in ranges), dtype=like.dtype, device=like.device)
        ours: tuple[list[Tensor], list[Tensor]] = [], []  # ranges of the parameters, and their places in the rows
        theirs: tuple[list[Tensor], list[Tensor]] = [], []
        start = 0
        for each in ranges:
            for replica in range(self.replicas):
                part, row = each.of(replica), rows[replica, start : start + each.size]
                if part.numel():
                    pairs = ours if replica == self.replica else theirs
                    pairs[0].append(part)
                    pairs[1].append(row[: part.numel()])
            start += each.size
        if ours[0]:
            torch._foreach_copy_(ours[1], ours[0])
        work = self.group.all_gather(rows, self.replica)
        if work is not None:
            work.wait()
        if theirs[0]:
            torch._foreach_copy_(*theirs)

    @contextmanager
    def averaged(self, optimizer: Optimizer) -> Iterator[None]:
        """Replace the parameters by the averages of the optimizer over these pieces inside this context, if there are any. Entering it is
        collective; leaving it is not, so that a worker that fails inside waits for nobody.
        """
        if not weight_average.averaged(optimizer):
            yield
            return
        wholes = list(self._wholes.values())
        with torch.no_grad():
            raw = [whole.clone() for whole in wholes]
        try:
            with weight_average.swapped(optimizer):
                self.exchange()
                yield
        finally:
            with torch.no_grad():
                for whole, kept in zip(wholes, raw, strict=True):
                    whole.copy_(kept)


@dataclass(frozen=True)
class _Ranges:
    """Part of what each replica owns of a parameter: elements [begin, begin + size) of its range, as far as there are any."""

    whole: Tensor
    begin: int
    size: int
    replicas: int

    def of(self, replica: int) -> Tensor:
        first, last = bounds(self.whole, replica, self.replicas)
        return self.whole.view(-1)[min(first + self.begin, last) : min(first + self.begin + self.size, last)]


def _rounds(wholes: Sequence[Tensor], replicas: int) -> Iterator[list[_Ranges]]:
    """Parameters of one dtype in rounds of about `ROUND_BYTES`, however large a parameter is."""
    most = max(1, ROUND_BYTES // (replicas * wholes[0].element_size()))  # elements of a row
    ranges: list[_Ranges] = []
    room = most
    for whole in wholes:
        share, begin = share_size(whole, replicas), 0
        while begin < share:
            size = min(room, share - begin)
            ranges.append(_Ranges(whole, begin, size, replicas))
            begin, room = begin + size, room - size
            if not room:
                yield ranges
                ranges, room = [], most
    if ranges:
        yield ranges
