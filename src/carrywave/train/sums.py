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
from carrywave.plan.shards import SHARDS, tree


@dataclass(frozen=True)
class Sums:
    """Of one optimizer step; float64, on the device."""

    score: Tensor  # [2]: loss and count
    squared: Tensor  # square of the norm of the summed gradient
    overflow: Tensor  # more than zero where any worker has one
    votes: Tensor  # [2]
    said: Tensor  # by each worker; before the sum, by this one

    def over(self, mesh: Mesh) -> Sums:
        """The sums over all workers, from each one's own."""
        zero = torch.zeros_like(self.said)
        numbers = torch.stack(
            [
                *self.score.unbind(),
                self.squared,
                self.overflow,
                *self.votes.unbind(),
                *(self.said if place == mesh.world.rank else zero for place in range(mesh.world.size)),
            ]
        )
        total = mesh.sum_(numbers)
        return Sums(total[:2], total[2], total[3], total[4:6], total[6:])

    def over_shards(self, mesh: Mesh, scores: Mapping[int, Tensor]) -> Sums:
        """The same where this worker's part is in `scores`, by shard."""
        stages, device = mesh.plan.stages, self.squared.device
        score_SK2 = torch.zeros(stages, SHARDS, 2, dtype=torch.float64, device=device)
        for shard, score in scores.items():
            score_SK2[mesh.stage, shard] = score
        squared_S = torch.zeros(stages, dtype=torch.float64, device=device)
        squared_S[mesh.stage] = self.squared
        said = torch.zeros(mesh.world.size, dtype=torch.float64, device=device)
        said[mesh.world.rank] = self.said
        numbers = torch.cat([self.overflow[None], self.votes, said, squared_S, score_SK2.flatten()])
        overflow, votes, said, squared_S, flat = torch.split(mesh.sum_(numbers), [1, 2, len(said), stages, score_SK2.numel()])
        by_shard = flat.view_as(score_SK2).sum(0).unbind()
        return Sums(tree(by_shard, torch.add), squared_S.sum(), overflow[0], votes, said)
