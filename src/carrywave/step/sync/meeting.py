"""Meetings of replicas that train on their own: at fixed steps, one all-reduced vector tells all workers what each must know of the others.

Between two meetings nothing is exchanged between replicas: neither losses, nor requests to stop, nor news of non-finite numbers. What a run
writes (rows, weights, snapshots) it therefore writes at meetings, where all workers agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carrywave.errors import Diverged, UserError, WorkerError
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.replica_mesh import ReplicaMesh
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.nonfinite import MOST_IN_A_ROW, NonfiniteRecord, Seen, remedy
from carrywave.step.optim import optimizer as optimizers
from carrywave.step.optim.loss_scaler import Scaler
from carrywave.step.result import StepResult, Votes
from carrywave.step.stats import Slots
from carrywave.step.sync.averaging import Averaging, Named
from carrywave.step.sync.pushing import Pushing, PushOptimizer
from carrywave.step.worker_setup import tied_of

SMALLEST_SCALE = 2.0**-14  # once an fp16 loss scale has been halved to below this, gradients are non-finite at any scale
SUMS = 5  # loss, targets, norm, steps; non-finite steps
Sync = Averaging | Pushing  # how replicas exchange, if not at every step


def within_step(mesh: Mesh, spec: TrainSpec) -> Mesh:
    """Those who exchange something within a step: all workers, or those of one replica that trains on its own. Collective."""
    return mesh if spec.sync == "step" or mesh.plan.replicas == 1 else ReplicaMesh(mesh)


def optimizer_of(spec: TrainSpec, named: Named, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that takes a step: the spec's, or one that pushes gradients to where the spec's is."""
    return PushOptimizer([p for _, p in named], spec.lr) if spec.sync == "async" else optimizers.build(spec, named, device)


def sync_of(spec: TrainSpec, mesh: Mesh, model: Model | OpaqueModel, named: Named, optimizer: torch.optim.Optimizer) -> Sync | None:
    """How replicas exchange; None: at every step. Collective: every rank must call it."""
    if spec.sync == "step":
        return None
    if not isinstance(optimizer, PushOptimizer):
        return Averaging(mesh, named, tied_of(model, mesh), spec)
    optimizer.pushing = Pushing(mesh, named, spec)
    return optimizer.pushing


@dataclass(frozen=True)
class News:
    """What this worker brings to a meeting besides its sums."""

    model: Model | OpaqueModel
    votes: Votes
    nonfinite: NonfiniteRecord
    scaler: Scaler | None
    guards_weights: bool


@dataclass(frozen=True)
class Met:
    """What all workers learned at a meeting."""

    sums: Tensor  # [5], over the steps of all replicas since the last meeting, on the device; norms and steps are means over replicas
    votes: tuple[float, float]  # as in `Trainer.votes`, added up
    targets: Tensor  # [replica] on the host: trained on since the last exchange
    seen: Seen
    scale_gone: bool  # a loss scale became so small that gradients are non-finite at any scale


class Meetings:
    """The meetings of one trainer's replicas, and what this worker brings to the next one."""

    def __init__(self, mesh: Mesh, sync: Sync) -> None:
        self.mesh, self.sync = mesh, sync
        size = self.mesh.world.size
        self.slots = Slots(
            sums=(SUMS,),
            votes=(2,),
            targets=(self.mesh.plan.replicas,),
            seen=(size, 6),  # of `Seen`, by rank: ago + 1, this rank's code, bad, longest, in a row; and whether its loss scale is gone
            marks=(size,),  # each worker's checksum of the weights that replicas agree on
        )
        self.forget()

    def forget(self) -> None:
        """Forget the steps since the last meeting, because the run goes back to a snapshot, which is of a meeting."""
        self.sums = torch.zeros(SUMS, dtype=torch.float64, device=self.mesh.device)

    def add(self, result: StepResult) -> None:
        """Count a step of this replica."""
        self.sums = self.sums + result.counted()
        self.sync.add(result)

    def meet(self, news: News) -> Met:
        """Share this worker's numbers, and read those of the others. Collective: every rank must call it after the same step."""
        mesh, rank, seen = self.mesh, self.mesh.world.rank, news.nonfinite.look()
        report = torch.zeros(self.slots.size, dtype=torch.float64, device=mesh.device)
        own, replicas = self.slots.parts(report), mesh.plan.replicas
        if mesh.stage == 0:  # the other stages of a replica know the same numbers
            mean = torch.tensor([1.0, 1.0, 1.0 / replicas, 1.0 / replicas, 1.0], dtype=torch.float64, device=mesh.device)
            own["sums"].copy_(self.sums * mean)
            own["targets"][mesh.replica] = self.sync.targets
        own["votes"].copy_(torch.tensor(news.votes, dtype=torch.float64))
        code = seen.codes[news.nonfinite.world.rank] if seen.codes else 0
        gone = news.scaler is not None and float(news.scaler.scale) < SMALLEST_SCALE
        row = [0 if seen.ago is None else seen.ago + 1, code, seen.bad, seen.longest, seen.in_a_row, float(gone)]
        own["seen"][rank] = torch.tensor(row, dtype=torch.float64, device=mesh.device)
        own["marks"][rank] = self.sync.checksum()
        summed = mesh.sum_(report)
        found = self.slots.parts(summed.cpu())
        self._compare(found["marks"].tolist())
        self.forget()
        rows = [[int(number) for number in each] for each in found["seen"].tolist()]
        stop, end = found["votes"].tolist()
        joint = joined(rows, [mesh.rank_at(replica, 0) for replica in range(replicas)])
        return Met(self.slots.parts(summed)["sums"].clone(), (stop, end), found["targets"].clone(), joint, any(each[5] for each in rows))

    def _compare(self, checksums: Sequence[float]) -> None:
        stages = self.mesh.plan.stages
        for index, rank in enumerate(self.mesh.ranks):
            first = self.mesh.rank_at(0, index % stages)
            if checksums[rank] != checksums[first]:
                fact = f"the weights that rank {rank} and rank {first} agreed on at their last exchange differ"
                raise on_every_rank(WorkerError(f"{fact}; change weights in the same way on all workers, or not at all"))


