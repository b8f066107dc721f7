"""Canonical shards: the lanes of every batch in eight parts, whatever the number of replicas, and the one order in which parts are summed.

Sums of floats depend on their order. So that replicas 1, 2, 4 and 8 give the same bits, what is summed over lanes is summed within each
shard first, and over the shards in one binary tree. A replica holds neighbouring shards, a subtree; whoever adds its root to
another's does what one replica alone would have done. Torch-free.

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from carrywave.errors import PlanError
from carrywave.plan.plan import Plan

SHARDS = 8
REPLICAS = (1, 2, 4, 8)  # that shards can be dealt out to

Part = TypeVar("Part")


def check(plan: Plan) -> None:
    """Refuse a plan on which a reproducible run cannot be the same as on one replica."""
    if plan.replicas not in REPLICAS:
        raise PlanError(
            f"train.reproducible=true deals out {SHARDS} shards of the lanes, and {plan.replicas} replicas cannot share them evenly; "
            "use 1, 2, 4 or 8 replicas"
        )
    if plan.slices > 1:
        raise PlanError(
            f"train.reproducible=true cuts the lanes into {SHARDS} shards, and plan.slices={plan.slices} would cut them again; "
            "leave plan.slices out"
        )


def bounds(lanes: int, shard: int) -> tuple[int, int]:
    """The first of so many lanes that a shard holds, and the one after its last: with few lanes some shards are empty.

    The shards of a replica are together the lanes that it holds without shards.
    """
    return lanes * shard // SHARDS, lanes * (shard + 1) // SHARDS


def shards_of(replica: int, replicas: int) -> range:
    """The shards of one of 1, 2, 4 or 8 replicas."""
    each = SHARDS // replicas
    return range(replica * each, (replica + 1) * each)


def partners(replica: int, replicas: int) -> list[int]:
    """With whom a replica adds up its sums, one after the other; after that, all of them have the root of the tree."""
    return [replica ^ 1 << level for level in range(replicas.bit_length() - 1)]


def tree(parts: Sequence[Part], add: Callable[[Part, Part], Part]) -> Part:
    """The sum of 1, 2, 4 or 8 neighbours, in the order above."""
    level = list(parts)
    while len(level) > 1:
        level = [add(left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]
