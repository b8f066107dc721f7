"""Checks that all workers were given the same inputs. Each worker summarizes its inputs as a few checksums; these travel with the step's
all-reduced sums, one row per worker, so they cost no extra message.

Without a GPU, the rows are compared at once, before any weight changes. With one, they are compared in the following step, when they have
long been computed and nothing has to wait for them. All workers compare after the same step, whatever device they use, so either all of
them raise or none does.

A user's first batches are compared before anything is computed. In a pipeline all of them are, because workers would wait for messages that
never come; our own loop gives all workers the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from carrywave.data.batch import Batch
from carrywave.errors import WorkerError, short
from carrywave.parallel.delayed_read import Later
from carrywave.parallel.mesh import Mesh
from carrywave.parallel.rows import Exchange, gather_rows
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import all_gather_text

# How to fix a mismatch, by the columns of a row.
REMEDIES = (
    "pass the same whole batches to every worker, at the same steps; each takes its own lanes",
    "pass the same whole batch to every worker; each takes its own lanes",
    "use the same learning rate and other optimizer settings on all workers",
    "once the trainer is created, change weights in the same way on all workers, or not at all",
)
BATCHES, CONTENTS, OPTIMIZER, WEIGHTS = range(len(REMEDIES))
HASHED_BYTES = 1 << 20  # hashed per tensor; a longer one is sampled evenly down to this size
CHUNK = 1 << 20  # most elements of one weight that a step checks
_BELOW = (1 << 40) - 1
Piece = tuple[Mapping[str, Tensor | None], str, int]  # where a weight or buffer is, its name there, and the first element to check


class WorkerInputs(NamedTuple):
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
        self._pieces = _pieces(held, model)
        self._steps = 0
        self._given: WorkerInputs | None = None
        self._settings: tuple[tuple[object, ...], str] = ((), "")  # of the optimizer, and in words
        self._rows: tuple[Later, WorkerInputs | None] | None = None

    def before(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer, earlier: int = 0) -> None:
        """Record the step's inputs. A user's first batches, and in a pipeline all of them, are compared before anything is computed.

        `earlier`: batches that the trainer has counted.
        """
        if self.mesh.world.size == 1:
            return
        own = all(batch.part_of is None for batch in batches)
        where, contents = "", 0
        if own:
            where = (
                " of " + " and ".join(f"{_size(b)}, epoch {b.epoch}, step {b.step}" for b in batches) + f", batch {earlier + 1} of the loop"
            )
            for number, batch in enumerate(batches):
                contents = _checksum(batch, contents, self._steps + number)
        self._given = WorkerInputs(f"{len(batches)} batch{'es' * (len(batches) > 1)}{where}", self._settings_of(optimizer), contents)
        if own and (not self._steps or self.mesh.plan.stages > 1):
            self._gather(self._given)

    def _settings_of(self, optimizer: torch.optim.Optimizer) -> str:
        """The optimizer's settings in words; a learning rate on a GPU is left out, because reading it would block."""
        values: list[tuple[str, object]] = []
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, Tensor) and not value.is_cuda:
                    value = float(value)
                if isinstance(value, int | float | bool | str | tuple | NoneType) and name != "params":
                    values.append((name, value))
        if self._settings[0] != (found := tuple(values)):
            self._settings = found, ", ".join([type(optimizer).__name__, *(f"{name} {value}" for name, value in values)])
        return self._settings[1]

    def no_batch(self) -> None:
        """Raise on all ranks if some take a step while others do anything else."""
        if self.mesh.world.size > 1:
            self._gather(WorkerInputs("no batch", "", 0))

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
        return len(REMEDIES) if self.mesh.world.size > 1 else 0

    def marks(self, before: Sequence[float]) -> Tensor:
        """This worker's row of checksums, behind other numbers."""
        assert self._given is not None
        marks = torch.tensor([*before, *self._given.numbers, 0.0], dtype=torch.float64).to(self.device, non_blocking=True)
        row = marks[len(before) :]
        for store, name, low in self._pieces_now():
            tensor = store.get(name)
            if tensor is not None:
                # A different factor for each piece keeps differences from cancelling; everything is below 2**53, so exact in float64.
                row[WEIGHTS] = (row[WEIGHTS] * 31 + sum_of(tensor.detach().reshape(-1)[low : low + CHUNK])) % (_BELOW + 1)
        return marks

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
        for column, remedy in enumerate(REMEDIES):
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
        words = "" if given is None else given.batches if column == BATCHES else given.optimizer
        told = all_gather_text(self.mesh.world, words)
        theirs, ours = _apart(told[rank], told[first])
        verb = "got" if column == BATCHES else "has"
        return f"rank {rank} {verb} {theirs}, but rank {first} {verb} {ours}"

    def _pieces_now(self) -> Sequence[Piece]:
        """The weights and buffers to check: all of them at steps 1, 2, 4, 8 and so on, one in its turn at any other."""
        step = self._steps + 1
        if not self._pieces or not self._looks:
            return []
        return self._pieces if step & (step - 1) == 0 else [self._pieces[step % len(self._pieces)]]


