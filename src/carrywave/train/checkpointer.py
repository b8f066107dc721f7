"""The snapshots of a run: how the trainer and the state of its loop are written between two steps, and restored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carrywave.errors import RunError
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.startup.rendezvous import on_every_rank
from carrywave.parallel.world import World, from_rank_0, raise_on_all
from carrywave.runs.checkpoint.atomic_files import read_metadata
from carrywave.runs.checkpoint.same_spec import sound
from carrywave.runs.checkpoint.snapshot import Stored, read_snapshot, write_snapshot
from carrywave.runs.checkpoint.trainer_parts import load_state, state_of
from carrywave.runs.run import Run
from carrywave.runs.watcher import Watcher
from carrywave.spec.spec import Spec
from carrywave.step.trainer import Trainer
from carrywave.train.loop_state import LoopState


@dataclass(frozen=True)
class Data:
    """The data a run is trained on."""

    fingerprint: str  # hash of everything that was read, and of how it was read
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 by part, for parts that are files


class Checkpointer:
    """Writes the snapshots of a run, and restores them. A failed write ends the run, which resumes from the snapshot before."""

    def __init__(self, spec: Spec, trainer: Trainer, folder: Run, data: Data, watch: Watcher) -> None:
        self.spec, self.trainer, self.folder, self.data, self.watch = spec, trainer, folder, data, watch
        self.world = trainer.mesh.world

    def save(self, state: LoopState) -> None:
        """Write a snapshot between two steps: rank 0, of what all have. Collective."""
        tensors, rest = state_of(self.trainer, self.spec.lanes)
        progress = state.to_json()
        heartbeat.rest()  # a slow disk is no hang, though no step is taken meanwhile
        with raise_on_all(self.world, same_message=True, no_timeout=True):
            if self.world.rank == 0:
                about = {"spec": self.spec.model_dump(mode="json"), "fingerprint": self.data.fingerprint, "files": dict(self.data.files)}
                meta = about | {"progress": progress, "trainer": rest, "metrics_bytes": self.folder.metrics_bytes()}
                write_snapshot(self.folder.snapshots, state.step, tensors, meta, self.spec.train.keep)
        heartbeat.mark()

    def go_back(self) -> LoopState:
        """Restore the last snapshot. Collective."""
        return self.restore(read_last(self.world, self.folder))

    def restore(self, stored: Stored) -> LoopState:
        """Restore the trainer from a snapshot, truncate the logs to match, and return the loop's state. Collective."""
        meta, trainer = stored.meta, self.trainer
        with raise_on_all(self.world, same_message=True), sound():
            if meta["fingerprint"] != self.data.fingerprint:
                files = ", ".join(self._changed(meta["files"]))
                fact = f"the data has changed since the snapshot was written{f' ({files})' if files else ''}"
                raise RunError(f"{fact}; restore the old data, or start a new run from its weights")
            state = LoopState.of_json(meta["progress"], trainer.device)
        with sound():
            load_state(trainer, stored.tensors, meta["trainer"], self.spec.lanes)
        if trainer.sync is None:  # otherwise each replica has its own
            trainer.nonfinite.forget(state.in_a_row)
        with raise_on_all(self.world, same_message=True):
            self.folder.cut_back(meta["metrics_bytes"], state.step)
        state.extend(self.spec.train)
        self._take_best(state)
        return state

    def _changed(self, before: Mapping[str, str]) -> list[str]:
        """The names of the files that changed since a snapshot; of all files, if that is not known."""
        names = {part: name for part in ("train", "valid", "test") if (name := getattr(self.spec.data, part))}
        return [name for part, name in names.items() if before.get(part) != self.data.files.get(part)] or list(names.values())

    def _take_best(self, state: LoopState) -> None:
        """The best evaluation so far is the one whose weights are in their file, be it later than the snapshot. Collective."""

        def found() -> list[Any] | None:
            try:
                about = read_metadata(self.folder.weights)
                return [int(about["step"]), json.loads(about["best"])]
            except (RunError, KeyError, ValueError):
                return None

        best = from_rank_0(self.world, found, no_timeout=True)
        if best is None and state.weights_step >= 0:
            fact = f"{self.folder.weights} does not hold the best weights so far"
            if not state.trains(self.spec.train):
                raise on_every_rank(RunError(f"{fact}; restore the file from a copy, or resume from an earlier snapshot"))
            self.watch.say(f"{fact}: the next evaluation counts as the best")
            state.best, state.best_step = None, -1
        elif best is not None and best[1] is not None:
            state.best_step, state.best = best


def read_last(world: World, folder: Run) -> Stored:
    """The last snapshot of a run: its tensors are read by rank 0, for all. Collective."""
    read: list[Stored] = []

    def found() -> list[Any]:
        read.append(read_snapshot(folder.snapshots))
        return [str(read[0].path), read[0].meta]

    path, meta = from_rank_0(world, found, no_timeout=True)
    return read[0] if read else Stored(Path(path), {}, meta)
