"""Between a running loop and its snapshots: what of it each worker writes, and how a loop goes on from one.

Replicas hold the same parameters and optimizer, so each writes a share of them, about equal in bytes; what several stages hold is
written by the first of them. Each worker writes the carry of its own layers and lanes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carrywave.errors import Diverged, RunError, UserError, option
from carrywave.model.holding import homes
from carrywave.model.model import Model
from carrywave.model.state import State
from carrywave.parallel.world import World, exchange, together
from carrywave.spec.spec import Spec
from carrywave.train import optimizer as optimizers
from carrywave.train.durable import Form, form_of
from carrywave.train.loop import Loop
from carrywave.train.manifest import Manifest
from carrywave.train.run import Run
from carrywave.train.snapshot import Groups, Stored, load_weights, mend_best, open_stored, ranged
from carrywave.train.taking import tensors_of
from carrywave.train.trainer import Trainer
from carrywave.train.trainer_state import carry_state, carry_tensors
from carrywave.train.watch import Watcher
from carrywave.train.writer import Writer

# Of train, when a run is resumed.
MAY_CHANGE = ("epochs", "max_steps", "early_stop", "evaluate_every", "log_every", "keep", "snapshot_every", "on_nan")
BATCH = ("batch.lanes", "batch.steps", "batch.tokens")  # chosen to suit the data where they are left out
AFTER_MISTAKE_SECONDS = 60.0
AFTER_FAULT_SECONDS = 2.0  # another worker may be gone, and the launcher waits to start anew


@dataclass(frozen=True)
class Data:
    """What a run is trained on."""

    fingerprint: str  # of all that was read, and how
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 by part, where it is a file

    def changed(self, meta: Mapping[str, Any], spec: Spec) -> list[str]:
        """The names of the files that are not what they were at a snapshot; of all, where that is not known."""
        names = {part: name for part in ("train", "valid", "test") if (name := getattr(spec.data, part))}
        before = meta.get("files")
        if not isinstance(before, dict):
            return list(names.values())
        differ = [name for part, name in names.items() if before.get(part) != self.files.get(part)]
        return differ or list(names.values())


class Keeper:
    """Writes the snapshots of a run. A failure to write one is said, and the run goes on; at the end of the run it is an error."""

    def __init__(self, world: World, folder: Run, data: Data, watch: Watcher) -> None:
        self.world, self.folder, self.data, self.watch = world, folder, data, watch
        self.writer = Writer(world, folder.snapshots)

    def __call__(self, loop: Loop, final: bool) -> None:
        """Begin a snapshot of the loop as it stands between two steps; a final one is whole on the disk when this returns."""
        self.settle()
        at = loop.progress
        groups = part_of(loop.trainer, loop.spec.lanes)
        meta = None
        if self.world.rank == 0:
            metrics_bytes, timing_bytes, metrics_sha256 = loop.folder.sizes()
            meta = {
                "progress": loop.numbers(),
                "spec": loop.spec.model_dump(mode="json"),
                "fingerprint": self.data.fingerprint,
                "files": dict(self.data.files),
                "metrics_bytes": metrics_bytes,
                "timing_bytes": timing_bytes,
                "metrics_sha256": metrics_sha256,
            }
            groups["extra"] = {f"loop/{name}": tensor for name, tensor in loop.tensors().items()}
            if loop.trainer.scaler is not None:
                groups["extra"] |= {f"scaler/{name}": tensor for name, tensor in loop.trainer.scaler.tensors().items()}
        name = f"step-{at.step:08d}"
        best = at.best_step == at.step
        self.writer.begin(name, groups, meta, keep=loop.spec.train.keep, best=best, before=loop.folder.sync)
        if final:
            self.settle(final=True)

    def settle(self, *, final: bool = False) -> None:
        """Wait for the snapshot that is being written; say, or where it was the last one raise, what kept it from being written."""
        failure = self.writer.settle()
        if failure is None:
            return
        if final or isinstance(failure, Diverged):
            raise failure
        self.watch.say(f"{str(failure).partition('; ')[0]}; the run goes on, and the snapshot before it is kept")

    def go_back(self, loop: Loop) -> None:
        """Put a loop back to the last snapshot. One with bad weights that was being written is none."""
        with suppress(Diverged):
            self.settle()
        go_on(loop, read_last(self.world, self.folder), self.data)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """When the run fails, a snapshot that is being written has a little time to become whole."""
        try:
            yield
        except Exception as error:
            lost = self.writer.close(AFTER_MISTAKE_SECONDS if isinstance(error, UserError) else AFTER_FAULT_SECONDS)
            if lost is not None:  # beside what ended the run: it goes on from an older snapshot than one would think
                self.watch.say(f"{lost.partition('; ')[0]}; the snapshot before it is kept")
            raise


def part_of(trainer: Trainer, lanes: int) -> Groups:
    """What this worker writes of a snapshot: its share of the parameters and of the optimizer, and the carry that it holds."""
    own = _owned(trainer)
    parameters = {name: tensor for name, tensor in trainer.parameters().items() if name in own}
    state = optimizers.state_tensors(trainer.optimizer, [(name, p) for name, p in trainer.named if name in own])
    groups: Groups = {"parameters": parameters, "optimizer": state}
    mine = _dealt(groups, trainer.mesh.replica, trainer.plan.replicas)
    low, high = trainer.mesh.share().bounds(lanes)
    carry = carry_tensors(trainer.state, trainer.stage.layers) if trainer.keep_state else {}
    return mine | {"carry": {ranged(name, low, high): tensor for name, tensor in carry.items()}}


def _owned(trainer: Trainer) -> Collection[str]:
    """The tensors that this stage is the first to hold."""
    model, plan = trainer.model, trainer.plan
    if not isinstance(model, Model):
        return trainer.parameters().keys()
    edges = plan.edges(model.units)
    held_by_all = {model.units - 1} if plan.shares_head else set()

    def first(units: Collection[int]) -> int:
        return 0 if held_by_all & set(units) else sum(min(units) >= edge for edge in edges[1:-1])

    return {name for name, units in homes(model).items() if first(units) == trainer.mesh.stage}


def _dealt(groups: Groups, index: int, of: int) -> Groups:
    """One of several shares, about equal in bytes. A function of names and sizes alone: all who hold the same deal alike."""
    items = [(tensor.nbytes, group, name) for group, tensors in groups.items() for name, tensor in tensors.items()]
    loads = [0] * of
    mine: set[tuple[str, str]] = set()
    for num_bytes, group, name in sorted(items, key=lambda item: (-item[0], *item[1:])):
        least = loads.index(min(loads))
        loads[least] += num_bytes
        if least == index:
            mine.add((group, name))
    return {group: {name: tensor for name, tensor in tensors.items() if (group, name) in mine} for group, tensors in groups.items()}


def read_last(world: World, folder: Run) -> Stored:
    """The last snapshot of a run, on every worker."""
    found = ""
    with together(world, for_all_of_us=True):
        if world.rank == 0:
            found = json.dumps(open_stored(folder.snapshots).told())
    return hear(world, json.loads(exchange(world, found)[0]))


def hear(world: World, told: Sequence[Any]) -> Stored:
    """A snapshot whose manifest rank 0 has read and told. Its files are shared out, and every byte of them is checked."""
    stored = Stored(Path(told[0]), Manifest.of(told[1], Path(told[0])))
    with together(world, for_all_of_us=True, patient=True):
        if not stored.folder.is_dir():
            raise RunError(
                f"{stored.folder} is not seen by rank {world.rank}; give {option('run')} a folder on a file system that all hosts share"
            )
        stored.verify(world.rank, world.size)
    return stored


def go_on(loop: Loop, stored: Stored, data: Data) -> None:
    """Put a loop where a snapshot left off, and cut its logs back to it. Each worker reads its own part."""
    meta, trainer, world = stored.meta, loop.trainer, loop.trainer.mesh.world
    with together(world, for_all_of_us=True, patient=True), _sound():
        if meta["fingerprint"] != data.fingerprint:
            files = ", ".join(data.changed(meta, loop.spec))
            of = f" ({files})" if files else ""
            raise RunError(
                f"the data has changed since the snapshot was written{of}; put the old data back, or start a new run from its weights"
            )
        take_up(trainer, stored, loop.spec.lanes)
        extra = stored.read("extra", stored.manifest.forms("extra"))
        if trainer.scaler is not None:
            trainer.scaler.load(_under("scaler/", extra))
        loop.restore(meta["progress"], _under("loop/", extra))
        noted = meta["metrics_bytes"], meta["timing_bytes"], meta.get("metrics_sha256")  # which older snapshots do not have
        loop.folder.cut_back(*noted, step=loop.progress.step)
        if world.rank == 0:
            mend_best(stored)


def take_up(trainer: Trainer, stored: Stored, lanes: int) -> None:
    """Give a trainer its part of a snapshot: the parameters, the optimizer's state and the carry that it holds."""
    own = trainer.parameters()
    # All that the manifest tells is checked before anything is read.
    check_forms(own, stored.manifest.forms("parameters"), "the snapshot", whole=tensors_of(trainer.model).keys())
    state_names = _own_state_names(trainer, stored)
    trainer.state = own_state(stored, trainer, lanes)
    load_parameters(own, stored.read("parameters", own), "the snapshot")
    optimizers.load_state(trainer.optimizer, trainer.named, stored.read("optimizer", state_names))


