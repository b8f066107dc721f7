"""What a run is asked for, and what it starts from: its folder, the snapshot to go on from, the codec and weights of another run.

Rank 0 inspects the disk and tells the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carrywave.data.codec import Codec
from carrywave.launch import exit_reports, launch_record
from carrywave.model.opaque_model import Loss
from carrywave.parallel.world import World, all_gather_text, check_agreement, raise_on_all
from carrywave.plan.plan import Plan
from carrywave.runs.checkpoint.same_spec import check_same, spec_of, with_choices_of
from carrywave.runs.checkpoint.snapshot import Stored
from carrywave.runs.run import NullRun, Run
from carrywave.runs.watcher import Silent, Watcher
from carrywave.spec.spec import Spec
from carrywave.train.checkpointer import receive_snapshot
from carrywave.train.start.run_source import given_codec, given_reading, open_folder, plan_before, read_alike, refuse_python


@dataclass(frozen=True)
class RunRequest:
    """What a run is asked for, by a command or by a call from Python."""

    spec: Spec
    run: Path | None = None
    resume: bool = False
    init: str | None = None  # weights to start from
    watch: Watcher = field(default_factory=Silent)
    from_files: bool = False  # by a command, which has nothing but files
    data: Any = None  # from Python; None: the files of the spec
    model: Any = None  # the user's own, or a function that builds it; None: that of the spec
    loss: Loss | None = None  # of a module in one piece
    callbacks: Sequence[object] = ()
    restore: bool = False  # whoever called wants the whole model of a run that was split
    dry_run: bool = False
    planned: int | None = None  # the workers that a dry run plans for


@dataclass(frozen=True)
class Start:
    """What a run starts from, the same on every worker."""

    asked: RunRequest
    world: World
    folder: Run
    spec: Spec
    snapshot: Stored | None
    codec: Codec | None  # given together with initial weights
    init: str | None  # the weights that it starts from
    before: Plan | None = None  # the run's plan so far; known to rank 0 only

    @property
    def workers(self) -> int:
        """How many workers there are, or are planned for."""
        return self.asked.planned or self.world.size


def begin(asked: RunRequest, world: World) -> Start:
    """Open the run. One that is resumed is owned from here on, unless nothing is to be trained."""
    spec, watch = asked.spec, asked.watch
    folder: Run | None = None
    snapshot: Stored | None = None
    found = ""
    before: Plan | None = None
    launch_record.next_call()
    # With several hosts, only some may have been told that this is a restart.
    check_agreement(world, {} if asked.run is None else {"run": os.path.normpath(asked.run)})
    restarted = any(int(times) for times in all_gather_text(world, str(launch_record.attempt())))
    try:
        with raise_on_all(world, same_message=True, no_timeout=True):
            if world.rank == 0:
                holds = None if asked.dry_run else watch.say
                folder, snapshot = open_folder(spec, asked.run, asked.resume, asked.init, restarted=restarted, hold=holds)
                exit_reports.report_run(folder.path)
                if asked.resume and snapshot is None:
                    watch.say(f"{folder.path} ended before its first snapshot: restarting it from the beginning")
                if asked.from_files and (asked.resume or snapshot is not None):
                    refuse_python(spec, folder)
                reading = given_reading(spec, asked.init, folder, snapshot)
                if snapshot is not None:
                    check_same(read_alike(spec, reading), spec_of(snapshot), files_move=True)
                    before = plan_before(folder)
                codec = given_codec(asked.init, folder, snapshot)
                texts = [None if codec is None else codec.to_json(), None if snapshot is None else snapshot.to_json()]
                found = json.dumps([str(folder.path), *texts, reading])
        path, codec_json, snapshot_json, reading = json.loads(all_gather_text(world, found)[0])
        launch_record.set_run(Path(path))
        if world.rank == 0 and (warning := launch_record.warning()) is not None:
            watch.say(warning)
        codec = None if codec_json is None else Codec.from_json(codec_json)
        spec = read_alike(spec, reading)
        stored = None if snapshot_json is None else receive_snapshot(world, snapshot_json)
        spec = spec if stored is None else with_choices_of(spec, stored)
        init = asked.init if stored is None else None  # a run that goes on has its weights from the snapshot
        return Start(asked, world, folder or NullRun(Path(path)), spec, stored, codec, init, before)
    except BaseException:
        if folder is not None:
            folder.release()
        raise
