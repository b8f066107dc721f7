"""The numbers of an optimizer step beside its gradients: what one pass reports, what workers tell each other, and the arithmetic from sums
of gradients to the factor that divides and clips them.

A pass (forward and backward of a batch) reports one float64 vector: loss, count and penalty, and the norms of the carries it leaves, which
are not finite if a carry is not. Its size does not depend on the batch, so that it can be the output of a recorded graph. Vectors of
several passes are added up.

Workers add up one vector with named slots (`SharedNumbers`). Where all of them are replicas it lies behind the gradients and travels with
them in one message; in a pipeline it follows them, because the norm of a gradient over all stages is known only then. What must be known of
each worker separately has one slot for each rank, to which the others add zero. The vector may be of float32, as gradients are: whole
numbers are sent in two parts below 2**20, which are exact.

Nothing here reads a value on the host, so a step can run ahead of the device or be captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from carrywave.parallel.mesh import Mesh

LOSS, COUNT, PENALTY, CARRIES = range(4)  # in what a pass reports: sums over real targets; norms from the last one on
PART = 1 << 20  # of a whole number that is sent in two parts
T = TypeVar("T", bound=Tensor)


class Slots:
    """The layout of a vector: named slots, each with a shape."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.shapes = shapes
        self._sizes = [math.prod(shape) for shape in shapes.values()]
        self.size = sum(self._sizes)

    def parts(self, vector: Tensor) -> dict[str, Tensor]:
        """All slots, each in its shape; views of the vector."""
        return {name: part.view(shape) for part, (name, shape) in zip(torch.split(vector, self._sizes), self.shapes.items(), strict=True)}


class SharedNumbers:
    """What the workers of a step tell each other. `parameters`: of the whole model; `columns`: checksums of each worker."""

    def __init__(self, mesh: Mesh, parameters: int, columns: int) -> None:
        size = mesh.world.size
        self.mesh = mesh
        self.slots = Slots(
            loss=(),  # over real targets
            count=(2,),
            squared=(),  # squared norm of the summed gradient; of a pipeline
            overflow=(),  # above zero if any worker overflowed (fp16); of a pipeline
            votes=(2,),  # how many workers were asked to stop, as on Ctrl-C and as on SIGTERM
            reached=(parameters,),  # how many workers have a gradient for each parameter
            rows=(size, 1 + 2 * columns),  # of each worker: its code for non-finite numbers, and checksums of what all must agree on
        )
        self.travels = False  # True if it lies behind the gradients
        self.place(torch.zeros(self.slots.size, dtype=torch.float64, device=mesh.device))

    def place(self, vector: Tensor) -> None:
        """Let the numbers lie here."""
        self.vector = vector
        self.parts = self.slots.parts(vector)
        self.rows = self.parts["rows"]
        self.common = vector[: vector.numel() - self.rows.numel()]
        self.codes = self.rows[:, 0]

    def fill(self, passes: Tensor, marks: Tensor, reached: Tensor, code: Tensor) -> None:
        """This worker's numbers in its slots, and zeros in those of others."""
        if not self.travels:
            self.vector.zero_()  # otherwise zeroed with the gradients
        votes, checksums = marks[:2], marks[2:]
        self.common.copy_(torch.cat([passes[:1], split(passes[COUNT]), torch.zeros_like(votes), votes, reached]))
        self.rows[self.mesh.world.rank].copy_(torch.cat([code[None], split(checksums).view(-1)]))

    def sum(self) -> None:
        """Add up what all workers have; if they have not been added up with the gradients. Collective: every rank must call it."""
        if not self.travels:
            self.mesh.sum_(self.vector)

    @property
    def score(self) -> tuple[Tensor, Tensor]:
        """Loss and count over all workers, in float64."""
        return self.parts["loss"].double(), joined(self.parts["count"])

    @property
    def marks(self) -> Tensor:
        """[workers, columns]"""
        return joined(self.rows[:, 1:].reshape(len(self.rows), -1, 2))


def split(numbers: Tensor) -> Tensor:
    """[…, 2]: numbers as how often they contain `PART`, and the rest."""
    high = (numbers / PART).floor()
    return torch.stack([high, numbers - high * PART], dim=-1)


def joined(parts: Tensor) -> Tensor:
    """The numbers again, or their sums if parts were added up, in float64."""
    high, low = parts.double().unbind(-1)
    return high * PART + low


def total(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of several vectors, or of several scalars."""
    return vectors[0] if len(vectors) == 1 else torch.stack(list(vectors)).sum(0)


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each tensor, in float64, so that squares do not overflow; finite if all of its elements are."""
    groups = by_dtype(tensors)
    each: list[Tensor] = []
    for part in groups:
        wide = torch.promote_types(part[0].dtype, torch.float32)
        each.append(torch.stack(list(torch._foreach_norm(part, 2, wide))).to(torch.float64))
    if len(groups) <= 1:
        return each[0] if each else torch.zeros(0, dtype=torch.float64)
    by_id = dict(zip((id(tensor) for group in groups for tensor in group), torch.cat(each).unbind(), strict=True))
    return torch.stack([by_id[id(tensor)] for tensor in tensors])


def mean_of(squared: Tensor, count: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """The gradient norm of the mean loss, from the squared gradient norm of the summed loss, and the factor for the summed gradient: one
    over the count, reduced further if the norm exceeds the limit. The norm is zero if there are no targets.
    """
    # Divided by infinity, a finite gradient is zero and a non-finite one NaN, so that it still shows.
    divisor = torch.where(count > 0, count, torch.inf)
    norm, share = squared.sqrt() / divisor, 1.0 / divisor
    # The epsilon is that of torch.nn.utils.clip_grad_norm_, so that both clip by the same factor.
    return norm, share if limit is None else share * (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_(grads: Sequence[Tensor], by: Tensor) -> None:
    """Multiply all gradients by one factor."""
    for part in by_dtype(grads):
        torch._foreach_mul_(part, by.to(part[0].device, part[0].dtype))


def by_dtype(tensors: Sequence[T]) -> list[list[T]]:
    """Group tensors by dtype, as foreach operations need it to fuse them; keeps the order within a group."""
    groups: dict[torch.dtype, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
