"""Sums gradients over shards of the lanes in the order of a fixed binary tree, so that their bits do not depend on the number of replicas.

A worker adds the gradients of its shards one after another. Two neighbouring sums are merged as soon as both exist, as in a binary counter,
so at most three buffers are in use besides the gradients themselves. Then pairs of replicas at distance one, two and four all-reduce their
sums. A sum of two terms has the same bits whoever computes it and however it is partitioned, so any backend's all-reduce will do.

The buffers never hold -0.0, so a shard without lanes, or an unused parameter, changes no bit whether it is added as zeros or left out. The
layout depends on the parameters alone, even with one replica, because the summation order of a norm depends on where a tensor begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from carrywave.parallel import process_groups
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.sums.group_sums import GroupSum
from carrywave.plan.canonical_shards import partners
from carrywave.step.gradients import Flags, FlatBuffers, Gradients, Result
from carrywave.step.norms import by_dtype, norm_of_each

ALIGNED = 64  # elements; parameters start at multiples of it


@dataclass(frozen=True)
class Branch:
    """Parameters whose gradients are summed over the same workers."""

    parameters: Sequence[nn.Parameter]
    pairs: Sequence[GroupSum]  # pairs of replicas, nearest first
    stages: GroupSum | None = None  # the stages within a replica that hold these parameters


def pairs_of(mesh: Mesh) -> list[GroupSum]:
    """The groups in which this worker meets other replicas of its stage. Collective: every rank creates every group, in the same order."""
    plan, pairs = mesh.plan, {}
    for level in range(len(partners(0, plan.replicas))):
        for stage in range(plan.stages):
            for replica in range(plan.replicas):
                partner = partners(replica, plan.replicas)[level]
                if replica < partner:
                    ranks = sorted(mesh.rank_at(at, stage) for at in (replica, partner))
                    group = process_groups.group(ranks, "pairs")
                    if mesh.world.rank in ranks:
                        pairs[level] = _used(group)
    return list(pairs.values())


def group_of(mesh: Mesh, stages: Sequence[int]) -> GroupSum | None:
    """The group of these stages in this worker's replica; None if it is not among them. Collective: all ranks call it in the same order."""
    local_group: GroupSum | None = None
    for replica in range(mesh.plan.replicas):
        ranks = [mesh.rank_at(replica, stage) for stage in stages]
        group = process_groups.group(ranks, "stages")
        local_group = _used(group) if mesh.world.rank in ranks else local_group
    return local_group


def _used(group: dist.ProcessGroup) -> GroupSum:
    summing = GroupSum(group)
    process_groups.use(group, summing.close)
    return summing


class _Sum(FlatBuffers):
    """A sum of gradients; those of the same branch and dtype are contiguous."""

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Overwrite the sum with these gradients; a missing one counts as zero."""
        present = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if len(present) < len(self.views):
            torch._foreach_zero_(self.flats)
        if present:
            views, given = zip(*present, strict=True)
            torch._foreach_copy_(views, given)
            torch._foreach_add_(self.flats, 0.0)  # -0.0 becomes 0.0

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients to the sum."""
        present = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if present:
            views, given = zip(*present, strict=True)
            torch._foreach_add_(views, given)


class FixedTree(Gradients):
    """Sums the gradients of shards where the bits must not depend on the number of replicas. Shards come in turn.

    `watched` are small parameters, the norms of whose gradients before the sum over workers go to `local`.
    """

    sums = True
    on_device = False

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        held: Sequence[nn.Parameter],
        branches: Sequence[Branch],
        *,
        watched: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__(trained, held)
        self._parts = [(branch, part) for branch in branches for part in by_dtype(branch.parameters)]
        self.parameters = [p for _, part in self._parts for p in part]
        self._reduced = {id(p) for branch in branches for p in branch.parameters if branch.pairs or branch.stages is not None}
        self._watched = [p for p in watched if id(p) in self._reduced]
        self._free: list[_Sum] = []
        self._stack: list[_Sum | None] = []  # None: sum of empty shards
        self._closed = 0
        self._root: _Sum | None = None

    def reduces(self, parameter: Tensor) -> bool:
        return id(parameter) in self._reduced

    def begin_step(self) -> None:
        self._free += [each for each in (*self._stack, self._root) if each is not None]
        self._stack, self._closed, self._root = [], 0, None
        self.unreached = {id(p) for p in self.parameters}

    def end_shard(self, reached: Sequence[Flags]) -> None:
        super().end_shard(reached)
        given_ids = {id(p) for p, given in zip(self.trained, self.given, strict=True) if given}
        self._add([p.grad if id(p) in given_ids else None for p in self.parameters])

    def skip(self) -> None:
        """Count a shard without lanes."""
        self._add(None)

    @torch.no_grad()
    def _add(self, grads: Sequence[Tensor | None] | None) -> None:
        if grads is not None:
            self.unreached -= {id(p) for p, grad in zip(self.parameters, grads, strict=True) if grad is not None}
        odd = self._closed % 2 == 1
        before = self._stack[-1] if odd else None
        new: _Sum | None = None
        if before is not None and grads is not None:
            before.add(grads)
        elif grads is not None:
            new = self._buffer()
            new.take(grads)
        self._stack.append(new)
        number, self._closed = self._closed, self._closed + 1
        while number % 2:
            right, left = self._stack.pop(), self._stack.pop()
            if left is not None and right is not None:
                if left.flats:
                    torch._foreach_add_(left.flats, right.flats)
                self._free.append(right)
            self._stack.append(right if left is None else left)
            number //= 2

    @torch.no_grad()
    def sum_over_workers(self, meanwhile: Callable[[], Result]) -> Result:
        result = meanwhile()
        [root] = self._stack
        self._stack = []
        if root is None:
            root = self._buffer()
            if root.flats:
                torch._foreach_zero_(root.flats)
        self._root = root
        for parameter, view in zip(self.parameters, root.views, strict=True):
            # Another view of the same place: `model.half()` and back would move this one away from its buffer.
            parameter.grad = None if id(parameter) in self.unreached and not self.reduces(parameter) else view.detach()
        views = root.by_id
        local_norms = norm_of_each([views[id(p)] for p in self._watched])
        self.local = dict(zip(map(id, self._watched), local_norms.unbind(), strict=True))
        for (branch, _), flat in zip(self._parts, root.flats, strict=True):
            for pair in branch.pairs:
                dist.all_reduce(flat, group=pair.group)
            if branch.stages is not None:
                _sum_in_order(flat, branch.stages.group)
        return result

    def _buffer(self) -> _Sum:
        return self._free.pop() if self._free else _Sum([part for _, part in self._parts], aligned=ALIGNED)


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
