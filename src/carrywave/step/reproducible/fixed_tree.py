"""Sums gradients over shards of the lanes in the order of a fixed binary tree, so that their bits do not depend on the number of replicas.

A worker adds the gradients of its shards one after another. Two neighbouring sums are merged as soon as both exist, as in a binary counter,
so at most three buffers are in use besides the gradients themselves. Then pairs of replicas at distance one, two and four all-reduce their
sums. A sum of two terms has the same bits whoever computes it and however it is partitioned, so any backend's all-reduce will do.

The buffers never hold -0.0, so a shard without lanes, or an unused parameter, changes no bit whether it is added as zeros or left out. The
layout depends on the parameters alone, even with one replica, because the summation order of a norm depends on where a tensor begins.
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

ALIGNED = 64  # elements; parameters start at multiples of it


@dataclass(frozen=True)
class Branch:
    """Parameters whose gradients are summed over the same workers."""

    parameters: Sequence[nn.Parameter]
    pairs: Sequence[dist.ProcessGroup]  # pairs of replicas, nearest first
    stages: dist.ProcessGroup | None = None  # the stages within a replica that hold these parameters


def pairs_of(mesh: Mesh) -> list[dist.ProcessGroup]:
    """The groups in which this worker meets other replicas of its stage. Collective: every rank creates every group, in the same order."""
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
    """The group of these stages in this worker's replica; None if it is not among them. Collective: all ranks call it in the same order."""
    own: dist.ProcessGroup | None = None
    for replica in range(mesh.plan.replicas):
        ranks = [replica * mesh.plan.stages + stage for stage in stages]
        group = process_groups.group(ranks, "stages")
        own = group if mesh.world.rank in ranks else own
    return own


class _Sum:
    """A sum of gradients, with those of the same branch and dtype in one contiguous buffer."""

    def __init__(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        self.flats: list[Tensor] = []
        self.views: list[Tensor] = []
        for parameters in parts:
            sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in parameters]
            flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
            self.flats.append(flat)
            self.views += [piece[: p.numel()].view_as(p) for p, piece in zip(parameters, torch.split(flat, sizes), strict=True)]

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Overwrite the sum with these gradients; a missing one counts as zero."""
        there = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if len(there) < len(self.views):
            torch._foreach_zero_(self.flats)
        if there:
            views, given = zip(*there, strict=True)
            torch._foreach_copy_(views, given)
        torch._foreach_add_(self.flats, 0.0)  # -0.0 becomes 0.0

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients to the sum."""
        there = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if there:
            views, given = zip(*there, strict=True)
            torch._foreach_add_(views, given)


class Tree:
    """Replaces a `Reducer` where the bits must not depend on the number of replicas.

    `watched` are small parameters whose gradients from before the sum over workers are kept in `local`, by the parameter's id.
    """

    def __init__(self, branches: Sequence[Branch], *, watched: Sequence[nn.Parameter] = ()) -> None:
        self.branches = [branch for branch in branches if branch.parameters]
        self._parts = [(branch, part) for branch in self.branches for part in by_dtype(branch.parameters)]
        self.parameters: list[nn.Parameter] = [p for _, part in self._parts for p in part]  # type: ignore[misc]
        summed = {id(p) for branch in self.branches for p in branch.parameters if branch.pairs or branch.stages is not None}
        self._summed = summed
        self.local: dict[int, Tensor | None] = {id(p): None for p in watched if id(p) in summed}
        self.unreached: set[int] = set()  # ids of parameters that backward reached in no shard of this worker; on other workers it may have
        self._free: list[_Sum] = []
        self._stack: list[_Sum | None] = []  # None: sum of empty shards
        self._given = 0
        self._root: _Sum | None = None

    def reduces(self, parameter: Tensor) -> bool:
        """True if this gradient is all-reduced."""
        return id(parameter) in self._summed

    def begin(self) -> None:
        """Start an optimizer step; call before its first shard."""
        self._free += [each for each in (*self._stack, self._root) if each is not None]
        self._stack, self._given, self._root = [], 0, None
        self.unreached = {id(p) for p in self.parameters}

    @torch.no_grad()
    def give(self, *, empty: bool = False) -> None:
        """Add the next shard, whose gradients are in the parameters' `.grad`, or which is `empty`."""
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
        """After the last shard, all-reduce over the workers and set the parameters' `.grad` to the sums."""
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
    """Sum over a group in rank order, whatever the backend: each rank fills its own row and leaves zeros in the others."""
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
