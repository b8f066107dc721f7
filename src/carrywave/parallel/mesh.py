"""A `Mesh` is replicas × stages: this worker's position, and the process groups over which it communicates.

Which rank takes which position is up to `plan.placement`: the stages of a replica are on one host where they can be, and usually their
ranks are consecutive. Ask `rank_at`; do not compute a rank from replica and stage. With a single worker there are no groups and nothing is
sent; one device runs the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from carrywave.data.loader import Share
from carrywave.errors import PlanError
from carrywave.parallel import process_groups
from carrywave.parallel.links import group_links
from carrywave.parallel.links.device_links import DeviceLinks
from carrywave.parallel.links.links import Links
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.memory import peer_access
from carrywave.parallel.memory.peer_access import Neighbour
from carrywave.parallel.memory.symmetric import symmetric_memory
from carrywave.parallel.startup.environment import SHARE_GPU, TRANSPORT
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.sums.device_sums import DeviceSum
from carrywave.parallel.sums.group_sums import GroupSum, Summing, Working
from carrywave.parallel.sums.host_sums import HostSum
from carrywave.parallel.world import World
from carrywave.plan.placement import Seat, arrange, seats
from carrywave.plan.plan import Plan
from carrywave.plan.schedule.messages import Pair, channels_of, pairs_of

ALL = "all"  # the use of the world's own group
Transport = Literal["", "device memory", "NCCL", "gloo"]
BY_BACKEND: Mapping[str, Transport] = {"nccl": "NCCL", "gloo": "gloo"}  # of torch.distributed


class Mesh:
    """This worker's place in a plan, its links to other stages, and sums over workers."""

    def __init__(self, world: World, plan: Plan) -> None:
        if world.size != plan.workers:
            raise PlanError(
                f"plan.replicas={plan.replicas} x plan.stages={plan.stages} needs {plan.workers} worker{'s' * (plan.workers > 1)}, "
                f"got {world.size}; start {plan.workers}, or set plan.replicas and plan.stages so that their product is {world.size}"
            )
        self.world, self.plan, self.device = world, plan, world.device
        self.ranks = arrange(world.hosts or ("",) * world.size, plan.stages)  # by position: replica by replica, stage by stage
        self.replica, self.stage = divmod(self.ranks.index(world.rank), plan.stages)
        self.links: Links | None = None
        self._replicas: Summing | None = None
        self._all: Summing | None = None
        self._neighbours: list[Neighbour] = []
        if world.size > 1:
            self._connect()

    @staticmethod
    def alone(device: torch.device, plan: Plan | None = None) -> Mesh:
        """A mesh of one worker."""
        return Mesh(World.alone(device), plan or Plan.serial())

    def rank_at(self, replica: int, stage: int) -> int:
        """The rank of the worker with this stage of this replica."""
        return self.ranks[replica * self.plan.stages + stage]

    def seats(self) -> list[Seat]:
        """Where every worker sits, by rank."""
        world = self.world
        return seats(world.hosts or ("this host",) * world.size, world.local_ranks or range(world.size), self.plan)

    def unit_range(self, units: int) -> tuple[int, int]:
        """The half-open range of units of this worker's stage."""
        edges = self.plan.edges(units)
        return edges[self.stage], edges[self.stage + 1]

    def share(self, *, inputs: bool = True, targets: bool = True) -> Share:
        """This worker's share of every batch."""
        return Share(self.replica, self.plan.replicas, inputs, targets)

    @property
    def on_device(self) -> bool:
        """True if everything that workers exchange within a step is work of the device, so that a whole step can be captured."""
        return self._all is None or self._all.on_device

    @property
    def in_device_memory(self) -> bool:
        """True if sums over all workers are in device memory."""
        return isinstance(self._all, DeviceSum)

    @property
    def messages_on_device(self) -> bool:
        """True if there are messages between stages, and they are work of the device, so that a pass can be captured."""
        return self.links is not None and self.links.on_device

    @property
    def messages(self) -> Transport:
        """What carries messages between stages; "": there is one."""
        return "" if self.plan.stages == 1 else self._carrier(in_device_memory=isinstance(self.links, DeviceLinks))

    @property
    def sums(self) -> Transport:
        """What carries sums over all workers; "": there is one."""
        return "" if self.world.size == 1 else self._carrier(in_device_memory=self.in_device_memory)

    def _carrier(self, *, in_device_memory: bool) -> Transport:
        return "device memory" if in_device_memory else BY_BACKEND[self.world.backend]

    def replicas_of(self, stages: Sequence[int]) -> Summing | None:
        """What sums over these stages in all replicas; None if it would be this worker alone.

        Collective for several stages: every rank must request the same groups in the same order.
        """
        if len(stages) == 1:
            return self._replicas
        ranks = sorted(self.rank_at(replica, stage) for replica in range(self.plan.replicas) for stage in stages)
        return self._summing(ranks, "replicas")

    def within_passes(self) -> Summing | None:
        """Sums over the replicas of this stage that go on beside those of gradients; None if it would be this worker alone. Collective."""
        if self.plan.replicas == 1:
            return None
        return [self._summing(sorted(self.ranks[stage :: self.plan.stages]), "passes") for stage in range(self.plan.stages)][self.stage]

    @lost_contact.kept
    def take_from_first_replica(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace tensors by those that the first replica has of this stage, through host memory. Collective: every rank must call it."""
        groups = [process_groups.group(sorted(self.ranks[stage :: self.plan.stages]), "weights") for stage in range(self.plan.stages)]
        for _, tensor in sorted(tensors.items()):
            whole = tensor.detach().cpu().contiguous()
            dist.broadcast(whole, self.rank_at(0, self.stage), group=groups[self.stage])
            tensor.detach().copy_(whole)

    @lost_contact.kept
    def join_lanes(self, parts: Mapping[str, tuple[Tensor, int]], lanes: int) -> dict[str, Tensor]:
        """Put together tensors of which each replica has its share of the lanes, along the axis given with each, through host memory.

        Collective: every rank must call it; the workers of a stage with the same tensors.
        """
        groups = [process_groups.group(sorted(self.ranks[stage :: self.plan.stages]), "weights") for stage in range(self.plan.stages)]
        low, high = self.share().bounds(lanes)
        joined: dict[str, Tensor] = {}
        for name, (part, axis) in sorted(parts.items()):
            whole = torch.zeros(*part.shape[:axis], lanes, *part.shape[axis + 1 :], dtype=part.dtype)
            if low < high:  # otherwise the part is an idle lane
                whole.narrow(axis, low, high - low).copy_(part)
            if whole.numel():
                dist.all_reduce(whole, group=groups[self.stage])
            joined[name] = whole.to(part.device)
        return joined

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce in place over all workers; gives the same bits on each."""
        work = self.sum_later(tensor)
        if work is not None:
            work.wait()
        return tensor

    def sum_later(self, tensor: Tensor) -> Working | None:
        """Begin to all-reduce in place over all workers; the sum is there after the returned work, if any, has been waited for."""
        return None if self._all is None else self._all.all_reduce(tensor)

    @lost_contact.kept
    def _connect(self) -> None:
        plan, world = self.plan, self.world
        process_groups.check_unspoilt()
        self._neighbours = peer_access.neighbours(world)
        self._check_transport()
        if world.backend == "nccl":
            lost_contact.use_device()
        self._all = self._summing(range(world.size), ALL)
        if plan.replicas > 1:
            for stage in range(plan.stages):
                summing = self._summing(sorted(self.ranks[stage :: plan.stages]), "replicas")
                self._replicas = summing if stage == self.stage else self._replicas
        if plan.stages == 1:
            return
        pipelines = [self.ranks[first : first + plan.stages] for first in range(0, world.size, plan.stages)]
        in_device_memory = all(self._in_device_memory(ranks) for ranks in pipelines)
        self.links = self._device_links() if in_device_memory else group_links.connect(world, plan, self.ranks)

    def _check_transport(self) -> None:
        asked = peer_access.asked()
        everyone = range(self.world.size)
        if asked == "device" and not peer_access.in_reach(self._neighbours, everyone):
            raise on_every_rank(
                PlanError(f"{TRANSPORT}=device needs GPUs of one host that reach each other's memory; unset it, or set it to auto")
            )
        if asked == "nccl" and self.world.backend != "nccl":
            raise on_every_rank(
                PlanError(
                    f"{TRANSPORT}=nccl needs a GPU for every worker, or a share of one ({SHARE_GPU}=N divides each among N); unset it, or "
                    "set it to auto"
                )
            )

    def _in_device_memory(self, ranks: Sequence[int]) -> bool:
        return peer_access.asked() in ("auto", "device") and peer_access.in_reach(self._neighbours, ranks)

    def _in_host_memory(self, ranks: Sequence[int]) -> bool:
        """True if these workers compute on the CPUs of one host."""
        group = [self._neighbours[rank] for rank in ranks]
        return (
            self.world.backend == "gloo" and self.device.type == "cpu" and all(not one.gpu and one.host == group[0].host for one in group)
        )

    def _summing(self, ranks: Sequence[int], use: str) -> Summing:
        """What sums over these workers. Collective: every rank must call it."""
        group = cast(dist.ProcessGroup, dist.group.WORLD) if use == ALL else process_groups.group(ranks, use)
        # Everyone decides alike for all groups of a kind: a step is captured as a whole only if all of its sums can be.
        if not self._in_device_memory(range(self.world.size)):
            return HostSum(group) if self._in_host_memory(ranks) else GroupSum(group, on_device=self.world.records_nccl)
        lost_contact.use_device()
        return DeviceSum(len(ranks), lambda size: symmetric_memory(group, size, self.device))

    def _device_links(self) -> DeviceLinks:
        lost_contact.use_device()
        pairs = pairs_of(channels_of(self.plan.stages, share_head=self.plan.shares_head))
        groups: dict[Pair, dist.ProcessGroup] = {}
        for replica in range(self.plan.replicas):  # every worker creates every group, in the same order
            for low, high in pairs:
                group = process_groups.group([self.rank_at(replica, low), self.rank_at(replica, high)], "device")
                if replica == self.replica:
                    groups[low, high] = group
        return DeviceLinks(self.stage, lambda pair, size: symmetric_memory(groups[pair], size, self.device))
