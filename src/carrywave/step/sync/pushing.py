"""`train.sync: async`: every worker is a replica that pushes its gradient to whoever holds a share of the weights, and gets the weights
back, without waiting for the gradients of others; and holds a share itself (`shares`).

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
from carrywave.step.result import StepResult
from carrywave.step.sync.averaging import Named, bounds
from carrywave.step.sync.shares import ANSWER, MEET, NAME, PUSH, REQUEST, SKIP, ShareServer, Staleness


class Pushing:
    """This worker's weights, and its share of those that all train. Collective: every rank must create it."""

    fragments = 1

    def __init__(self, mesh: Mesh, named: Named, spec: TrainSpec) -> None:
        self.mesh, self.spec, self.parameters = mesh, spec, [parameter for _, parameter in named]
        self.outer: dict[str, Tensor] = {}  # none besides the parameters: at meetings all workers have the same
        self.targets = torch.zeros(1, dtype=torch.float64, device=mesh.device)
        self.rank, self.size = mesh.world.rank, mesh.world.size
        self.group = process_groups.group(range(self.size), "async") if self.size > 1 else None
        flat = _flat(self.parameters)
        self.cuts = [slice(*bounds(flat.numel(), rank, self.size)) for rank in range(self.size)]
        self.server = ShareServer(self.rank, self.size, spec, flat[self.cuts[self.rank]], self.group)
        self.staleness = Staleness()  # of all pushes of all replicas up to the last meeting
        self._open = False
        self._mark = 0.0

    def due(self, step: int, *, last: bool) -> tuple[int, ...]:
        """Whether replicas meet after a step."""
        return (0,) if last or step % self.spec.sync_every == 0 else ()

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
    def exchange(self, due: Sequence[int], targets: Tensor) -> None:
        """At a meeting, when all gradients were applied: take the same weights on all workers, and close the shares. Collective."""
        self._request(MEET, None, 0.0)
        self._open = False
        self.targets.zero_()
        self._agree()

    @lost_contact.kept
    def _request(self, kind: int, flat: Tensor | None, lr: float) -> None:
        """Send a request to all holders of shares, and put the weights that come back in their place."""
        self.server.check()
        if not self._open:
            self._open = True
            self.server.open()
        header = torch.tensor([kind, lr], dtype=torch.float64)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sizes = [cut.stop - cut.start for cut in self.cuts]
        answers = {rank: torch.empty(sizes[rank], dtype=self.server.weights.dtype) for rank in others}
        works = [dist.irecv(answers[rank], rank, group=self.group, tag=ANSWER) for rank in others]
        for rank in others:
            works.append(dist.isend(header, rank, group=self.group, tag=REQUEST))
            if flat is not None:
                works.append(dist.isend(flat[self.cuts[rank]], rank, group=self.group, tag=REQUEST))
        if kind != MEET:
            self.server.push(self.rank, None if flat is None else flat[self.cuts[self.rank]], lr)
        answers[self.rank] = self.server.pull(self.rank, at_once=kind == MEET)
        for work in works:
            assert work is not None
            work.wait()
        whole = torch.cat([answers[rank] for rank in range(self.size)])
        for parameter, part in zip(self.parameters, torch.split(whole, [p.numel() for p in self.parameters]), strict=True):
            parameter.detach().copy_(part.view_as(parameter))

    def _agree(self) -> None:
        """Compare checksums of the weights, and add up how stale gradients were. Nobody goes on before all have the weights."""
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

    def summary(self) -> str:
        """How stale gradients were, in a sentence."""
        seen, bound = self.staleness, (self.size - 1) * (2 * self.spec.max_staleness + 1)
        return (
            f"asynchronous: a gradient missed {seen.mean:.1f} updates of other replicas on average, {seen.most} at most "
            f"(bound {bound}); another run will end with other weights"
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
        own = self.cuts[self.rank]
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
