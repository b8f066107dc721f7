"""One worker's share of the weights in asynchronous training: it takes gradients from all replicas, one after the other, and hands out the
weights.

A replica that has pushed its gradient gets the weights for its next step at once, unless it is more than `max_staleness` steps ahead of the
slowest; then it waits for that one (stale synchronous parallel, Ho et al. 2013). The slowest never waits, so nobody waits forever. The
staleness of a gradient is the number of other replicas' updates since the weights that it was computed from: with R replicas at most
(R - 1)(2 max_staleness + 1), because while a replica takes one step, another may come from as far behind as allowed to as far ahead.

A thread for each of the other workers receives its requests. Between a meeting and this worker's own next step the share is closed: threads
wait, and what others send waits with them, so that a snapshot sees all shares at the same moment.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from carrywave.parallel import process_groups
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.optim import optimizer as optimizers

PUSH, SKIP, MEET = range(3)  # requests: here is a gradient; there is none for this step; all have met, and this is the last of the round
REQUEST, ANSWER = 1, 2  # tags of messages
NAME = "share"  # under which a snapshot holds the optimizer state
LOOK_SECONDS = 0.5  # between looks whether something has failed


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


class ShareServer:
    """Part of all weights in a row, in host memory, with its optimizer state."""

    def __init__(self, rank: int, size: int, spec: TrainSpec, weights: Tensor, group: dist.ProcessGroup | None) -> None:
        self.group, self.most_ahead = group, spec.max_staleness
        self.weights = nn.Parameter(weights.clone())
        self.optimizer = optimizers.build(spec, [(NAME, self.weights)], torch.device("cpu"))
        self.staleness = Staleness()
        self.failure: BaseException | None = None
        self.done = [0] * size  # steps that each replica has taken
        self._read = [0] * size  # the version of the share that each has read
        self._version = 0
        self._round = 0  # of those between meetings; open from this worker's first step in it
        self._changed = threading.Condition()
        for peer in range(size):
            if peer != rank:
                threading.Thread(target=self._serve, args=(peer,), name=f"carrywave-share-{peer}", daemon=True).start()

    def open(self) -> None:
        """Take requests, from now to the next meeting."""
        with self._changed:
            self._round += 1
            self._changed.notify_all()

    def push(self, replica: int, gradient: Tensor | None, lr: float) -> None:
        """Apply a replica's gradient to the share; None: it has none."""
        with self._changed:
            if gradient is not None:
                self.optimizer.param_groups[0]["lr"] = lr
                self.weights.grad = gradient
                self.optimizer.step()
                self.weights.grad = None
                missed, seen = self._version - self._read[replica], self.staleness
                self._version += 1
                self.staleness = Staleness(seen.pushes + 1, seen.total + missed, max(seen.most, missed), seen.ahead)
            self.done[replica] += 1
            self._changed.notify_all()

    def pull(self, replica: int, *, at_once: bool = False) -> Tensor:
        """A copy of the share, as soon as the replica may go on. `at_once`: all have met, so nobody is behind."""
        with self._changed:
            deadline = time.monotonic() + process_groups.seconds()
            while not at_once and self._ahead(replica) > self.most_ahead:
                self.check()
                if time.monotonic() > deadline:
                    raise dist.DistNetworkError(f"timed out waiting for a gradient of rank {self.done.index(min(self.done))}")
                self._changed.wait(LOOK_SECONDS)
            self.staleness.ahead = max(self.staleness.ahead, self._ahead(replica))
            self._read[replica] = self._version
            return self.weights.detach().clone()

    def check(self) -> None:
        """Raise what has ended a thread."""
        if self.failure is not None:
            raise self.failure

    def _ahead(self, replica: int) -> int:
        return self.done[replica] - min(self.done)

    def _serve(self, peer: int) -> None:
        """Answer the requests of one worker, round after round."""
        done = 0
        try:
            while True:
                with self._changed:
                    while self._round <= done:
                        self._changed.wait()
                done += 1
                while self._answer(peer) != MEET:
                    pass
        except BaseException as error:
            with self._changed:
                self.failure = self.failure or error
                self._changed.notify_all()

    def _answer(self, peer: int) -> int:
        header = torch.zeros(2, dtype=torch.float64)
        dist.recv(header, peer, group=self.group, tag=REQUEST)
        kind, lr = int(header[0]), float(header[1])
        if kind != MEET:
            gradient = None
            if kind == PUSH:
                gradient = torch.empty_like(self.weights.detach())
                dist.recv(gradient, peer, group=self.group, tag=REQUEST)
            self.push(peer, gradient, lr)
        dist.send(self.pull(peer, at_once=kind == MEET), peer, group=self.group, tag=ANSWER)
        return kind
