"""Whether all workers are given the same. Each says in a few numbers what it was given; they travel with the sums of the step, a row for
each worker, so that they cost no message of their own.

Without a GPU the rows are read at once, before any weight changes. With one, in the step after, when they have long been computed:
nothing waits for them. All workers read after the same step, whatever they compute on, so that all of them raise, or none.

In a pipeline a difference between batches would leave stages waiting for messages that never come: there a user's batches are compared
before the step.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import WorkerError
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.startup.rendezvous import on_every_rank, short
from carrywave.parallel.world import all_gather_text

# What is compared, in the order of the columns, and what to do where it differs.
REMEDIES = {
    "batches": "give every worker the same whole batches, in the same steps; each takes its own lanes",
    "contents": "give every worker the same whole batch, it takes its own lanes",
    "optimizer": "set the learning rate and everything else of the optimizer alike on all workers",
    "weights": "change weights after the trainer was made on all workers alike, or on none",
}
BATCHES, CONTENTS, OPTIMIZER, WEIGHTS = range(len(REMEDIES))
HASHED_BYTES = 1 << 20  # of a tensor; of a longer one as much, from all over it
CHUNK = 1 << 20  # elements of a weight that one step looks at, at most
SEEN_AT_ONCE = 1 << 18  # elements of several small ones, on the CPU; on a GPU each is a launch
Piece = tuple[Callable[[], Tensor | None], int]  # a weight or a buffer, and where to begin in it


@dataclass(frozen=True)
class StepInputs:
    """What one worker was given for a step, in words; their checksums are compared."""

    batches: str
    optimizer: str
    contents: int  # a checksum itself

    @property
    def numbers(self) -> list[int]:
        """In the order of the columns, without the weights."""
        return [zlib.crc32(self.batches.encode()), self.contents, zlib.crc32(self.optimizer.encode())]


class Agreement:
    """Of the workers of one trainer. `held` are the parameters that this one holds, and `model` has the buffers."""

    def __init__(self, mesh: Mesh, held: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        self.mesh, self.device = mesh, mesh.device
        kinds = all_gather_text(mesh.world, _kind(mesh.device))
        self.at_once = not any(kind.startswith("cuda") for kind in kinds)
        # Other processors round otherwise: their weights differ in the last bits.
        self._looks = len(set(kinds)) == 1
        self._pieces = _pieces(held, model, SEEN_AT_ONCE if mesh.device.type == "cpu" else 1)
        self._steps = 0
        self._given: StepInputs | None = None
        self._on_device: list[Tensor] = []  # checksums of what lies on a GPU
        self._rows: tuple[Later, StepInputs | None] | None = None

    def before(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> None:
        """Note what the step is given. A user's first batches, and all of them in a pipeline, are compared before anything is computed."""
        if self.mesh.world.size == 1:
            return
        own = all(batch.whole is None for batch in batches)
        where = "; ".join(f"{tuple(b.inputs.shape[:2])}, epoch {b.epoch}, step {b.step}" for b in batches) if own else ""
        contents = 0
        self._on_device = []
        if own:
            for number, batch in enumerate(batches):
                contents = _checksum(batch, contents, self._steps + number)
                self._on_device += [_sum_of(t, weighted=True) for t in (batch.inputs, batch.targets) if t is not None and t.is_cuda]
        self._given = StepInputs(f"{len(batches)} batches of {where}" if own else f"{len(batches)} batches", _settings(optimizer), contents)
        if own and (not self._steps or self.mesh.plan.stages > 1):
            numbers = [*self._given.numbers, 0]
            rows = [torch.zeros(len(numbers), dtype=torch.int64) for _ in range(self.mesh.world.size)]
            dist.all_gather(rows, torch.tensor(numbers, dtype=torch.int64))
            self._compare(torch.stack(rows).tolist(), self._given, self._steps)

    def same_batch(self, batch: Batch | None) -> None:
        """Compare a batch that is evaluated, or that there is no more, before anything is computed. All workers must ask."""
        if self.mesh.world.size == 1:
            return
        what = "no further batch to evaluate" if batch is None else f"a batch of {tuple(batch.inputs.shape[:2])} to evaluate"
        contents = 0 if batch is None or batch.whole is not None else _checksum(batch, 0, self._steps)
        given = StepInputs(what, "", contents)
        rows = [torch.zeros(len(REMEDIES), dtype=torch.int64) for _ in range(self.mesh.world.size)]
        dist.all_gather(rows, torch.tensor([*given.numbers, 0], dtype=torch.int64))
        self._compare(torch.stack(rows).tolist(), given, self._steps)

    def marks(self) -> Tensor:
        """This worker's row."""
        if self.mesh.world.size == 1 or self._given is None:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        numbers = torch.tensor(self._given.numbers, dtype=torch.float64).to(self.device, non_blocking=True)
        for found in self._on_device:
            numbers[CONTENTS] += found
        return torch.cat([numbers, self._weights()[None]])

    def after(self, marks: Tensor) -> None:
        """The rows of all workers, once they are summed: compared now, or after the next step."""
        self._steps += 1
        if not marks.numel():
            return
        if self.at_once:
            self._compare(marks.tolist(), self._given, self._steps - 1)
            return
        self.settle()
        self._rows = Later(marks), self._given

    def settle(self) -> None:
        """Compare what has not been compared yet. All workers must ask at once."""
        if self._rows is None:
            return
        rows, given = self._rows
        self._rows = None
        self._compare(rows.read(), given, self._steps - 2)

    def _compare(self, rows: Sequence[Sequence[float]], given: StepInputs | None, step: int) -> None:
        stages = self.mesh.plan.stages
        for column, remedy in enumerate(REMEDIES.values()):
            for rank, row in enumerate(rows):
                # Stages hold other weights; replicas of a stage the same.
                first = rank % stages if column == WEIGHTS else 0
                if row[column] != rows[first][column]:
                    raise on_every_rank(
                        WorkerError(f"{self._difference(column, rank, first, given)} (step {step + 1} of the trainer); {remedy}")
                    )

    def _difference(self, column: int, rank: int, first: int, given: StepInputs | None) -> str:
        """In words. Every worker has found the same, and comes here."""
        if column == CONTENTS:
            return f"rank {rank} was given another batch than rank {first}"
        if column == WEIGHTS:
            return f"the weights of rank {rank} are not those of rank {first}"
        told = [
            json.loads(text)
            for text in all_gather_text(self.mesh.world, json.dumps([given.batches, given.optimizer] if given else ["", ""]))
        ]
        which = 0 if column == BATCHES else 1
        theirs, ours = _apart(told[rank][which], told[first][which])
        return f"rank {rank} {'was given' if column == BATCHES else 'has'} {theirs}, rank {first} {ours}"

    def _weights(self) -> Tensor:
        """A checksum of some of the weights, others at each step. Of whole numbers: their sum is the same in any order."""
        if not self._pieces or not self._looks:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (find, low) in enumerate(self._pieces[self._steps % len(self._pieces)]):
            found = find()
            if found is not None and not found.is_meta:
                # Each with a factor of its own: what one lacks another does not make up for. All are below 2**53.
                total = total + (number % 31 + 1) * _sum_of(found.detach().reshape(-1)[low : low + CHUNK])
        return total


