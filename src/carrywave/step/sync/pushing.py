"""`train.sync: async`: every worker is a replica that pushes its gradient to whoever holds a share of the weights, and gets the weights
back, without waiting for the gradients of others; and holds a share itself.

The order in which gradients arrive decides the result, so it depends on timing. A gradient is applied with the learning rate divided by the
number of replicas: one push from each moves the weights about as far as one step of all of them together.

A replica that has pushed its gradient gets the weights for its next step at once, unless it is over `sync_staleness` steps ahead of the
slowest; then it waits for that one (stale synchronous parallel, Ho et al. 2013). The slowest never waits, so nobody waits forever. The
staleness of a gradient is the number of other replicas' updates since the weights that it was computed from: with R replicas at most
(R - 1)(2 sync_staleness + 1), because while a replica takes one step, another may come from as far behind as allowed to as far ahead.

A thread for each of the other workers receives its requests. Between a meeting and this worker's own next step the share is closed: threads
wait, and what others send waits with them, so that a snapshot sees all shares at the same moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from carrywave.errors import WorkerError
from carrywave.parallel import process_groups
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.result import StepResult
from carrywave.step.sync.averaging import Named

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
        self.group, self.most_ahead = group, spec.sync_staleness
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
            while not at_once and self.done[replica] - min(self.done) > self.most_ahead:
                self.check()
                if time.monotonic() > deadline:
                    raise dist.DistNetworkError(f"timed out waiting for a gradient of rank {self.done.index(min(self.done))}")
                self._changed.wait(LOOK_SECONDS)
            self.staleness.ahead = max(self.staleness.ahead, self.done[replica] - min(self.done))
            self._read[replica] = self._version
            return self.weights.detach().clone()

    def check(self) -> None:
        """Raise what has ended a thread."""
        if self.failure is not None:
            raise self.failure

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


class Pushing:
    """This worker's weights, and its share of those that all train. Collective: every rank must create it."""

    def __init__(self, mesh: Mesh, named: Named, spec: TrainSpec) -> None:
        self.mesh, self.spec, self.parameters = mesh, spec, [parameter for _, parameter in named]
        self.targets = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self.rank, self.size = mesh.world.rank, mesh.world.size
        self.group = process_groups.group(range(self.size), "async") if self.size > 1 else None
        flat = _flat(self.parameters)
        self.edges = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        self.server = ShareServer(self.rank, self.size, spec, flat[self._share(self.rank)], self.group)
        self.staleness = Staleness()  # of all pushes of all replicas up to the last meeting
        self._open = False
        self._mark = 0.0

    def _share(self, rank: int) -> slice:
        return slice(self.edges[rank], self.edges[rank + 1])

    def due(self, step: int, *, last: bool) -> bool:
        """True if replicas meet after a step."""
        return last or step % self.spec.sync_every == 0

    def add(self, result: StepResult) -> None:
        """Count the targets of a step; one that was skipped does not count."""
        self.targets += result.learned

    @torch.no_grad()
    def push(self, lr: float, *, skip: bool) -> None:
        """Push this replica's gradient to all shares, and take their weights for its next step."""
        flat = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        # A batch in which this replica has no targets: a gradient of zeros would still move the weights by their momentum.
        skip = skip or not bool(flat.any())
        self._request(SKIP if skip else PUSH, None if skip else flat, lr / self.size)

    @torch.no_grad()
    def exchange(self, targets: Tensor) -> None:
        """At a meeting, when all gradients were applied: take the same weights on all workers, and close the shares. Collective."""
        self._request(MEET, None, 0.0)
        self._open = False
        self.targets.zero_()
        # Compare checksums of the weights, and add up how stale gradients were. Nobody goes on before all have the weights.
        words = torch.cat([p.detach().reshape(-1).view(torch.int32).to(torch.int64) for p in self.parameters])
        self._mark = float(words.sum() & ((1 << 40) - 1))
        report = torch.zeros(self.size, 5, dtype=torch.float64, device=self.mesh.device)
        own = self.server.staleness
        report[self.rank] = torch.tensor([self._mark, own.pushes, own.total, own.most, own.ahead], dtype=torch.float64)
        checksums, pushes, totals, most, ahead = ([int(each) for each in column] for column in self.mesh.sum_(report).t().tolist())
        self.staleness = Staleness(sum(pushes), sum(totals), max(most), max(ahead))
        for rank, mark in enumerate(checksums):
            if mark != checksums[0]:
                fact = f"rank {rank} got other weights than rank 0 when they met"
                raise on_every_rank(WorkerError(f"{fact}; change weights only through training, on all workers alike"))

    @lost_contact.kept
    def _request(self, kind: int, flat: Tensor | None, lr: float) -> None:
        """Send a request to all holders of shares, and put the weights that come back in their place."""
        self.server.check()
        if not self._open:
            self._open = True
            self.server.open()
        header = torch.tensor([kind, lr], dtype=torch.float64)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sizes = [high - low for low, high in zip(self.edges[:-1], self.edges[1:], strict=True)]
        answers = {rank: torch.empty(sizes[rank], dtype=self.server.weights.dtype) for rank in others}
        works = [dist.irecv(answers[rank], rank, group=self.group, tag=ANSWER) for rank in others]
        for rank in others:
            works.append(dist.isend(header, rank, group=self.group, tag=REQUEST))
            if flat is not None:
                works.append(dist.isend(flat[self._share(rank)], rank, group=self.group, tag=REQUEST))
        if kind != MEET:
            self.server.push(self.rank, None if flat is None else flat[self._share(self.rank)], lr)
        answers[self.rank] = self.server.pull(self.rank, at_once=kind == MEET)
        for work in works:
            assert work is not None
            work.wait()
        whole = torch.cat([answers[rank] for rank in range(self.size)])
        for parameter, part in zip(self.parameters, torch.split(whole, [p.numel() for p in self.parameters]), strict=True):
            parameter.detach().copy_(part.view_as(parameter))

    def summary(self) -> str:
        """How stale gradients were, in a sentence."""
        seen, bound = self.staleness, (self.size - 1) * (2 * self.spec.sync_staleness + 1)
        return (
            f"asynchronous: a gradient missed {seen.mean:.1f} updates of other replicas on average, {seen.most} at most "
            f"(bound {bound}); another run will end with other weights"
        )

    def checksum(self) -> float:
        """Of the weights at the last meeting."""
        return self._mark

    def shared_state(self) -> dict[str, Tensor]:
        """Nothing besides the parameters."""
        return {}

    def local_state(self) -> dict[str, Tensor]:
        """The optimizer state of this worker's share."""
        return optimizers.state_tensors(self.server.optimizer, [(NAME, self.server.weights)])

    @torch.no_grad()
    def load(self, shares: Sequence[Mapping[str, Tensor]]) -> None:
        """Take the optimizer state of all shares, in their order, from a snapshot, after the parameters were loaded."""
        own = self._share(self.rank)
        self.server.weights.copy_(_flat(self.parameters)[own])
        state = {key: tensor if not tensor.dim() else torch.cat([part[key] for part in shares])[own] for key, tensor in shares[0].items()}
        optimizers.load_state(self.server.optimizer, [(NAME, self.server.weights)], state)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()


class PushOptimizer(torch.optim.Optimizer):
    """Takes a step by pushing the gradients, and changes nothing if `found_inf` is 1; the optimizer state is with the shares."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.pushing: Pushing | None = None  # set once the workers are connected
        # The attribute by which torch's gradient scaler and ours recognise an optimizer that honours `found_inf`.
        self._step_supports_amp_scaling = True

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Push the gradients, take the weights."""
        assert self.pushing is not None
        assert closure is None
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        self.pushing.push(float(self.param_groups[0]["lr"]), skip=found_inf is not None and bool(found_inf))
        return None
