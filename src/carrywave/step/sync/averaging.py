"""`train.sync: local` and `diloco`: each replica trains its own weights, and every so many steps they exchange what these changed.

The *outer* weights are those that all replicas agree on. A replica starts from them and takes its own steps; the mean of what these
changed, weighted by the number of targets that each replica trained on, is the difference d, by which the outer weights move:

| rule | momentum m | outer weights w, from which replicas go on |
|---|---|---|
| average | | w + d |
| block momentum η (BMUF, Chen and Huo 2016) | η m + d | w + m |
| DiLoCo (arXiv 2311.08105), Nesterov μ, rate a | μ m + d | w + a (d + μ m) |

Every stage exchanges its weights with the same stage of the other replicas; weights that several stages hold (tied, or of a shared head)
are exchanged among all of them at once, so that all copies keep the same bits. Optimizer state stays with its replica, as in DiLoCo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.model.parameter_placement import Shared
from carrywave.parallel import process_groups
from carrywave.parallel.liveness import lost_contact
from carrywave.parallel.mesh import Mesh
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.agreement import sum_of
from carrywave.step.result import StepResult

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class OuterRule:
    """How outer weights move."""

    momentum: float = 0.0
    lr: float = 1.0
    nesterov: bool = False

    @staticmethod
    def of(spec: TrainSpec) -> OuterRule:
        """The rule that a spec asks for."""
        momentum = spec.exchange_momentum
        return OuterRule(momentum, spec.sync_lr, nesterov=True) if spec.sync == "diloco" else OuterRule(momentum)

    def step_(self, outer: Tensor, momentum: Tensor | None, difference: Tensor) -> None:
        """Move the outer weights by the mean difference of the replicas, in place."""
        if momentum is not None:
            momentum.mul_(self.momentum).add_(difference)
            difference = torch.add(difference, momentum, alpha=self.momentum) if self.nesterov else momentum
        outer.add_(difference, alpha=self.lr)


@dataclass(frozen=True)
class Party:
    """Weights that are exchanged over one group of workers. None: this worker is alone."""

    group: dist.ProcessGroup | None
    names: tuple[str, ...]
    copies: int  # workers of each replica that hold them


class Averaging:
    """This worker's weights, and those that all replicas agree on (`outer`). Collective: every rank must create it."""

    def __init__(self, mesh: Mesh, named: Named, tied: Sequence[Shared], spec: TrainSpec) -> None:
        self.mesh, self.spec, self.rule = mesh, spec, OuterRule.of(spec)
        for name, parameter in named:
            if not parameter.is_contiguous():
                raise UserError(f"{name} is not contiguous in memory, which train.sync={spec.sync} needs; make it so with .contiguous()")
        self.parameters = dict(named)
        self.outer = {name: parameter.detach().clone() for name, parameter in named}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.outer.items()} if self.rule.momentum else {}
        self.targets = torch.zeros((), dtype=torch.float64, device=mesh.device)  # here, since the last exchange
        self.parties = _parties(mesh, [name for name, _ in named], tied)

    def due(self, step: int, *, last: bool) -> bool:
        """True if replicas exchange after a step, counted from 1; always at the end of an epoch or run."""
        return last or step % self.spec.sync_every == 0

    def add(self, result: StepResult) -> None:
        """Count the targets of a step that this replica took; one that was skipped does not count."""
        self.targets += result.learned

    @lost_contact.kept
    @torch.no_grad()
    def exchange(self, targets: Tensor) -> None:
        """Exchange the weights. `targets`: those of each replica since the last exchange, on the host. Collective."""
        total = float(targets.sum())
        share = float(targets[self.mesh.replica]) / total if total else 1.0 / self.mesh.plan.replicas
        for party in self.parties:
            changes = [(self.parameters[name] - self.outer[name]) * (share / party.copies) for name in party.names]
            flat = torch.cat([change.view(-1) for change in changes])
            if party.group is not None:
                source = flat.cpu() if self.mesh.world.backend == "gloo" else flat
                dist.all_reduce(source, group=party.group)
                flat = source.to(flat.device)
            for name, change in zip(party.names, torch.split(flat, [change.numel() for change in changes]), strict=True):
                self.rule.step_(self.outer[name], self.momentum.get(name), change.view_as(self.outer[name]))
                self.parameters[name].copy_(self.outer[name])
        self.targets.zero_()

    def checksum(self) -> Tensor:
        """A number that differs if the outer weights of two replicas do: they are the same, bit for bit, or something is broken."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for number, weight in enumerate(self.outer.values()):
            total = total + (number % 31 + 1) * sum_of(weight)  # as in `Agreement`, of all weights at once
        return total

    def shared_state(self) -> dict[str, Tensor]:
        """What a snapshot holds once, because all replicas have the same; besides the outer weights."""
        return {f"momentum/{name}": tensor for name, tensor in self.momentum.items()}

    def local_state(self) -> dict[str, Tensor]:
        """What a snapshot holds for each replica besides its optimizer state: nothing, since it is taken at an exchange."""
        return {}

    @torch.no_grad()
    def load(self, shared: Mapping[str, Tensor]) -> None:
        """Take the state from a snapshot, after the outer weights were loaded into the parameters."""
        for name, parameter in self.parameters.items():
            self.outer[name].copy_(parameter)
            if name in self.momentum:
                self.momentum[name].copy_(shared[f"momentum/{name}"])
        self.targets.zero_()


def _parties(mesh: Mesh, names: Sequence[str], tied: Sequence[Shared]) -> list[Party]:
    """Who exchanges what with whom. Every worker creates all groups, in the same order."""
    replicas, several = range(mesh.plan.replicas), {each.name for each in tied}

    def group(stages: Sequence[int]) -> dist.ProcessGroup | None:
        ranks = sorted(mesh.rank_at(replica, stage) for replica in replicas for stage in stages)
        return process_groups.group(ranks, "sync") if len(ranks) > 1 else None

    groups = [group([stage]) for stage in range(mesh.plan.stages)]
    parties = [Party(groups[mesh.stage], tuple(name for name in names if name not in several), 1)]
    for stages in dict.fromkeys(each.stages for each in tied):
        joint = group(stages)
        held = tuple(each.name for each in tied if each.stages == stages and each.name in names)
        if mesh.stage in stages:
            parties.append(Party(joint, held, len(stages)))
    return [party for party in parties if party.names]
