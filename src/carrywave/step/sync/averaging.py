"""`train.sync: local` and `diloco`: each replica trains its own weights, and every so many steps they exchange what these changed.

The *outer* weights are those that all replicas agree on. A replica starts from them and takes its own steps; the mean of what these
changed, weighted by the number of targets that each replica trained on, is the difference d, by which the outer weights move:

| rule | momentum m | outer weights w | replicas start from |
|---|---|---|---|
| average | | w + d | w |
| block momentum η (BMUF, Chen and Huo 2016) | η m + d | w + m | w |
| the same, Nesterov | η m + d | w + m | w + η m |
| DiLoCo (arXiv 2311.08105), Nesterov μ, rate a | μ m + d | w + a (d + μ m) | w |

Only differences travel, so that they can be rounded to bf16 without rounding the weights. Every stage exchanges its own weights with the
same stage of the other replicas; weights that several stages hold (tied, or of a shared head) are exchanged among all of them at once, so
that all copies keep the same bits. Optimizer state stays with its replica, as in DiLoCo.
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
    ahead: bool = False  # replicas start ahead of the outer weights, by their momentum (block momentum, Nesterov)
    nesterov: bool = False  # the step itself looks ahead (DiLoCo)

    @staticmethod
    def of(spec: TrainSpec) -> OuterRule:
        """The rule that a spec asks for."""
        if spec.sync == "diloco":
            return OuterRule(spec.outer_momentum, spec.outer_lr, nesterov=True)
        return OuterRule(spec.block_momentum, ahead=spec.block_nesterov)

    def start_of(self, outer: Tensor, momentum: Tensor | None) -> Tensor:
        """Where replicas start from; the outer weights themselves unless the rule looks ahead."""
        return outer if momentum is None or not self.ahead else torch.add(outer, momentum, alpha=self.momentum)

    def step_(self, outer: Tensor, momentum: Tensor | None, difference: Tensor) -> None:
        """Move the outer weights by the mean difference of the replicas, in place."""
        if momentum is None:
            outer.add_(difference, alpha=self.lr)
            return
        momentum.mul_(self.momentum).add_(difference)
        outer.add_(torch.add(difference, momentum, alpha=self.momentum) if self.nesterov else momentum, alpha=self.lr)


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
        self.fragments = spec.sync_fragments
        for name, parameter in named:
            if not parameter.is_contiguous():
                raise UserError(f"{name} is not contiguous in memory, which train.sync={spec.sync} needs; make it so with .contiguous()")
        self.parameters = dict(named)
        self.outer = {name: parameter.detach().clone() for name, parameter in named}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.outer.items()} if self.rule.momentum else {}
        self.targets = torch.zeros(self.fragments, dtype=torch.float64, device=mesh.device)  # here, since its last exchange
        self.exchanged_at_once = True  # False if fragments were last exchanged at different steps: the replicas' weights differ
        self.parties = _parties(mesh, [name for name, _ in named], tied)

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
            local, total = float(targets[replica, fragment]), float(targets[:, fragment].sum())
            for party in self.parties:
                self._exchange(party, fragment, local / total if total else 1.0 / replicas)
            self.targets[fragment] = 0.0
        self.exchanged_at_once = len(due) == self.fragments

    def _exchange(self, party: Party, fragment: int, weight: float) -> None:
        """Exchange this fragment of every weight of a party, of which this replica's difference counts `weight`."""
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []  # of the replica's weights, of the outer ones, of the momentum
        for name in party.names:
            where = slice(*bounds(self.outer[name].numel(), fragment, self.fragments))
            own, outer = (tensor.view(-1)[where] for tensor in (self.parameters[name].detach(), self.outer[name]))
            parts.append((own, outer, self.momentum[name].view(-1)[where] if self.momentum else None))
        changes = [(own - self.rule.start_of(outer, momentum)) * (weight / party.copies) for own, outer, momentum in parts]
        summed = sum_over(party.group, torch.cat(changes), half=self.spec.sync_dtype == "bf16", on_host=self.mesh.world.backend == "gloo")
        for (own, outer, momentum), change in zip(parts, torch.split(summed, [change.numel() for change in changes]), strict=True):
            self.rule.step_(outer, momentum, change.to(outer.dtype))
            own.copy_(self.rule.start_of(outer, momentum))

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
        return {} if self.exchanged_at_once else {f"weights/{name}": parameter.detach() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load(self, shared: Mapping[str, Tensor], local: Mapping[str, Tensor], targets: Tensor | None) -> None:
        """Take the state from a snapshot, after the outer weights were loaded into the parameters."""
        self.exchanged_at_once = not local
        for name, parameter in self.parameters.items():
            self.outer[name].copy_(parameter)
            if name in self.momentum:
                self.momentum[name].copy_(shared[f"momentum/{name}"])
            parameter.copy_(local[f"weights/{name}"] if local else self.rule.start_of(self.outer[name], self.momentum.get(name)))
        self.targets.copy_(torch.zeros_like(self.targets) if targets is None else targets)


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


@lost_contact.kept
def sum_over(group: dist.ProcessGroup | None, flat: Tensor, *, half: bool, on_host: bool) -> Tensor:
    """The sum over a group of a flat tensor, which may be overwritten. Collective. `on_host`: gloo, which reads host memory.

    `half`: in bf16. Each worker is sent its part of the sum by all others, adds them up in full precision in the order of their ranks, and
    sends the sum to all: every number is rounded twice, however many replicas there are, and all workers end with the same bits.
    """
    if group is None:
        return flat.to(torch.bfloat16).to(flat.dtype) if half else flat
    source = flat.cpu() if on_host else flat
    if not half:
        dist.all_reduce(source, group=group)
        return source.to(flat.device)
    size = dist.get_world_size(group)
    part = max(1, -(-source.numel() // size))
    padded = torch.zeros(size * part, dtype=torch.bfloat16, device=source.device)
    padded[: source.numel()] = source
    given = torch.empty_like(padded)
    dist.all_to_all_single(given, padded, group=group)
    first, *others = torch.split(given.to(flat.dtype), part)
    for other in others:
        first = first + other
    sums = [torch.empty(part, dtype=torch.bfloat16, device=source.device) for _ in range(size)]
    dist.all_gather(sums, first.to(torch.bfloat16), group=group)
    return torch.cat(sums)[: source.numel()].to(flat.device, flat.dtype)


def fragments_due(step: int, every: int, fragments: int, *, last: bool) -> tuple[int, ...]:
    """The fragments to exchange after optimizer step `step`, counted from 1: each in its turn, and all at the end of an epoch or run."""
    if last:
        return tuple(range(fragments))
    period = every // fragments
    return () if step % period else ((step // period - 1) % fragments,)


def bounds(size: int, fragment: int, fragments: int) -> tuple[int, int]:
    """The range of the elements of a tensor that belongs to a fragment. Every tensor is cut alike, so fragments are equally large, and the
    same however layers are split into stages.
    """
    return size * fragment // fragments, size * (fragment + 1) // fragments
