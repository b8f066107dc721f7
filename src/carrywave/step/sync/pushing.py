"""`train.sync: async`: every worker is a replica that pushes its gradient to whoever holds a share of the weights, and gets the weights
back, without waiting for the gradients of others; and holds a share itself.

The order in which gradients arrive decides the result, so it depends on timing. A gradient is applied with the learning rate divided by the
number of replicas: one push from each moves the weights about as far as one step of all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from carrywave.step.sync.clocks import Staleness, most_missed
from carrywave.step.sync.outer import bounds
from carrywave.step.sync.share_server import ANSWER, MEET, NAME, PUSH, REQUEST, SKIP, ShareServer
from carrywave.step.update import StepResult

Named = Sequence[tuple[str, nn.Parameter]]


class Pushing:
    """This worker's weights, and its share of those that all train. Collective: every rank must create it."""

    fragments = 1

    def __init__(self, mesh: Mesh, named: Named, spec: TrainSpec) -> None:
        self.mesh, self.spec, self.parameters = mesh, spec, [parameter for _, parameter in named]
        self.outer: dict[str, Tensor] = {}  # none besides the parameters: at meetings all workers have the same
        self.targets = torch.zeros(1, dtype=torch.float64, device=mesh.device)
        self.rank, self.size = mesh.world.rank, mesh.world.size
        group = process_groups.group(range(self.size), "async") if self.size > 1 else None
        self.group: dist.ProcessGroup | None = group
        flat = self._flat([parameter.detach() for parameter in self.parameters])
        self.cuts = [bounds(flat.numel(), rank, self.size) for rank in range(self.size)]
        self.server = ShareServer(self.rank, self.size, spec, flat[slice(*self.cuts[self.rank])], group)
        self.staleness = Staleness()  # of all pushes of all replicas up to the last meeting
        self._open = False
        self._pushed_bytes = 0
        self._mark = 0.0

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent to others."""
        return self._pushed_bytes + self.server.sent_bytes

    def due(self, step: int, *, last: bool) -> tuple[int, ...]:
        """Whether replicas meet after a step."""
        return (0,) if last or step % self.spec.sync_every == 0 else ()

    def add(self, result: StepResult) -> None:
        """Count the targets of a step; one that was skipped does not count."""
        self.targets += result.learned

    @lost_contact.kept
    @torch.no_grad()
    def push(self, lr: float, *, skip: bool) -> None:
        """Push this replica's gradient to all shares, and take their weights for its next step."""
        self.server.check()
        if not self._open:
            self._open = True
            self.server.open()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = self._flat(gradients)
        # A batch in which this replica has no targets: a gradient of zeros would still move the weights by their momentum.
        skip = skip or not bool(flat.any())
        self._request(SKIP if skip else PUSH, None if skip else flat, lr / self.size)

    @torch.no_grad()
    def exchange(self, due: Sequence[int], targets: Tensor) -> None:
        """At a meeting, when all gradients were applied: take the same weights on all workers, and close the shares. Collective."""
        self.server.check()
        if not self._open:
            self.server.open()
        self._request(MEET, None, 0.0)
        self._open = False
        self.targets.zero_()
        self._agree()

    @lost_contact.kept
    def _request(self, kind: int, flat: Tensor | None, lr: float) -> None:
        """Send a request to all holders of shares, and put the weights that come back in their place."""
        header = torch.tensor([kind, lr], dtype=torch.float64)
        others = [rank for rank in range(self.size) if rank != self.rank]
        answers = {rank: torch.empty(self.cuts[rank][1] - self.cuts[rank][0], dtype=self.server.weights.dtype) for rank in others}
        works = [dist.irecv(answers[rank], rank, group=self.group, tag=ANSWER) for rank in others]
        for rank in others:
            works.append(dist.isend(header, rank, group=self.group, tag=REQUEST))
            if flat is not None:
                part = flat[slice(*self.cuts[rank])]
                works.append(dist.isend(part, rank, group=self.group, tag=REQUEST))
                self._pushed_bytes += part.nbytes
        if kind != MEET:
            self.server.push(self.rank, None if flat is None else flat[slice(*self.cuts[self.rank])], lr)
        answers[self.rank] = self.server.pull(self.rank, at_once=kind == MEET)
        for work in works:
            assert work is not None
            work.wait()
        self._take(torch.cat([answers[rank] for rank in range(self.size)]))

    def _agree(self) -> None:
        """Compare checksums of the weights, and add up how stale gradients were. Nobody goes on before all have the weights."""
        words = torch.cat([p.detach().reshape(-1).view(torch.int32).to(torch.int64) for p in self.parameters])
        self._mark = float(words.sum() & ((1 << 40) - 1))
        report = torch.zeros(self.size, 5, dtype=torch.float64, device=self.mesh.device)
        local = self.server.clocks.staleness
        report[self.rank] = torch.tensor([self._mark, local.pushes, local.total, local.most, local.ahead], dtype=torch.float64)
        rows = self.mesh.sum_(report).tolist()
        checksums, pushes, totals, most, ahead = ([int(row[column]) for row in rows] for column in range(5))
        self.staleness = Staleness(sum(pushes), sum(totals), max(most), max(ahead))
        for rank, mark in enumerate(checksums):
            if mark != checksums[0]:
                fact = f"rank {rank} got other weights than rank 0 when they met"
                raise on_every_rank(WorkerError(f"{fact}; change weights only through training, on all workers alike"))

    def summary(self) -> str:
        """How stale gradients were, in a sentence."""
        seen, most = self.staleness, most_missed(self.size, self.spec.max_staleness)
        return (
            f"asynchronous: a gradient missed {seen.mean:.1f} updates of other replicas on average, {seen.most} at most (bound {most}); "
            "another run will end with other weights"
        )

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """At a meeting, the parameters are those that all workers agree on."""
        yield

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
        low, high = self.cuts[self.rank]
        flat = self._flat([parameter.detach() for parameter in self.parameters])
        self.server.weights.copy_(flat[low:high])
        state = {
            key: tensor if not tensor.dim() else torch.cat([part[key] for part in shares])[low:high] for key, tensor in shares[0].items()
        }
        optimizers.load_state(self.server.optimizer, [(NAME, self.server.weights)], state)

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()

    def _take(self, flat: Tensor) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, torch.split(flat, sizes), strict=True):
            parameter.detach().copy_(part.view_as(parameter))


class PushOptimizer(torch.optim.Optimizer):
    """Takes a step by pushing the gradients, and changes nothing if `found_inf` is 1; the optimizer state is with the shares."""

    def __init__(self, named: Named, lr: float) -> None:
        super().__init__([parameter for _, parameter in named], {"lr": lr})
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