def joined(rows: Sequence[Sequence[int]], firsts_of_replicas: Sequence[int]) -> Seen:
    """What all replicas saw of non-finite steps, from the rows of all ranks: the first of them anywhere, and all of them, as counted by one
    rank of each replica.
    """
    firsts = [row[0] for row in rows]
    in_a_row = max(row[4] for row in rows)
    if not any(firsts):
        return Seen(in_a_row=in_a_row)
    first = max(firsts)  # the longest ago
    codes = tuple(row[1] if row[0] == first else 0 for row in rows)
    return Seen(first - 1, codes, sum(rows[rank][2] for rank in firsts_of_replicas), max(row[3] for row in rows), in_a_row)


class UserExchanges:
    """The exchanges of replicas in a user's own loop, which meet after every so many steps, as they do in ours. What depends on all of them
    (an evaluation, the whole model's weights) is asked for right after an exchange, which the user may have at any step.
    """

    def __init__(self, mesh: Mesh, sync: Sync, spec: TrainSpec) -> None:
        self.mesh, self.sync, self.spec = mesh, sync, spec
        self.meetings = Meetings(mesh, sync)
        self.alone = mesh.plan.replicas == 1 and spec.sync == "local"  # the mean of one replica's weights is these weights
        self.steps = 0
        self.met = 0  # the step of the last exchange

    def after(self, result: StepResult, news: News) -> None:
        """Count a step of this replica, and exchange what is due. Collective at the same steps on every rank."""
        self.meetings.add(result)
        self.steps += 1
        if self.sync.due(self.steps, last=False):
            self._meet(news)

    def everything(self, news: News) -> None:
        """Exchange all weights now, unless that was the last thing done. Collective: every rank must call it after the same step."""
        if self.met != self.steps:
            self._meet(news)

    def check_met(self) -> None:
        """Refuse what needs the weights that all replicas agree on, where they have not agreed since their last step."""
        if self.met != self.steps and not self.alone:
            raise UserError("replicas have trained on their own since their last exchange; call trainer.exchange() on all workers first")

    @lost_contact.kept
    def _meet(self, news: News) -> None:
        met = self.meetings.meet(news)
        seen = met.seen
        stops = self.spec.on_nan == "stop" or seen.longest >= MOST_IN_A_ROW
        if met.scale_gone or (seen.ago is not None and stops):  # before anything non-finite reaches another replica
            cause = news.nonfinite.cause(seen, weights=news.guards_weights, world=self.mesh.world)
            gone = f" at any loss scale down to {SMALLEST_SCALE:g}" if met.scale_gone else ""
            advice = remedy(news.model, cause, "lower the learning rate, or set train.clip")
            raise on_every_rank(Diverged(f"{cause} is no longer finite{gone}; {advice}"))
        self.sync.exchange(met.targets)
        self.met = self.steps


def check_unsaved(sync: str) -> None:
    """Refuse to save or load a state that would lack what each replica has of its own."""
    if sync != "step":
        raise UserError(
            f"with train.sync={sync} each replica has an optimizer state of its own, which a trainer's state does not hold; "
            "save trainer.gathered() inside trainer.evaluation_weights() and start from these weights, or use cw.fit"
        )
