"""What workers must agree on after backward, in one message: sums of the step, votes, and what each says of bad numbers.

With canonical shards no number in the message is a sum over workers: each has a place of its own, with zeros in the others'. They are
added up afterwards, in one order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from carrywave.parallel.mesh import Mesh
from carrywave.plan.canonical_shards import SHARDS, tree


@dataclass(frozen=True)
class Sums:
    """Of one optimizer step; float64, on the device."""

    score: Tensor  # [2]: loss and count
    squared: Tensor  # square of the norm of the summed gradient
    overflow: Tensor  # more than zero where any worker has one
    votes: Tensor  # [2]
    said: Tensor  # by each worker; before the sum, by this one
    marks: Tensor  # of what workers must agree on, a row for each of them; before the sum, this one's
    reached: Tensor  # how many workers have a gradient of each parameter; before the sum, whether this one has

    def over(self, mesh: Mesh) -> Sums:
        """The sums over all workers, from each one's own."""
        rows = _own_row(mesh, self._row())
        numbers = torch.cat([self.score, self.squared[None], self.overflow[None], self.votes, self.reached, rows.flatten()])
        total = mesh.sum_(numbers)
        reached, places = torch.split(total[6:], [len(self.reached), rows.numel()])
        said, marks = _columns(places.view_as(rows))
        return Sums(total[:2], total[2], total[3], total[4:6], said, marks, reached)

    def over_shards(self, mesh: Mesh, scores: Mapping[int, Tensor]) -> Sums:
        """The same where this worker's part is in `scores`, by shard."""
        stages, device = mesh.plan.stages, self.squared.device
        score_SK2 = torch.zeros(stages, SHARDS, 2, dtype=torch.float64, device=device)
        for shard, score in scores.items():
            score_SK2[mesh.stage, shard] = score
        squared_S = torch.zeros(stages, dtype=torch.float64, device=device)
        squared_S[mesh.stage] = self.squared
        rows = _own_row(mesh, self._row())
        parts = [self.overflow[None], self.votes, self.reached, rows.flatten(), squared_S, score_SK2.flatten()]
        overflow, votes, reached, places, squared_S, flat = torch.split(mesh.sum_(torch.cat(parts)), [len(part) for part in parts])
        by_shard = flat.view_as(score_SK2).sum(0).unbind()
        said, marks = _columns(places.view_as(rows))
        return Sums(tree(by_shard, torch.add), squared_S.sum(), overflow[0], votes, said, marks, reached)

    def _row(self) -> Tensor:
        return torch.cat([self.said[None], self.marks])


def _own_row(mesh: Mesh, row: Tensor) -> Tensor:
    """A row for each worker: this one's in its place, and zeros in the others'."""
    if mesh.world.size == 1:
        return row[None]
    rows = row.new_zeros((mesh.world.size, len(row)))
    rows[mesh.world.rank] = row
    return rows


def _columns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """What each worker says of bad numbers, and its marks."""
    return rows[:, 0], rows[:, 1:]
