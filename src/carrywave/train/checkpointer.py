"""The snapshots of a run: when one is started and waited for, and how a trainer and the state of its loop are restored from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carrywave.errors import Diverged, RunError, UserError, option
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import World, from_rank_0, raise_on_all
from carrywave.runs.checkpoint.manifest import Manifest
from carrywave.runs.checkpoint.same_spec import sound
from carrywave.runs.checkpoint.snapshot import Stored, open_stored, restore_best, snapshot_of_best, under, weights_are_of
from carrywave.runs.checkpoint.trainer_parts import load_state, part_of
from carrywave.runs.checkpoint.writer import Writer
from carrywave.runs.run import Run
from carrywave.runs.watcher import Watcher
from carrywave.spec.spec import Spec
from carrywave.step.trainer import Trainer
from carrywave.train.loop_state import LoopState

AFTER_MISTAKE_SECONDS = 60.0
AFTER_FAULT_SECONDS = 2.0  # another worker may be gone, and the launcher is waiting to restart


@dataclass(frozen=True)
class Data:
    """The data a run is trained on."""

    fingerprint: str  # hash of everything that was read, and of how it was read
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 by part, for parts that are files

    def changed(self, meta: Mapping[str, Any], spec: Spec) -> list[str]:
        """The names of the files that changed since a snapshot; of all files, if that is not known."""
        names = {part: name for part in ("train", "valid", "test") if (name := getattr(spec.data, part))}
        before = meta.get("files")
        if not isinstance(before, dict):
            return list(names.values())
        differ = [name for part, name in names.items() if before.get(part) != self.files.get(part)]
        return differ or list(names.values())


class Checkpointer:
    """Writes the snapshots of a run, and restores them. A failed write ends the run, which resumes from the snapshot before."""

    def __init__(self, spec: Spec, trainer: Trainer, folder: Run, data: Data, watch: Watcher) -> None:
        self.spec, self.trainer, self.folder, self.data, self.watch = spec, trainer, folder, data, watch
        self.world = trainer.mesh.world
        self.writer = Writer(self.world, folder.snapshots)

    def save(self, state: LoopState, *, final: bool = False) -> None:
        """Start a snapshot between two steps; a final one is completely on disk when this returns."""
        self.settle()
        groups = part_of(self.trainer, self.spec.lanes)
        meta = None
        if self.world.rank == 0:
            metrics_bytes, timing_bytes, metrics_sha256 = self.folder.sizes()
            meta = {
                "progress": state.numbers(),
                "spec": self.spec.model_dump(mode="json"),
                "fingerprint": self.data.fingerprint,
                "files": dict(self.data.files),
                "metrics_bytes": metrics_bytes,
                "timing_bytes": timing_bytes,
                "metrics_sha256": metrics_sha256,
            }
            groups["extra"] = {f"loop/{name}": tensor for name, tensor in state.tensors().items()}
            if self.trainer.scaler is not None and self.trainer.sync is None:
                groups["extra"] |= {f"scaler/{name}": tensor for name, tensor in self.trainer.scaler.tensors().items()}
        name = f"step-{state.step:08d}"
        best = state.best_step == state.step
        self.writer.begin(name, groups, meta, keep=self.spec.train.keep, best=best, before=self.folder.sync)
        if final:
            self.settle()

    def settle(self) -> None:
        """Wait for the snapshot in progress; raises if it failed."""
        if (failure := self.writer.settle()) is not None:
            raise failure

    def go_back(self) -> LoopState:
        """Restore the last snapshot and the best weights of then. One in progress that fails on non-finite weights does not count."""
        with suppress(Diverged):
            self.settle()
        stored = read_last(self.world, self.folder)
        state = self.restore(stored)
        self.restore_weights(state, stored)
        return state

    def restore(self, stored: Stored) -> LoopState:
        """Restore the trainer from a snapshot, truncate the logs to match, and return the loop's state. Each worker reads its own part."""
        with raise_on_all(self.world, same_message=True):
            if stored.meta["fingerprint"] != self.data.fingerprint:
                files = ", ".join(self.data.changed(stored.meta, self.spec))
                of = f" ({files})" if files else ""
                raise RunError(
                    f"the data has changed since the snapshot was written{of}; restore the old data, or start a new run from its weights"
                )
        meta, trainer = stored.meta, self.trainer
        with raise_on_all(self.world, same_message=True, no_timeout=True), sound():
            load_state(trainer, stored, self.spec.lanes)
            extra = stored.read("extra", stored.manifest.forms("extra"))
            state = LoopState.of(meta["progress"], under("loop/", extra), trainer.device)
            if trainer.sync is None:  # otherwise each replica has its own
                if trainer.scaler is not None:
                    trainer.scaler.load(under("scaler/", extra))
                trainer.nonfinite.forget(state.in_a_row)
            self.folder.cut_back(meta["metrics_bytes"], meta["timing_bytes"], meta["metrics_sha256"], state.step)
            if self.world.rank == 0:
                restore_best(stored)
        return state

    def restore_weights(self, state: LoopState, stored: Stored) -> None:
        """After `restore`: have the file of the best weights be that of the best evaluation so far. Collective.

        It may be of a later one: of a run that goes on from an older snapshot, or was killed before it had published the next.
        """

        def found() -> Sequence[Any] | None:
            if state.weights_step < 0 or weights_are_of(self.folder.weights, state.weights_step):
                return []
            best = snapshot_of_best(self.folder.snapshots, state.numbers())
            return None if best is None else best.to_json()

        sent = from_rank_0(self.world, found, no_timeout=True)
        if sent == []:
            return
        fact = f"{self.folder.weights} does not hold the best weights so far, which are of step {state.weights_step}"
        if sent is None:
            if not state.trains(self.spec.train):
                gone = f"{fact}, and their snapshot is gone"
                raise on_every_rank(RunError(f"{gone}; resume from another snapshot, or restore the file from a copy"))
            self.watch.say(f"{fact}, and their snapshot is gone: the next evaluation counts as the best")
            state.best, state.best_step = None, -1
            return
        source = receive_snapshot(self.world, sent)
        for snapshot in (source,) if source.folder == stored.folder else (source, stored):
            if source.folder != stored.folder:
                with raise_on_all(self.world, same_message=True, no_timeout=True), sound():
                    load_state(self.trainer, snapshot, self.spec.lanes)
            if snapshot is source:
                with self.trainer.evaluation_weights():
                    named = self.trainer.gathered(each_once=True)
                    with raise_on_all(self.world, same_message=True, no_timeout=True):
                        self.folder.write_weights(named, state.weights_step)
        self.watch.say(f"{fact}: they were restored from their snapshot")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """If the run fails, give the snapshot in progress a little time to complete."""
        try:
            yield
        except Exception as error:
            lost = self.writer.close(AFTER_MISTAKE_SECONDS if isinstance(error, UserError) else AFTER_FAULT_SECONDS)
            if lost is not None:  # besides the error itself: the run will resume from an older snapshot than expected
                self.watch.say(lost)
            raise


def read_last(world: World, folder: Run) -> Stored:
    """The last snapshot of a run. Collective: every rank must call it."""
    return receive_snapshot(world, from_rank_0(world, lambda: open_stored(folder.snapshots).to_json()))


def receive_snapshot(world: World, sent: Sequence[Any]) -> Stored:
    """A snapshot whose manifest rank 0 has read and sent. Every byte of its files is verified, divided among the ranks."""
    stored = Stored(Path(sent[0]), Manifest.of(sent[1], Path(sent[0])))
    with raise_on_all(world, same_message=True, no_timeout=True):
        if not stored.folder.is_dir():
            raise RunError(f"rank {world.rank} does not see {stored.folder}; set {option('run')} to a folder that all hosts share")
        stored.verify(world.rank, world.size)
    return stored
