"""Combines in one all-reduce what workers must share after backward: sums of the step, votes to stop, and codes for non-finite numbers.

With canonical shards, the all-reduce adds up nothing whose rounding depends on the order: each worker's losses and norms have their own
slots, with zeros from the other workers, and the slots are added up afterwards in a fixed order.
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
    """The sums of one optimizer step; float64, on the device."""

    score: Tensor  # [2]: loss and count
    squared: Tensor  # squared norm of the summed gradient
    overflow: Tensor  # above zero if any worker overflowed
    votes: Tensor  # [2]
    said: Tensor  # code for non-finite numbers of each worker; before the all-reduce, this worker's
    marks: Tensor  # checksums of what workers must agree on, a row per worker; before the all-reduce, this worker's
    reached: Tensor  # how many workers have a gradient for each parameter; before the all-reduce, whether this one has

    def over(self, mesh: Mesh) -> Sums:
        """The sums over all workers, from each worker's own."""
        rows = _own_row(mesh, self._row())
        numbers = torch.cat([self.score, self.squared[None], self.overflow[None], self.votes, self.reached, rows.flatten()])
        total = mesh.sum_(numbers)
        reached, places = torch.split(total[6:], [len(self.reached), rows.numel()])
        said, marks = _columns(places.view_as(rows))
        return Sums(total[:2], total[2], total[3], total[4:6], said, marks, reached)

    def over_shards(self, mesh: Mesh, scores: Mapping[int, Tensor]) -> Sums:
        """Like `over`, with this worker's loss and count given by shard in `scores`."""
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
    """One row per worker: this worker's in its place, zeros in the others."""
    if mesh.world.size == 1:
        return row[None]
    rows = row.new_zeros((mesh.world.size, len(row)))
    rows[mesh.world.rank] = row
    return rows


def _columns(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each worker's code for non-finite numbers, and its checksums."""
    return rows[:, 0], rows[:, 1:]