def _own_state_names(trainer: Trainer, stored: Stored) -> list[str]:
    """The optimizer's tensors that this worker takes up: all but those of parameters that other workers hold. None is too large."""
    held = {name: p.numel() for name, p in trainer.named}
    elsewhere = {name for name, _ in trainer.model.named_parameters()} - held.keys()
    found: list[str] = []
    for name, (_, shape) in stored.manifest.forms("optimizer").items():
        parameter = name.partition("/")[2]
        if parameter in elsewhere:
            continue
        if torch.Size(shape).numel() > max(1, held.get(parameter, 1)):
            raise RunError(
                f"the snapshot's optimizer state {name} is {list(shape)}, which fits no parameter of this run; "
                "resume with the train.optimizer, train.precision and model it was made with"
            )
        found.append(name)
    return found


def own_state(stored: Stored, trainer: Trainer, lanes: int) -> State | None:
    """This worker's lanes and layers of the carry in a snapshot."""
    forms = stored.manifest.forms("carry")
    if not forms:
        return None
    wanted = carry_tensors(trainer.stage.start(1, trainer.device), trainer.stage.layers)
    for name, one in wanted.items():
        pieces = stored.pieces(name)
        if pieces[-1][1] != lanes:
            raise RunError(f"the snapshot holds the carry of {pieces[-1][1]} lanes, and batch.lanes={lanes}; use the spec it was made with")
        for start, end, key in pieces:
            shape = forms[key][1]
            if shape != (one.shape[0], end - start, *one.shape[2:]):
                raise RunError(f"the snapshot's carry {key} is {list(shape)}, which is of another model; use the spec it was made with")
    low, high = trainer.mesh.share().bounds(lanes)
    return carry_state({name: stored.lanes(name, low, high) for name in wanted}, trainer.device, trainer.stage.layers)


