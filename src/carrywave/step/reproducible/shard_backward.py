"""Forward and backward of an optimizer step, shard by shard of the lanes: each from no gradients on, and by itself through all batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.parallel.mesh import Mesh
from carrywave.plan.canonical_shards import shards_of
from carrywave.step.compute import BatchOutcome
from carrywave.step.graphs.capture import Lanes
from carrywave.step.nonfinite import BadNumbers
from carrywave.step.reproducible.fixed_tree import Tree
from carrywave.step.reproducible.shards import Cut

# Batches, the keys of their randomness and the state of their lanes -> what came of each, and the state after the last.
Backward = Callable[[Sequence[Batch], Sequence[Tensor], Lanes], tuple[list[BatchOutcome], Lanes]]


class Shards:
    """Runs a step's batches in canonical shards, and gives the gradients of each to the tree.

    `backward` begins without gradients; `start` is the state of so many lanes that begin anew.
    """

    def __init__(self, mesh: Mesh, tree: Tree, bad: BadNumbers, backward: Backward, start: Callable[[int], Lanes], *, pooled: bool) -> None:
        self.mesh, self.tree, self.bad, self.backward, self.start, self.pooled = mesh, tree, bad, backward, start, pooled
        self.own = shards_of(mesh.replica, mesh.plan.replicas)

    def __call__(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[dict[int, list[BatchOutcome]], Lanes]:
        """What came of each batch, by shard; and the state of this worker's lanes after the last. The sum over workers is still to come."""
        cuts = [Cut(self.mesh, batch, pooled=self.pooled) for batch in batches]
        outcomes: dict[int, list[BatchOutcome]] = {}
        entered: list[Tensor] = []
        lefts: list[list[Tensor]] = []
        self.tree.begin()
        for shard in self.own:
            parts = [cut.part(shard) for cut in cuts]
            there = [(part, key) for part, key in zip(parts, keys, strict=True) if part is not None]
            if not there:
                self.tree.give(empty=True)
                continue
            own, own_keys = zip(*there, strict=True)
            # Where the lanes of a step change in number, all of them begin anew.
            before = None if state is None else self.start(own[0].lanes.shape[0]) if parts[0] is None else cuts[0].state(shard, state)
            outcomes[shard], left = self.backward(own, own_keys, before)
            self.tree.give()
            entered += self.bad.entered
            if left is not None and parts[-1] is not None:
                # The next shard may be computed in the same place.
                lefts.append([tensor.clone() for tensor in left])
        self.bad.entered = entered
        if state is None:
            return outcomes, None
        return outcomes, [torch.cat(tensors, dim=1) for tensors in zip(*lefts, strict=True)]
