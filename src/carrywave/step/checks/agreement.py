"""Checks that all workers were given the same inputs. Each worker summarizes its inputs as a few checksums; these travel with the step's
all-reduced sums, one row per worker, so they cost no extra message.

Without a GPU, the rows are compared at once, before any weight changes. With one, they are compared in the following step, when they have
long been computed and nothing has to wait for them. All workers compare after the same step, whatever device they use, so either all of
them raise or none does.

A user's first batches are compared before anything is computed, because workers of a pipeline would wait for messages that never come.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import WorkerError, short
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.rows import Exchange, gather_rows
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import all_gather_text

# What is compared, in column order, and how to fix a mismatch.
REMEDIES = {
    "batches": "pass the same whole batches to every worker, at the same steps; each takes its own lanes",
    "contents": "pass the same whole batch to every worker; each takes its own lanes",
    "optimizer": "use the same learning rate and other optimizer settings on all workers",
    "weights": "once the trainer is created, change weights in the same way on all workers, or not at all",
}
BATCHES, CONTENTS, OPTIMIZER, WEIGHTS = range(len(REMEDIES))
HASHED_BYTES = 1 << 20  # hashed per tensor; a longer one is sampled evenly down to this size
CHUNK = 1 << 20  # most elements of one weight that a step checks
SEEN_AT_ONCE = 1 << 18  # elements of small weights checked together on the CPU; on a GPU each costs a launch, so one at a time
_BELOW = (1 << 40) - 1
Piece = tuple[Callable[[], Tensor | None], int]  # getter of a weight or buffer, and the first element to check


@dataclass(frozen=True)
class WorkerInputs:
    """A description of what one worker was given for a step; checksums of the descriptions are compared."""

    batches: str
    optimizer: str
    contents: int  # already a checksum

    @property
    def numbers(self) -> list[int]:
        """Checksums in column order, without the weights."""
        return [zlib.crc32(self.batches.encode()), self.contents, zlib.crc32(self.optimizer.encode())]


class Agreement:
    """Compares the inputs of one trainer's workers. `held` are the parameters that this worker holds; buffers are taken from `model`."""

    def __init__(self, mesh: Mesh, held: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        self.mesh, self.device = mesh, mesh.device
        kinds = all_gather_text(mesh.world, _kind(mesh.device))
        self.at_once = not any(kind.startswith("cuda") for kind in kinds)
        # Different processors round differently, so their weights may differ in the last bits.
        self._looks = len(set(kinds)) == 1
        self._pieces = _pieces(held, model, SEEN_AT_ONCE if mesh.device.type == "cpu" else 1)
        self._steps = 0
        self._given: WorkerInputs | None = None
        self._values: list[dict[str, Any]] | None = None  # the optimizer's settings, and the same in words
        self._worded = ""
        self._on_device: list[Tensor] = []  # checksums of tensors on a GPU
        self._rows: tuple[Later, WorkerInputs | None] | None = None

    def before(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer, earlier: int = 0) -> None:
        """Record the step's inputs. A user's first batches are compared before anything is computed.

        `earlier`: batches that the trainer has counted.
        """
        if self.mesh.world.size == 1:
            return
        own = all(batch.part_of is None for batch in batches)
        where = " and ".join(f"{_size(b)}, epoch {b.epoch}, step {b.step}" for b in batches) if own else ""
        contents = 0
        self._on_device = []
        if own:
            for number, batch in enumerate(batches):
                contents = _checksum(batch, contents, self._steps + number)
                given = (batch.inputs, batch.targets, batch.history, batch.resets, batch.weights)
                self._on_device += [sum_of(tensor, weighted=True) for tensor in given if tensor is not None and tensor.is_cuda]
        many = f"{len(batches)} batch{'es' * (len(batches) > 1)}"
        what = f"{many} of {where}, batch {earlier + 1} of the loop" if own else many
        self._given = WorkerInputs(what, self._settings(optimizer), contents)
        if own and not self._steps:
            self._gather(self._given)

    def unbroken(self, *, broken: bool) -> None:
        """Raise on all ranks if a step has ended halfway on some of them, whatever the others were about to do."""
        if self.mesh.world.size > 1:
            self._gather(WorkerInputs("nothing (its last step ended halfway)" if broken else "no batch", "", 0))
        if broken:  # on every rank
            raise WorkerError(
                "an earlier step of these workers ended halfway, so they no longer agree; create a new Trainer on all workers, and "
                "load into it what trainer.state_dict() returned before"
            )

    def _gather(self, given: WorkerInputs) -> None:
        """Compare a row of every rank. Collective."""
        world = self.mesh.world
        self._compare(gather_rows(Exchange.INPUTS, [*given.numbers, 0], world.size, world.group), given, self._steps)

    def same_batch(self, batch: Batch | None) -> None:
        """Compare the next batch to evaluate (None: there are no more) before anything is computed. Collective: every rank must call it."""
        if self.mesh.world.size == 1:
            return
        what = "no more batches to evaluate" if batch is None else f"a batch of {_size(batch)} to evaluate"
        contents = 0 if batch is None or batch.part_of is not None else _checksum(batch, 0, self._steps)
        self._gather(WorkerInputs(what, "", contents))

    @property
    def columns(self) -> int:
        """The number of checksums in a row; none with a single worker."""
        return 0 if self.mesh.world.size == 1 else len(REMEDIES)

    def marks(self) -> Tensor:
        """This worker's row of checksums."""
        if self.mesh.world.size == 1 or self._given is None:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        numbers = torch.tensor(self._given.numbers, dtype=torch.float64).to(self.device, non_blocking=True)
        for found in self._on_device:
            numbers[CONTENTS] += found
        return torch.cat([numbers, self._weights()[None]])

    def after(self, marks: Tensor) -> None:
        """Take the rows of all workers, once all-reduced; compare them now, or after the next step."""
        self._steps += 1
        if not marks.numel():
            return
        if self.at_once:
            self._compare(marks.tolist(), self._given, self._steps - 1)
            return
        self.settle()
        self._rows = Later(marks), self._given

    def settle(self) -> None:
        """Compare any rows not compared yet. Collective: every rank must call it."""
        if self._rows is None:
            return
        rows, given = self._rows
        self._rows = None
        self._compare(rows.read(), given, self._steps - 2)

    def _compare(self, rows: Sequence[Sequence[float]], given: WorkerInputs | None, step: int) -> None:
        at = self.mesh.ranks
        for column, remedy in enumerate(REMEDIES.values()):
            for rank, row in enumerate(rows):
                # Stages hold different weights; replicas of a stage hold the same.
                first = at[at.index(rank) % self.mesh.plan.stages] if column == WEIGHTS else 0
                if row[column] != rows[first][column]:
                    raise on_every_rank(
                        WorkerError(f"{self._difference(column, rank, first, given)} (step {step + 1} of the trainer); {remedy}")
                    )

    def _difference(self, column: int, rank: int, first: int, given: WorkerInputs | None) -> str:
        """Describe the mismatch. Every worker has found the same one, so all of them reach this collective."""
        if column == CONTENTS:
            return f"rank {rank} got a different batch than rank {first}"
        if column == WEIGHTS:
            return f"the weights of rank {rank} differ from those of rank {first}"
        words = [given.batches, given.optimizer] if given else ["", ""]
        told = [json.loads(text) for text in all_gather_text(self.mesh.world, json.dumps(words))]
        which = 0 if column == BATCHES else 1
        theirs, ours = _apart(told[rank][which], told[first][which])
        verb = "got" if column == BATCHES else "has"
        return f"rank {rank} {verb} {theirs}, but rank {first} {verb} {ours}"

    def _settings(self, optimizer: torch.optim.Optimizer) -> str:
        """The optimizer's settings in words, put together again only if one has changed."""
        values = _values(optimizer)
        if values != self._values:
            self._values, self._worded = values, _worded(optimizer, values)
        return self._worded

    def _weights(self) -> Tensor:
        """A checksum of some of the weights, different ones at each step. It sums integers, so the order of summation does not matter."""
        if not self._pieces or not self._looks:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (find, low) in enumerate(self._pieces[self._steps % len(self._pieces)]):
            found = find()
            if found is not None and not found.is_meta:
                # A different factor for each piece keeps differences from cancelling. All sums are below 2**53, so exact in float64.
                total = total + (number % 31 + 1) * sum_of(found.detach().reshape(-1)[low : low + CHUNK])
        return total


def _pieces(held: Mapping[str, nn.Parameter], model: nn.Module, together: int) -> list[list[Piece]]:
    """Group all weights and buffers; each step checks one group."""
    sized: list[tuple[int, Piece]] = [(p.numel(), (partial(_itself, p), low)) for p in held.values() for low in range(0, p.numel(), CHUNK)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.numel():
                # Looked up by name, because a buffer may be reassigned.
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


def _size(batch: Batch) -> str:
    return f"{batch.inputs.shape[0]} steps x {batch.inputs.shape[1]} lanes"


def _itself(parameter: Tensor) -> Tensor:
    return parameter


def _kind(device: torch.device) -> str:
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    # An expanded tensor of one element counts as contiguous even with stride 0, so it must be cloned.
    return flat.contiguous() if flat.numel() > 1 else flat.clone(memory_format=torch.contiguous_format)


def sum_of(tensor: Tensor, *, weighted: bool = False) -> Tensor:
    """A checksum below 2**40, computed on the tensor's device; `weighted` by position, so that the order of the elements matters."""
    words = _flat(tensor)
    if words.nbytes % 8 == 0 and not weighted:
        if words.storage_offset() * words.element_size() % 8:
            words = words.clone()
        total = words.view(torch.int64).sum()  # modulo 2**64
        return ((total ^ (total >> 24)) & _BELOW).to(torch.float64)  # bits 40 to 63 count too
    words = words.view({8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[words.element_size()]).to(torch.int64)
    if weighted:
        words = words * (torch.arange(words.numel(), device=words.device) % 65521 + 1)
    return (words.sum() & _BELOW).to(torch.float64)


def _checksum(batch: Batch, start: int, turn: int) -> int:
    """Checksum of the parts of a batch that are in host memory, continuing from `start`."""
    for tensor in (batch.inputs, batch.targets, batch.lengths, batch.fresh, batch.lanes, batch.history, batch.resets, batch.weights):
        if tensor is None or tensor.device.type != "cpu":
            continue
        data = _flat(tensor)
        rows = -(-data.nbytes // HASHED_BYTES)
        # Sample a long tensor with a stride, starting at a different element each step.
        start = zlib.crc32((data if rows <= 1 else data[turn % rows :: rows].contiguous()).view(torch.uint8).numpy().data, start)
    return start


def _values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Every setting of the optimizer, by group; a learning rate on a GPU is left out, because reading it would block."""
    return [
        {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params" and _readable(value)
        }
        for group in optimizer.param_groups
    ]


def _worded(optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Any]]) -> str:
    groups = [", ".join(f"{name} {short(str(value))}" for name, value in sorted(group.items())) for group in values]
    return f"{type(optimizer).__name__}, {' and '.join(groups)}"


def _readable(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() == 1
    return isinstance(value, int | float | bool | str | tuple | list | None.__class__)


def _apart(first: str, second: str) -> tuple[str, str]:
    """The entries in which two comma-separated lists differ."""
    ours, theirs = first.split(", "), second.split(", ")
    if len(ours) != len(theirs):
        return short(first), short(second)
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    return short(", ".join(a for a, _ in pairs)), short(", ".join(b for _, b in pairs))
