"""A `Mesh` is replicas × stages: this worker's position, and the process groups over which it communicates.

Ranks number the stages of a replica consecutively, so neighbouring stages are neighbouring ranks, usually on one host. With a single worker
there are no groups and nothing is sent; one device runs the same code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.data.loader import Share
from carrywave.errors import PlanError
from carrywave.parallel import pair_links, process_groups
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.transport import GroupLinks, Links, PeerLink
from carrywave.parallel.world import World, all_gather_text
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Channel, lines


class Mesh:
    """This worker's place in a plan, its links to other stages, and sums over workers."""

    def __init__(self, world: World, plan: Plan) -> None:
        if world.size != plan.workers:
            raise PlanError(
                f"plan.replicas={plan.replicas} x plan.stages={plan.stages} needs {plan.workers} worker{'s' * (plan.workers > 1)}, "
                f"got {world.size}; start {plan.workers}, or set plan.replicas and plan.stages so that their product is {world.size}"
            )
        self.world, self.plan, self.device = world, plan, world.device
        self.replica, self.stage = divmod(world.rank, plan.stages)
        self.links: Links | None = None
        self._replicas: dist.ProcessGroup | None = None
        if world.size > 1:
            self._connect()

    @staticmethod
    def alone(device: torch.device, plan: Plan | None = None) -> Mesh:
        """A mesh of one worker."""
        return Mesh(World.alone(device), plan or Plan.serial())

    def span(self, units: int) -> tuple[int, int]:
        """The half-open range of units of this worker's stage."""
        edges = self.plan.edges(units)
        return edges[self.stage], edges[self.stage + 1]

    def share(self, *, inputs: bool = True, targets: bool = True) -> Share:
        """This worker's share of every batch."""
        return Share(self.replica, self.plan.replicas, inputs, targets)

    def replicas_of(self, stages: Sequence[int]) -> dist.ProcessGroup | None:
        """The process group of these stages in all replicas; None if it would be this worker alone.

        Collective for several stages: every rank must request the same groups in the same order.
        """
        if len(stages) == 1:
            return self._replicas
        ranks = [replica * self.plan.stages + stage for replica in range(self.plan.replicas) for stage in stages]
        return process_groups.group(ranks, "replicas")

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce in place over all workers; gives the same bits on each."""
        if self.world.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def hang_up(self) -> None:
        """Close the connections between stages because this worker's step failed midway; otherwise others would wait for its messages."""
        if self.links is not None:
            self.links.close()

    @lost_contact.kept
    def _connect(self) -> None:
        plan, world = self.plan, self.world
        process_groups.agree(lambda text: all_gather_text(world, text))
        if plan.replicas > 1:
            for stage in range(plan.stages):
                group = process_groups.group(range(stage, world.size, plan.stages), "replicas")
                self._replicas = group if stage == self.stage else self._replicas
        if plan.stages == 1:
            return
        if pair_links.takes_order(world.backend):
            self.links = pair_links.connect(world, plan)
            return
        known = lines(plan.stages, share_head=plan.shares_head)
        channels: dict[Channel, PeerLink] = {}
        staged = world.backend == "gloo" and self.device.type == "cuda"
        where = torch.device("cpu") if staged else self.device
        # Every worker creates every group, in the same order; the two ends of a channel then connect, along the chain of stages.
        for replica in range(plan.replicas):
            for line in known:
                sender, receiver = (replica * plan.stages + stage for stage in line[1:])
                group = process_groups.group([min(sender, receiver), max(sender, receiver)], f"{line.phase} {sender}>{receiver}")
                if world.rank in (sender, receiver):
                    sends = world.rank == sender
                    channels[line] = PeerLink(group, receiver if sends else sender)
                    channels[line].greet(sends=sends, device=where)
        self.links = GroupLinks(channels, self.device, staged=staged)
