"""The numbers of an optimizer step, in vectors with named slots: what one pass reports, and what all workers share after the last.

A pass (forward and backward of a batch) returns one float64 vector (`pass_slots`). Its size does not depend on the batch, so that it can be
the output of a captured graph. Vectors of several passes are added up.

After the last pass, every worker fills its part of one longer vector (`step_slots`), and a single all-reduce adds up the workers' vectors.
What must be known of each worker separately has one slot per rank, to which the others add zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from carrywave.parallel.mesh import Mesh


class Slots:
    """The layout of a vector: named slots, each with a shape."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.shapes = shapes
        self._sizes = [math.prod(shape) for shape in shapes.values()]
        self.size = sum(self._sizes)

    def pack(self, **parts: Tensor) -> Tensor:
        """The vector with these values; every slot must be given."""
        return torch.cat([parts[name].reshape(math.prod(shape)) for name, shape in self.shapes.items()])

    def read(self, vector: Tensor, name: str) -> Tensor:
        """One slot, in its shape."""
        return self.parts(vector)[name]

    def parts(self, vector: Tensor) -> dict[str, Tensor]:
        """All slots, each in its shape."""
        return {name: part.view(shape) for part, (name, shape) in zip(torch.split(vector, self._sizes), self.shapes.items(), strict=True)}


def pass_slots(parts: int) -> Slots:
    """What a pass reports: sums over its targets, and norms that are non-finite if what they belong to is."""
    return Slots(
        loss=(),  # sum over real targets
        count=(),  # number of real targets
        penalty=(),  # regularization; part of what was differentiated, but not of the loss
        encoded=(),  # norm of the outputs of a user's encoder
        carries=(parts,),  # norms of the parts of each layer's carry after the last step
    )


@dataclass(frozen=True)
class StepStats:
    """One worker's vector before the all-reduce, the sum over all workers after it."""

    slots: Slots
    vector: Tensor

    @property
    def score(self) -> tuple[Tensor, Tensor]:
        """Loss and count."""
        loss_sum, count = self["score"].unbind()
        return loss_sum, count

    @property
    def squared(self) -> Tensor:
        """The squared norm of the summed gradient."""
        return self["squared"]

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name]

    @cached_property
    def _parts(self) -> dict[str, Tensor]:
        return self.slots.parts(self.vector)

    def over(self, mesh: Mesh) -> StepStats:
        """The sum over all workers, in place. Collective: every rank must call it."""
        return StepStats(self.slots, mesh.sum_(self.vector))


def total(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of several vectors, or of several scalars."""
    return vectors[0] if len(vectors) == 1 else torch.stack(list(vectors)).sum(0)


def step_slots(mesh: Mesh, *, parameters: int, mark_columns: int) -> Slots:
    """What workers share after the last pass of a step."""
    return Slots(
        score=(2,),  # loss and count
        squared=(),  # squared norm of the summed gradient
        overflow=(),  # above zero if any worker overflowed (fp16)
        votes=(2,),  # how many workers were asked to stop, as on Ctrl-C and as on SIGTERM
        reached=(parameters,),  # how many workers have a gradient for each parameter
        codes=(mesh.world.size,),  # each worker's code for non-finite numbers
        marks=(mesh.world.size, mark_columns),  # each worker's checksums of what all must agree on
    )
