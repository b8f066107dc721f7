"""Splits the lanes of every batch into eight shards, whatever the number of replicas, and fixes the order in which shards are summed.

Floating-point sums depend on their order. To give bit-identical results on 1, 2, 4 and 8 replicas, everything summed over lanes is
summed within each shard first, then over the shards in one fixed binary tree. A replica holds neighbouring shards, which form a
subtree; adding the roots of two subtrees is exactly what a single replica would have done. Torch-free.

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from carrywave.errors import PlanError
from carrywave.plan.plan import Plan

SHARDS = 8
REPLICAS = (1, 2, 4, 8)  # numbers of replicas among which the shards divide evenly, as whole subtrees

Part = TypeVar("Part")


def check(plan: Plan) -> None:
    """Reject a plan that cannot reproduce the result of one replica bit for bit."""
    if plan.replicas not in REPLICAS:
        raise PlanError(
            f"train.reproducible=true divides the lanes into {SHARDS} shards, which {plan.replicas} replicas cannot share evenly; "
            "use 1, 2, 4 or 8 replicas"
        )
    if plan.micro_batches > 1:
        raise PlanError(
            f"train.reproducible=true divides the lanes into {SHARDS} shards, which plan.micro_batches={plan.micro_batches} would divide "
            "again; remove plan.micro_batches"
        )
    if plan.splits_vocabulary:
        raise PlanError(
            "train.reproducible=true needs sums in one order on any number of replicas, but plan.split_vocabulary=true sums over them in "
            "its own; remove one of them"
        )


def bounds(lanes: int, shard: int) -> tuple[int, int]:
    """The half-open range of the lanes in a shard. Some shards are empty if there are fewer lanes than shards.

    Together, the shards of a replica are exactly the lanes it would hold without sharding.
    """
    return lanes * shard // SHARDS, lanes * (shard + 1) // SHARDS


def shards_of(replica: int, replicas: int) -> range:
    """The shards that a replica holds; `replicas` is 1, 2, 4 or 8."""
    each = SHARDS // replicas
    return range(replica * each, (replica + 1) * each)


def partners(replica: int, replicas: int) -> list[int]:
    """The replicas with which a replica exchanges and adds sums, in order; afterwards every replica has the root of the tree."""
    return [replica ^ 1 << level for level in range(replicas.bit_length() - 1)]


def tree(parts: Sequence[Part], add: Callable[[Part, Part], Part]) -> Part:
    """The sum of 1, 2, 4 or 8 neighbouring parts, in the tree order above."""
    level = list(parts)
    while len(level) > 1:
        level = [add(left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]
