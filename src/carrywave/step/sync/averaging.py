"""`train.sync: local` and `diloco`: each replica trains its own weights, and every so many steps they exchange what these changed.

Only the difference to where the replicas started from travels, so that it can be rounded to bf16 without rounding the weights. Every stage
exchanges its own weights with the same stage of the other replicas; weights that several stages hold (tied, or of a shared head) are
exchanged among all of them at once, so that all copies keep the same bits. Optimizer state stays with its replica, as in DiLoCo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from carrywave.errors import UserError
from carrywave.model.parameter_placement import Shared
from carrywave.parallel import process_groups
from carrywave.parallel.mesh import Mesh
from carrywave.spec.train_spec import TrainSpec
from carrywave.step.checks.agreement import sum_of
from carrywave.step.sync.outer import OuterRule, bounds, fragments_due, weight_of
from carrywave.step.sync.wire import Wire
from carrywave.step.update import StepResult

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Party:
    """Weights that are exchanged over one group of workers."""

    wire: Wire
    names: tuple[str, ...]
    copies: int  # workers of each replica that hold them


class Averaging:
    """This worker's weights, and those that all replicas agree on (`outer`). Collective: every rank must create it."""

    def __init__(self, mesh: Mesh, named: Named, tied: Sequence[Shared], spec: TrainSpec) -> None:
        self.mesh, self.spec, self.rule = mesh, spec, OuterRule.of(spec)
        self.fragments = spec.sync_fragments
        for name, parameter in named:
            if not parameter.is_contiguous():
                raise UserError(f"{name} is not contiguous in memory, which train.sync={spec.sync} needs; make it so with .contiguous()")
        self.parameters = dict(named)
        self.outer = {name: parameter.detach().clone() for name, parameter in named}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.outer.items()} if self.rule.keeps_momentum else {}
        self.targets = torch.zeros(self.fragments, dtype=torch.float64, device=mesh.device)  # here, since its last exchange
        self.exchanged_at_once = True  # False if fragments were last exchanged at different steps: the replicas' weights differ
        self.parties = _parties(mesh, [name for name, _ in named], tied, spec.sync_dtype)

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent to other replicas."""
        return sum(party.wire.sent_bytes for party in self.parties)

    def due(self, step: int, *, last: bool) -> tuple[int, ...]:
        """The fragments to exchange after a step."""
        return fragments_due(step, self.spec.sync_every, self.fragments, last=last)

    def add(self, result: StepResult) -> None:
        """Count the targets of a step that this replica took; one that was skipped does not count."""
        self.targets += result.learned

    @torch.no_grad()
    def exchange(self, due: Sequence[int], targets: Tensor) -> None:
        """Exchange fragments. `targets`: those of all replicas since each fragment's last exchange, [replica, fragment], on the host."""
        replica, replicas = self.mesh.replica, self.mesh.plan.replicas
        for fragment in due:
            local_targets, total = float(targets[replica, fragment]), float(targets[:, fragment].sum())
            weight = weight_of(local_targets, total, replicas)
            for party in self.parties:
                self._exchange(party, fragment, weight)
            self.targets[fragment] = 0.0
        self.exchanged_at_once = len(due) == self.fragments

    def _exchange(self, party: Party, fragment: int, weight: float) -> None:
        pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []  # of the replica's weights, of the outer ones, of the momentum
        for name in party.names:
            low, high = bounds(self.outer[name].numel(), fragment, self.fragments)
            cut = [_flat(tensor)[low:high] for tensor in (self.parameters[name].detach(), self.outer[name])]
            momentum = _flat(self.momentum[name])[low:high] if self.momentum else None
            pieces.append((cut[0], cut[1], momentum))
        changes = [(local - self.rule.start_of(outer, momentum)) * (weight / party.copies) for local, outer, momentum in pieces]
        summed = party.wire.sum(torch.cat(changes))
        for (local, outer, momentum), change in zip(pieces, torch.split(summed, [change.numel() for change in changes]), strict=True):
            self.rule.step_(outer, momentum, change.to(outer.dtype))
            local.copy_(self.rule.start_of(outer, momentum))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the parameters by the outer weights inside this context; a replica's own are restored bit for bit."""
        if self.exchanged_at_once and not self.rule.ahead:
            yield  # they are the same
            return
        with torch.no_grad():
            kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            for name, parameter in self.parameters.items():
                parameter.copy_(self.outer[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(kept[name])

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
        """What a snapshot holds for each replica, by name of the parameter."""
        if self.exchanged_at_once:
            return {}
        return {f"weights/{name}": parameter.detach() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor], targets: Tensor | None) -> None:
        """Take the state from a snapshot, after the outer weights were loaded into the parameters."""
        for name, parameter in self.parameters.items():
            self.outer[name].copy_(parameter)
        for name, momentum in self.momentum.items():
            momentum.copy_(shared[f"momentum/{name}"])
        self.exchanged_at_once = not local
        for name, parameter in self.parameters.items():
            start = self.rule.start_of(self.outer[name], self.momentum.get(name))
            parameter.copy_(local[f"weights/{name}"] if local else start)
        self.targets.copy_(torch.zeros_like(self.targets) if targets is None else targets)


def _parties(mesh: Mesh, names: Sequence[str], tied: Sequence[Shared], dtype: str) -> list[Party]:
    """Who exchanges what with whom. Every worker creates all groups, in the same order."""
    plan, world = mesh.plan, mesh.world
    replicas, several = range(plan.replicas), {each.name for each in tied}

    def wire(stages: Sequence[int]) -> Wire:
        ranks = sorted(mesh.rank_at(replica, stage) for replica in replicas for stage in stages)
        group: dist.ProcessGroup | None = process_groups.group(ranks, "sync") if len(ranks) > 1 else None
        return Wire(group, dtype, mesh.device, world.backend)

    wires = [wire([stage]) for stage in range(plan.stages)]
    parties = [Party(wires[mesh.stage], tuple(name for name in names if name not in several), 1)]
    for stages in dict.fromkeys(each.stages for each in tied):
        joint = wire(stages)
        held = tuple(each.name for each in tied if each.stages == stages and each.name in names)
        if mesh.stage in stages:
            parties.append(Party(joint, held, len(stages)))
    return [party for party in parties if party.names]


def _flat(tensor: Tensor) -> Tensor:
    """All elements in a row, without a copy."""
    return tensor.view(-1)
