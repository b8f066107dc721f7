"""One replica as a mesh of its own, for training in which replicas do not exchange at every step: what a step sums and compares, it sums
and compares over the stages of this replica alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from carrywave.data.loader import Share
from carrywave.parallel import process_groups
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.sums.group_sums import Summing


class ReplicaMesh(Mesh):
    """The replica of `whole` that this worker belongs to. Collective: every rank of `whole` must create it."""

    def __init__(self, whole: Mesh) -> None:
        plan, world = whole.plan, whole.world
        self.whole, self.device, self.links = whole, whole.device, whole.links
        self.plan = replace(plan, replicas=1)
        self.replica, self.stage = 0, whole.stage
        self._replicas, self._all, self._neighbours = None, None, whole._neighbours
        ranks = self._ranks(whole.replica, range(plan.stages))  # in the whole world
        group_ranks = [sorted(ranks).index(rank) for rank in ranks]  # as torch counts them in a group
        self.ranks = tuple(group_ranks)
        hosts = tuple(world.hosts[rank] for rank in sorted(ranks)) if world.hosts else ()
        local_ranks = tuple(world.local_ranks[rank] for rank in sorted(ranks)) if world.local_ranks else ()
        backend = world.backend if plan.stages > 1 else ""
        self.world = replace(world, rank=group_ranks[whole.stage], size=plan.stages, backend=backend, hosts=hosts, local_ranks=local_ranks)
        if plan.stages > 1:
            self._all = self._within_replica(range(plan.stages))
            self.world = replace(self.world, group=self._groups()[whole.replica])

    def share(self, *, inputs: bool = True, targets: bool = True) -> Share:
        return self.whole.share(inputs=inputs, targets=targets)

    def replicas_of(self, stages: Sequence[int]) -> Summing | None:
        return None if len(stages) == 1 else self._within_replica(stages)

    def _within_replica(self, stages: Sequence[int]) -> Summing:
        """What sums over these stages of this replica. Every worker creates the groups of every replica, in the same order."""
        made = [self.whole._summing(sorted(self._ranks(replica, stages)), "replica") for replica in range(self.whole.plan.replicas)]
        return made[self.whole.replica]

    def _ranks(self, replica: int, stages: Sequence[int]) -> list[int]:
        return [self.whole.rank_at(replica, stage) for stage in stages]

    def _groups(self) -> list[dist.ProcessGroup]:
        """The group of each replica, the others' too: every rank must ask for every group, in the same order."""
        stages = range(self.plan.stages)
        return [process_groups.group(sorted(self._ranks(replica, stages)), "replica") for replica in range(self.whole.plan.replicas)]
