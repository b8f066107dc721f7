"""Bad numbers: NaN and infinity in the loss or in a gradient. On which worker and in which layer the first one arose, without a read
on the host and without a message of its own; and what becomes of a step that has them.

A step computes forward from the encoder over the layers to the head and its loss, and then back. What is bad makes everything after it
bad. So every worker says in one number what came first in that order: a layer whose carry is bad after the step (a bad output stays in
its lane, so the last one tells of all), the loss, or a layer with a bad gradient. The numbers travel with the other sums of the step,
a place for each rank, and the largest is the first in the order of computing:

    3 U - u    the output of unit u (of U: encoder, layers, head, whose output is the loss)
    U + 1 + u  the gradient of unit u, on this worker alone
    1 + u      the gradient of unit u, only after it was summed over workers
    0          nothing bad

Gradients that replicas add up are bad on all of them afterwards: a small one of each unit is looked at before.

The optimizer is told by its `found_inf`, and leaves parameters and its own state as they are, whatever `train.on_nan` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.model.encoders import Embedding, Numbers
from carrywave.model.model import Model
from carrywave.model.opaque_model import Whole
from carrywave.model.parameter_placement import unit_of
from carrywave.model.stage import Stage
from carrywave.parallel.world import World, all_gather_text
from carrywave.step.compute import BatchOutcome
from carrywave.step.gradients import Reducer, by_dtype, norms
from carrywave.step.reproducible.fixed_tree import Tree

MOST_IN_A_ROW = 10  # steps skipped one after the other, before the run stops
MOST_BACKS = 3  # times a run goes back to its last snapshot, before it stops
BACK_FACTOR = 0.5  # of the learning rate, each time
SMALL = 1 << 16  # elements of a gradient that is looked at before it is summed


@dataclass(frozen=True)
class ComputeOrder:
    """What a model computes one after the other, by name; the last one computes the loss."""

    names: tuple[str, ...]
    of: dict[str, int]  # the unit of each parameter

    @staticmethod
    def in_model(model: Model | Whole) -> ComputeOrder:
        """Encoder, layers and head; of a module of one piece the parameters, and at last the module itself."""
        own = [name for name, _ in model.named_parameters()]
        if isinstance(model, Whole):
            return ComputeOrder((*own, type(model.module).__name__), {name: number for number, name in enumerate(own)})
        names = ("encoder", *(f"lstm.l{layer}" for layer in range(model.lstm.num_layers)), "head")
        return ComputeOrder(names, {name: unit_of(name, model.units) for name in own})

    def forward(self, unit: int) -> int:
        """What is said of a bad output."""
        return 3 * len(self.names) - unit

    def backward(self, unit: int, *, summed: bool = False) -> int:
        """What is said of a bad gradient."""
        return 1 + unit + (0 if summed else len(self.names))

    def words(self, said: int, rank: int) -> str:
        """What a number says, as the subject of a sentence."""
        count = len(self.names)
        if said > 2 * count:
            unit = 3 * count - said
            what = "the loss that" if unit == count - 1 else "the output that"
            return f"{what} {self.names[unit]} computes on rank {rank}"
        if said > count:
            return f"the gradient of {self.names[said - count - 1]} on rank {rank}"
        return f"the gradient of {self.names[said - 1]}, summed over the replicas of rank {rank},"


@dataclass(frozen=True)
class Seen:
    """What a look at the steps since the look before it has found."""

    ago: int | None = None  # how many steps before the last one the first bad one was; None: all were good
    said: tuple[int, ...] = ()  # by each rank, of the first bad one
    bad: int = 0  # steps
    longest: int = 0  # the most of them one after the other, those before the last look among them
    in_a_row: int = 0  # up to the last step


class BadNumbers:
    """Watches the steps of one worker. All that it keeps of them is on the device, in one tensor that a recorded step updates in place."""

    def __init__(self, model: Model | Whole, stage: Stage | Whole, named: Sequence[tuple[str, nn.Parameter]], world: World) -> None:
        self.units = ComputeOrder.in_model(model)
        self.stage, self.world, self.named = stage, world, list(named)
        self.unit = {id(p): self.units.of[name] for name, p in named}
        # Steps; bad ones in a row, the most in a row, bad ones and the first one since the last look; what each rank said of that one.
        self.kept = torch.zeros(5 + world.size, dtype=torch.float64, device=world.device)
        self._numbers: dict[tuple[int, ...], Tensor] = {}
        self.entered: list[Tensor] = []

    @property
    def watched(self) -> list[nn.Parameter]:
        """The smallest parameter of each unit, whose gradient is looked at before it is summed: what comes from a bad one is bad too."""
        found: dict[int, nn.Parameter] = {}
        for _, parameter in sorted(self.named, key=lambda pair: pair[1].numel()):
            found.setdefault(self.unit[id(parameter)], parameter)
        return [parameter for parameter in found.values() if parameter.numel() <= SMALL]

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Within it, what an encoder of the user's own puts out is looked at. Ours put out what they are given, or rows of weights."""
        self.entered = []
        encoder = getattr(self.stage, "encoder", None)
        if not isinstance(encoder, nn.Module) or isinstance(encoder, Embedding | Numbers | torch.jit.ScriptModule):
            yield
            return

        def look(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.is_floating_point():
                self.entered += sizes([out.detach()])

        handle = encoder.register_forward_hook(look)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def say(
        self,
        counted: Sequence[Tensor],
        norms_of_grads: Tensor,
        outcomes: Sequence[BatchOutcome],
        score: Tensor,
        reducer: Reducer | Tree | None,
    ) -> Tensor:
        """What this worker says of its step, a float64 scalar. `counted` are parameters, `score` is its own loss and count."""
        units, last = self.units, len(self.units.names) - 1
        numbers = [units.backward(self.unit[id(p)], summed=reducer is not None and reducer.reduces(p)) for p in counted]
        numbers += [units.forward(last)] * score.numel()
        # Squares: of a gradient in float64 they may be infinite where the norm is not, and so is the norm of all.
        values = [norms_of_grads.square(), score]
        looked: list[tuple[int, Tensor]] = []
        if reducer is not None:
            before = ((units.backward(self.unit[id(p)]), reducer.local.get(id(p))) for _, p in self.named)
            looked += [(number, grad) for number, grad in before if grad is not None]
        for outcome in outcomes:
            pairs = zip(self.stage.layers, outcome.state.carries, strict=True)
            looked += [(units.forward(layer + 1), part) for layer, carry in pairs for part in carry]
        looked += [(units.forward(0), norm) for norm in self.entered]
        if looked:
            values.append(torch.stack(sizes([tensor for _, tensor in looked])))
            numbers += [number for number, _ in looked]
        all_of_them = torch.cat(values)
        # Of a number that is none the difference from itself is not zero.
        bad = all_of_them - all_of_them != 0
        return (bad * self._on_device(tuple(numbers))).amax()

    def _on_device(self, numbers: tuple[int, ...]) -> Tensor:
        """Made once for each list of what there is to look at, since a step that is being recorded cannot copy from the host."""
        if numbers not in self._numbers:
            self._numbers[numbers] = torch.tensor(numbers, dtype=torch.float64, device=self.world.device)
        return self._numbers[numbers]

    @torch.no_grad()
    def note(self, finite: Tensor, said: Tensor) -> None:
        """Count a step, and keep what all workers said of the first bad one."""
        bad = (~finite).to(torch.float64)
        steps, in_a_row, longest, bad_steps = self.kept[:4].unbind()
        in_a_row = (in_a_row + 1) * bad
        counts = torch.stack([steps + 1, in_a_row, torch.maximum(longest, in_a_row), bad_steps + bad])
        is_first = bad * (self.kept[4] == 0) > 0
        first = torch.where(is_first, torch.cat([counts[:1], said]), self.kept[4:])
        self.kept.copy_(torch.cat([counts, first]))

    def look(self) -> Seen:
        """Read on the host what was noted since the last look: the same on every worker that looks after the same step."""
        steps, in_a_row, longest, bad, first, *said = (int(number) for number in self.kept.tolist())
        if not first:
            return Seen(in_a_row=in_a_row)
        self.kept[2:] = 0
        return Seen(steps - first, tuple(said), bad, longest, in_a_row)

    def forget(self, in_a_row: int = 0) -> None:
        """Start anew, with so many bad steps in a row behind."""
        self.kept.zero_()
        self.kept[1] = in_a_row

    def cause(self, seen: Seen, *, weights: bool) -> str:
        """The first bad number as the subject of a sentence. All workers must ask.

        `weights`: whether a bad step leaves the weights alone, so that those which are bad were so before it.
        """
        units, count = self.units, len(self.units.names)
        said = max(seen.said, default=0)
        found = units.words(said, seen.said.index(said)) if said else "the loss or its gradient"
        # A weight is there before what its unit puts out, and one that no output shows is still before every gradient.
        own = self._bad_weight() if weights else ""
        named = [(units.of[name], rank, name) for rank, name in enumerate(all_gather_text(self.world, own)) if name]
        if named:
            unit, rank, name = min(named)
            if said <= 2 * count or unit <= 3 * count - said:
                return f"the weight {name} of {units.names[unit]} on rank {rank}"
        return found

    def _bad_weight(self) -> str:
        """The name of the first parameter here, in the order of computing, that is not finite; nothing where all are."""
        bad = [(self.units.of[name], name) for name, p in self.named if not bool(p.detach().isfinite().all())]
        return min(bad)[1] if bad else ""


@torch.no_grad()
def sizes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A float64 scalar for each, which is finite where all of its elements are; of a tensor without any it is zero."""
    groups = by_dtype(tensors)
    found = dict(zip((id(tensor) for group in groups for tensor in group), norms(tensors).unbind(), strict=True))
    return [found[id(tensor)] for tensor in tensors]


@torch.no_grad()
def mended(left: Sequence[Tensor], start: Sequence[Tensor]) -> list[Tensor]:
    """The carries of a step's end, `h` and `c` of each layer; lanes of a layer that are bad begin anew, and do not spoil the next step."""
    result: list[Tensor] = []
    for number in range(0, len(left), 2):
        pair = left[number : number + 2]
        bad_B = torch.stack([(part - part != 0).any(dim=0).any(dim=-1) for part in pair]).any(dim=0)
        begun = start[number : number + 2]
        result += [torch.where(bad_B[None, :, None], new.to(old.dtype), old) for old, new in zip(pair, begun, strict=True)]
    return result
