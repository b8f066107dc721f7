"""Gradients summed over shards of the lanes in the order of one fixed binary tree, so that bits do not depend on the number of replicas.

A worker gives the gradients of its shards one after the other. A sum is taken up by its neighbour as soon as both are there, as in a
binary counter: at most three buffers are in use beside the gradients themselves. Then replicas swap their sums in pairs, at a distance of
one, two and four. A sum of two has the same bits whoever computes it, and in whatever parts: so the all-reduce of any backend will do.

Zeros have one sign in the buffers: a shard without lanes, or a parameter that was not used, changes no bit whether it is added as zeros
or left out. The layout follows from the parameters alone, also with one replica: how a norm is summed depends on where a tensor begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from carrywave.parallel import process_groups
from carrywave.parallel.mesh import Mesh
from carrywave.plan.canonical_shards import partners
from carrywave.step.gradients import by_dtype

ALIGNED = 64  # elements; parameters begin at multiples of it


@dataclass(frozen=True)
class Branch:
    """Parameters whose gradients are summed over the same workers."""

    parameters: Sequence[nn.Parameter]
    pairs: Sequence[dist.ProcessGroup]  # of replicas, the nearest first
    stages: dist.ProcessGroup | None = None  # of those that hold these parameters, within a replica


def pairs_of(mesh: Mesh) -> list[dist.ProcessGroup]:
    """The groups in which this worker meets other replicas of its stage. Every worker makes every group, in one order."""
    plan, own = mesh.plan, {}
    for level in range(len(partners(0, plan.replicas))):
        for stage in range(plan.stages):
            for replica in range(plan.replicas):
                partner = partners(replica, plan.replicas)[level]
                if replica < partner:
                    ranks = [at * plan.stages + stage for at in (replica, partner)]
                    group = process_groups.group(ranks, "pairs")
                    if mesh.world.rank in ranks:
                        own[level] = group
    return list(own.values())


def group_of(mesh: Mesh, stages: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of some stages of this worker's replica, None where it is not among them. Every worker must ask, in one order."""
    own: dist.ProcessGroup | None = None
    for replica in range(mesh.plan.replicas):
        ranks = [replica * mesh.plan.stages + stage for stage in stages]
        group = process_groups.group(ranks, "stages")
        own = group if mesh.world.rank in ranks else own
    return own


class _Sum:
    """A sum of gradients: those of one branch and dtype side by side."""

    def __init__(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        self.flats: list[Tensor] = []
        self.views: list[Tensor] = []
        for parameters in parts:
            sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in parameters]
            flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
            self.flats.append(flat)
            self.views += [piece[: p.numel()].view_as(p) for p, piece in zip(parameters, torch.split(flat, sizes), strict=True)]

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Be these gradients; one that is not there is zero."""
        there = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if len(there) < len(self.views):
            torch._foreach_zero_(self.flats)
        if there:
            views, given = zip(*there, strict=True)
            torch._foreach_copy_(views, given)
        torch._foreach_add_(self.flats, 0.0)  # -0.0 becomes 0.0

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients."""
        there = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if there:
            views, given = zip(*there, strict=True)
            torch._foreach_add_(views, given)


class Tree:
    """Takes the place of a `Reducer` where bits are not to depend on the number of replicas.

    `watched` are parameters, small ones, whose gradients stay to be seen as they were before the sum over workers: in `local`.
    """

    def __init__(self, branches: Sequence[Branch], *, watched: Sequence[nn.Parameter] = ()) -> None:
        self.branches = [branch for branch in branches if branch.parameters]
        self._parts = [(branch, part) for branch in self.branches for part in by_dtype(branch.parameters)]
        self.parameters: list[nn.Parameter] = [p for _, part in self._parts for p in part]  # type: ignore[misc]
        summed = {id(p) for branch in self.branches for p in branch.parameters if branch.pairs or branch.stages is not None}
        self._summed = summed
        self.local: dict[int, Tensor | None] = {id(p): None for p in watched if id(p) in summed}
        self.unreached: set[int] = set()  # ids of parameters that no shard of this worker has come to; others may have
        self._free: list[_Sum] = []
        self._stack: list[_Sum | None] = []  # None: of shards without lanes
        self._given = 0
        self._root: _Sum | None = None

    def reduces(self, parameter: Tensor) -> bool:
        """Whether this gradient is summed over workers."""
        return id(parameter) in self._summed

    def begin(self) -> None:
        """Before the first shard of an optimizer step."""
        self._free += [each for each in (*self._stack, self._root) if each is not None]
        self._stack, self._given, self._root = [], 0, None
        self.unreached = {id(p) for p in self.parameters}

    @torch.no_grad()
    def give(self, *, empty: bool = False) -> None:
        """The parameters hold the gradients of the next shard; or it is empty."""
        grads = [p.grad for p in self.parameters]
        if not empty:
            self.unreached -= {id(p) for p, grad in zip(self.parameters, grads, strict=True) if grad is not None}
        odd = self._given % 2 == 1
        before = self._stack[-1] if odd else None
        new: _Sum | None = None
        if before is not None and not empty:
            before.add(grads)
        elif not empty:
            new = self._buffer()
            new.take(grads)
        self._stack.append(new)
        number, self._given = self._given, self._given + 1
        while number % 2:
            right, left = self._stack.pop(), self._stack.pop()
            if left is not None and right is not None:
                torch._foreach_add_(left.flats, right.flats)
                self._free.append(right)
            self._stack.append(right if left is None else left)
            number //= 2

    @torch.no_grad()
    def finish(self) -> None:
        """After the last shard: sum over the workers, and leave the sums as the gradients of the parameters."""
        [root] = self._stack
        self._stack = []
        if root is None:
            root = self._buffer()
            torch._foreach_zero_(root.flats)
        self._root = root
        for parameter, view in zip(self.parameters, root.views, strict=True):
            if id(parameter) in self.local:
                self.local[id(parameter)] = view.clone()
            parameter.grad = view
        for (branch, _), flat in zip(self._parts, root.flats, strict=True):
            for pair in branch.pairs:
                dist.all_reduce(flat, group=pair)
            if branch.stages is not None:
                _sum_in_order(flat, branch.stages)

    def _buffer(self) -> _Sum:
        return self._free.pop() if self._free else _Sum([part for _, part in self._parts])  # type: ignore[misc]


def _sum_in_order(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum over a group in the order of its ranks, whatever the backend: each has a row of its own, and zeros in the others'."""
    size = dist.get_world_size(group)
    if size == 2:
        dist.all_reduce(flat, group=group)
        return
    rows = flat.new_zeros((size, flat.numel()))
    rows[dist.get_rank(group)] = flat
    dist.all_reduce(rows, group=group)
    flat.copy_(rows[0])
    for row in rows[1:]:
        flat.add_(row)