def spec_of(snapshot: Stored) -> Spec:
    """The spec that a snapshot was made with."""
    with _sound():
        return Spec.model_validate(snapshot.meta["spec"])


def check_same(asked: Spec, spec: Spec) -> None:
    """Refuse to resume with a spec that asks for another answer than the run's; how the work is split, and when it ends, may change."""
    before, now = spec.model_dump(mode="json"), asked.model_dump(mode="json")
    for section in ("task", "data", "model", "batch", "train"):
        if section == "task" or not isinstance(now[section], dict):
            pairs = [(section, before[section], now[section])]
        else:
            pairs = [(f"{section}.{name}", before[section].get(name), value) for name, value in now[section].items()]
        for name, old, new in pairs:
            if new is None and name in BATCH:
                continue  # left out, it stays what it was
            if old != new and name.removeprefix("train.") not in MAY_CHANGE and name != "data.cache":
                raise RunError(
                    f"the run was started with {name}={old}, not {new}; leave it as it was, or start a new run with {option('init')}"
                )


def with_batch_of(asked: Spec, snapshot: Stored) -> Spec:
    """The spec with the batch of a snapshot where it names none: what was chosen to suit the data is not chosen again."""
    before = spec_of(snapshot).batch
    left_out = {name: getattr(before, name) for name in ("lanes", "steps", "tokens") if getattr(asked.batch, name) is None}
    return asked.model_copy(update={"batch": asked.batch.model_copy(update=left_out)})


@contextmanager
def _sound() -> Iterator[None]:
    """Every byte of a snapshot was checked when it was read; what does not fit now was never written by this version."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        what = " ".join(str(error).split())[:80]
        raise RunError(
            f"the snapshot is not one that this version wrote ({what}); resume from another snapshot or start a new run"
        ) from error


def check_forms(own: Mapping[str, Tensor], given: Mapping[str, Form], where: str, *, whole: Collection[str]) -> None:
    """Refuse tensors of other names, shapes or dtypes than a model has. `whole`: the names of the model of which `own` is a part."""
    for name, tensor in own.items():
        if name not in given:
            raise RunError(f"{where} has no {name}; it is from another model: use the spec it was made with")
        if given[name] != form_of(tensor):
            there, here = (f"{list(shape)} {str(dtype).removeprefix('torch.')}" for dtype, shape in (given[name], form_of(tensor)))
            raise RunError(f"{where} holds {name} as {there}, the model has {here}; use the spec it was made with")
    if extra := sorted(given.keys() - set(whole)):
        raise RunError(f"{where} holds {extra[0]}, which the model does not have; use the spec it was made with")


def load_parameters(own: dict[str, Tensor], given: dict[str, Tensor], where: str, *, whole: Collection[str] | None = None) -> None:
    """Copy tensors by name; names and shapes must agree. `whole`: the names of a model of which `own` is a part."""
    forms = {name: form_of(tensor) for name, tensor in given.items()}
    check_forms(own, forms, where, whole=given.keys() if whole is None else whole)
    for name, tensor in own.items():
        tensor.copy_(given[name])


def take_weights(model: nn.Module, path: Path, where: str, *, ignored: str | None = None) -> None:
    """Load a weights file into a model; one tensor may be left out, as the model has it."""
    own = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored}
    load_parameters(own, read_weights(model, path, ignored=ignored), where)


def read_weights(model: nn.Module, path: Path, *, ignored: str | None = None) -> dict[str, Tensor]:
    """The tensors of a weights file, checked against the whole of a model, also where some of it is held by another worker."""
    own = {name: tensor for name, tensor in tensors_of(model).items() if name != ignored}
    return load_weights(path, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}, ignored)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