def _pieces(held: Mapping[str, nn.Parameter], model: nn.Module, together: int) -> list[list[Piece]]:
    """All weights and buffers in groups, one of which each step looks at."""
    sized: list[tuple[int, Piece]] = [(p.numel(), (partial(_itself, p), low)) for p in held.values() for low in range(0, p.numel(), CHUNK)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.numel():
                # By name: a buffer may be set anew.
                sized.append((buffer.numel(), (partial(module._buffers.get, name), 0)))
    groups: list[list[Piece]] = []
    room = 0
    for size, piece in sized:
        if not groups or size > room:
            groups.append([])
            room = together
        groups[-1].append(piece)
        room -= size
    return groups


def _itself(parameter: Tensor) -> Tensor:
    return parameter


def _kind(device: torch.device) -> str:
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    # One number that was expanded counts as contiguous, and has no stride all the same.
    return flat.contiguous() if flat.numel() > 1 else flat.clone(memory_format=torch.contiguous_format)


def _sum_of(tensor: Tensor, *, weighted: bool = False) -> Tensor:
    """A checksum where the tensor lies, below 2**40; `weighted`: by place, so that the order counts."""
    words = _flat(tensor)
    words = words.view({8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[words.element_size()]).to(torch.int64)
    if weighted:
        words = words * (torch.arange(words.numel(), device=words.device) % 65521 + 1)
    return (words.sum() & ((1 << 40) - 1)).to(torch.float64)


def _checksum(batch: Batch, start: int, turn: int) -> int:
    """Of what a batch holds in the host's memory."""
    for tensor in (batch.inputs, batch.targets, batch.lengths, batch.fresh, batch.lanes):
        if tensor is None or tensor.device.type != "cpu":
            continue
        data = _flat(tensor)
        rows = -(-data.nbytes // HASHED_BYTES)
        # Of a long tensor every so-manieth element, others at each step.
        start = zlib.crc32((data if rows <= 1 else data[turn % rows :: rows].contiguous()).view(torch.uint8).numpy().data, start)
    return start


def _settings(optimizer: torch.optim.Optimizer) -> str:
    """Every number that an optimizer was given, group by group; a rate that lies on a GPU is left out, since reading it would wait."""
    groups = [
        ", ".join(f"{name} {_shown(value)}" for name, value in sorted(group.items()) if name != "params" and _readable(value))
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}, {'; '.join(groups)}"


def _shown(value: Any) -> str:
    return short(str(value.item() if isinstance(value, Tensor) else value))


def _readable(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() == 1
    return isinstance(value, int | float | bool | str | tuple | list | None.__class__)


def _apart(first: str, second: str) -> tuple[str, str]:
    """Where two lists of words differ."""
    ours, theirs = first.split(", "), second.split(", ")
    if len(ours) != len(theirs):
        return short(first), short(second)
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    return short(", ".join(a for a, _ in pairs)), short(", ".join(b for _, b in pairs))