def _pieces(held: Mapping[str, nn.Parameter], model: nn.Module) -> list[Piece]:
    """All weights and buffers, in pieces of at most `CHUNK`. They are looked up by name, because a buffer may be reassigned."""
    places: list[tuple[Mapping[str, Tensor | None], str]] = [(held, name) for name in held]
    # TorchScript's buffers are made anew on every access.
    places += [(kept, name) for module in model.modules() if isinstance(kept := module._buffers, dict) for name in kept]
    pieces: list[Piece] = []
    for store, name in places:
        tensor = store[name]
        pieces += [(store, name, low) for low in range(0, 0 if tensor is None or tensor.is_meta else tensor.numel(), CHUNK)]
    return pieces


def _size(batch: Batch) -> str:
    return f"{batch.inputs.shape[0]} steps x {batch.inputs.shape[1]} lanes"


def _kind(device: torch.device) -> str:
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    # An expanded tensor of one element counts as contiguous even with stride 0, so it must be cloned.
    return flat.contiguous() if flat.numel() > 1 else flat.clone(memory_format=torch.contiguous_format)


def sum_of(tensor: Tensor) -> Tensor:
    """A checksum below 2**40, computed on the tensor's device."""
    words = _flat(tensor)
    if words.nbytes % 8 == 0:
        words = words.clone() if words.storage_offset() * words.element_size() % 8 else words
        total = words.view(torch.int64).sum()  # modulo 2**64
        return ((total ^ (total >> 24)) & _BELOW).to(torch.float64)  # bits 40 to 63 count too
    words = words.view({8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[words.element_size()]).to(torch.int64)
    return (words.sum() & _BELOW).to(torch.float64)


def _checksum(batch: Batch, start: int, turn: int) -> int:
    """Checksum of the parts of a batch that are in host memory, continuing from `start`; on a GPU it would be waited for."""
    for tensor in (batch.inputs, batch.targets, batch.lengths, batch.fresh, batch.lanes, batch.history, batch.resets, batch.weights):
        if tensor is None or tensor.device.type != "cpu":
            continue
        data = _flat(tensor)
        rows = -(-data.nbytes // HASHED_BYTES)
        # Sample a long tensor with a stride, starting at a different element each step.
        start = zlib.crc32((data if rows <= 1 else data[turn % rows :: rows].contiguous()).view(torch.uint8).numpy().data, start)
    return start


def _apart(ours: str, theirs: str) -> tuple[str, str]:
    """The first entries in which two comma-separated lists differ."""
    pairs = zip_longest(ours.split(", "), theirs.split(", "), fillvalue="nothing more")
    return next((short(one), short(other)) for one, other in pairs if one != other)
