"""How far replicas are from each other in asynchronous training, as the holder of a share of the weights sees it.

A replica that has pushed its gradient gets the weights for its next step at once, unless it is more than `most_ahead` steps ahead of the
slowest; then it waits for that one (stale synchronous parallel, Ho et al. 2013). The slowest never waits, so nobody waits forever.

The staleness of a gradient is the number of other replicas' updates since the weights that it was computed from. With R replicas it is at
most (R - 1)(2 most_ahead + 1): while a replica takes one step, another may come from as far behind as allowed to as far ahead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Staleness:
    """How stale gradients were."""

    pushes: int = 0
    total: int = 0  # updates missed, over all pushes
    most: int = 0  # by one gradient
    ahead: int = 0  # most steps that a replica was ahead of the slowest when it went on

    @property
    def mean(self) -> float:
        """Updates missed by a gradient."""
        return self.total / self.pushes if self.pushes else 0.0


class Clocks:
    """The steps that each replica has taken, and which version of the share it has read."""

    def __init__(self, replicas: int, most_ahead: int) -> None:
        self.most_ahead = most_ahead
        self.done = [0] * replicas
        self.read = [0] * replicas
        self.version = 0
        self.staleness = Staleness()

    def push(self, replica: int, *, skipped: bool = False) -> None:
        """A replica has taken a step; `skipped`: without a gradient."""
        if not skipped:
            missed = self.version - self.read[replica]
            self.version += 1
            seen = self.staleness
            seen.pushes, seen.total, seen.most = seen.pushes + 1, seen.total + missed, max(seen.most, missed)
        self.done[replica] += 1

    def may_go_on(self, replica: int) -> bool:
        """True if a replica may have the weights for its next step."""
        return self._ahead(replica) <= self.most_ahead

    def pull(self, replica: int) -> None:
        """A replica gets the weights as they are now."""
        self.staleness.ahead = max(self.staleness.ahead, self._ahead(replica))
        self.read[replica] = self.version

    def _ahead(self, replica: int) -> int:
        return self.done[replica] - min(self.done)


def most_missed(replicas: int, most_ahead: int) -> int:
    """The staleness that no gradient exceeds."""
    return (replicas - 1) * (2 * most_ahead + 1)
