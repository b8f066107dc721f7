"""Runs forward and backward of an optimizer step one shard of the lanes at a time, each from zero gradients and through all batches."""

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

# Batches, their random keys and the lanes' state -> the outcome of each batch, and the state after the last.
Backward = Callable[[Sequence[Batch], Sequence[Tensor], Lanes], tuple[list[BatchOutcome], Lanes]]


class Shards:
    """Runs a step's batches in canonical shards, and passes each shard's gradients to the tree.

    `backward` starts from zero gradients; `start(n)` returns the initial state of n lanes.
    """

    def __init__(self, mesh: Mesh, tree: Tree, bad: BadNumbers, backward: Backward, start: Callable[[int], Lanes], *, pooled: bool) -> None:
        self.mesh, self.tree, self.bad, self.backward, self.start, self.pooled = mesh, tree, bad, backward, start, pooled
        self.own = shards_of(mesh.replica, mesh.plan.replicas)

    def __call__(self, batches: Sequence[Batch], keys: Sequence[Tensor], state: Lanes) -> tuple[dict[int, list[BatchOutcome]], Lanes]:
        """The outcomes of the batches by shard, and the state of this worker's lanes after them. Gradients are not all-reduced yet."""
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
            # A shard that is empty in the first batch but not in a later one means that the number of lanes changed, and then all lanes are
            # fresh.
            before = None if state is None else self.start(own[0].lanes.shape[0]) if parts[0] is None else cuts[0].state(shard, state)
            outcomes[shard], left = self.backward(own, own_keys, before)
            self.tree.give()
            entered += self.bad.entered
            if left is not None and parts[-1] is not None:
                # A graph replay for the next shard may overwrite these tensors.
                lefts.append([tensor.clone() for tensor in left])
        self.bad.entered = entered
        if state is None:
            return outcomes, None
        return outcomes, [torch.cat(tensors, dim=1) for tensors in zip(*lefts, strict=True)]
