"""What a run is asked for, and what it starts from: its folder, the snapshot to go on from, the codec and weights of another run.

Rank 0 inspects the disk and tells the others. A run without a snapshot begins anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carrywave.data.codec import Codec
from carrywave.data.files import cache
from carrywave.data.files.remote import fetch, is_address
from carrywave.errors import DataError, RunError, SpecError, option
from carrywave.launch import exit_reports, launch_record
from carrywave.model.opaque_model import Loss
from carrywave.parallel.world import World, all_gather_text, check_agreement, from_rank_0, raise_on_all
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.same_spec import check_same, spec_of, with_choices_of
from carrywave.runs.checkpoint.snapshot import Stored
from carrywave.runs.run import Run
from carrywave.runs.run_place import begins_anew
from carrywave.runs.watcher import Silent, Watcher
from carrywave.spec.data_spec import DataSpec
from carrywave.spec.load import parse
from carrywave.spec.spec import Spec
from carrywave.spec.yaml_text import parse_yaml
from carrywave.train.checkpointer import read_last

# Data settings that a codec determines: if a codec is given, the spec records the ones it was built with.
LEARNED_BY = (
    *("tokens", "vocabulary", "min_count", "columns", "targets", "time", "series", "frequency", "standardize"),
    *("known", "calendar", "categorical", "static", "channels", "transform"),
)


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

    @property
    def workers(self) -> int:
        """How many workers there are, or are planned for."""
        return self.asked.planned or self.world.size


def begin(asked: RunRequest, world: World) -> Start:
    """Open the run. One that is resumed is owned from here on, unless nothing is to be trained."""
    folder: Run | None = None
    launch_record.next_call()
    # With several hosts, only some may have been told that this is a restart.
    check_agreement(world, {} if asked.run is None else {"run": os.path.normpath(asked.run)})
    restarted = any(int(times) for times in all_gather_text(world, str(launch_record.attempt())))

    def opened() -> list[Any]:
        nonlocal folder
        folder, goes_on = open_folder(asked, restarted=restarted)
        exit_reports.report_run(folder.path)
        return [str(folder.path), goes_on, _init_of(asked, folder, goes_on=goes_on)]

    try:
        path, goes_on, init = from_rank_0(world, opened, no_timeout=True)
        folder = folder or Run(Path(path), writes=False)
        launch_record.set_run(folder.path)
        if world.rank == 0 and (warning := launch_record.warning()) is not None:
            asked.watch.say(warning)
        stored = read_last(world, folder) if goes_on else None
        codec_json, reading = from_rank_0(world, lambda: _learned(asked.spec, folder, stored, init))
        with raise_on_all(world):
            spec = _read_alike(asked.spec, reading)
            if stored is not None:
                before = spec_of(stored)
                check_same(spec, before, files_move=True)
                spec = with_choices_of(spec, before)
        return Start(asked, world, folder, spec, stored, None if codec_json is None else Codec.from_json(codec_json), init)
    except BaseException:
        if folder is not None:
            folder.release()
        raise


def open_folder(asked: RunRequest, *, restarted: bool) -> tuple[Run, bool]:
    """The folder of a run, and whether there is a snapshot in it to go on from. Restarted workers resume by themselves.

    A run to resume is owned by this process from here on; in a dry run it is only inspected.
    """
    run, resumes = asked.run, asked.resume
    if not resumes:
        ours = launch_record.find(run, asked.spec.task) if restarted else None
        if ours is None:
            return Run.create(run, asked.spec.task), False
        if launch_record.last_step(ours) is None:
            return Run(ours).begin_anew(), False
        run = ours
    if run is None:
        raise RunError(f"resume needs to know which run to continue; pass {option('run')}")
    folder = Run.open(run)
    if not asked.dry_run:
        folder.hold(asked.watch.say)
    try:
        if asked.from_files:
            refuse_python(asked.spec, folder)
        if begins_anew(folder.path):
            asked.watch.say(f"{folder.path} ended before its first snapshot: restarting it from the beginning")
            return folder.begin_anew(), False
    except BaseException:
        folder.release()
        raise
    return folder, True


def refuse_python(spec: Spec, folder: Run) -> None:
    """Refuse to resume from files a run that was trained from Python."""
    if spec.data.train is None or folder.read_object("facts.json").get("own_model"):
        raise RunError(
            f"{folder.path} was trained from Python, on data or with modules that are not stored in files; "
            f"resume it from Python: cw.fit(model, data, run={str(folder.path)!r}, resume=True)"
        )


def _init_of(asked: RunRequest, folder: Run, *, goes_on: bool) -> str | None:
    """The weights that a run starts from; if it begins anew, those that it was started with. One that goes on has its own."""
    if goes_on:
        return None
    known = asked.resume and asked.init is None and (folder.path / "facts.json").is_file()
    return folder.read_object("facts.json").get("init") if known else asked.init


def weights_file(init: str) -> Path:
    """The file of the weights that a run starts from: another run's, or the file itself."""
    path = fetch(init, cache.folder(None)) if is_address(init) else Path(init)
    if path.is_dir():
        path = Run.open(path).weights
    if not path.is_file():
        raise RunError(f"{option('init', init)}: run or weights file not found; pass a run folder or a .safetensors file")
    return path


def _learned(spec: Spec, folder: Run, stored: Stored | None, init: str | None) -> tuple[str | None, dict[str, Any]]:
    """The codec, as JSON, of the weights that a run starts from, or started from before it was stopped, and how data is read with it.

    Nothing if it builds its own codec.
    """
    if stored is None:
        return (None, {}) if init is None else _learned_with(init, spec)
    if not folder.read_object("facts.json").get("given_codec"):
        return None, {}
    before = spec_of(stored).data.model_dump(mode="json", include=set(LEARNED_BY))
    reading = {name: value for name, value in before.items() if name not in spec.data.model_fields_set}
    return Codec.from_json(json.dumps(folder.read_json("codec.json"))).to_json(), reading


def _learned_with(init: str, spec: Spec) -> tuple[str | None, dict[str, Any]]:
    """The codec stored with weights, so that new data is read like the old, and how it reads; nothing if the file has none.

    A spec that asks for something else is refused, because it would have no effect.
    """
    path = weights_file(init)
    described = atomic_files.read_metadata(path)
    if "codec" not in described:
        return None, {}
    try:
        codec = Codec.from_json(described["codec"]).to_json()
    except DataError as error:
        raise RunError(f"{path}: {str(error).rpartition(';')[0]}; use other weights") from error
    spec_text = parse_yaml(described.get("spec", ""), str(path))
    try:
        spec_before = parse(spec_text if isinstance(spec_text, dict) else {}, defaults=False)
    except SpecError:
        return codec, {}  # from another version; the codec is enough
    theirs, mine = (each.data.model_dump(mode="json", include=set(LEARNED_BY)) for each in (spec_before, spec))
    for name in LEARNED_BY:
        if name in spec.data.model_fields_set and mine[name] != theirs[name]:
            raise RunError(
                f"data.{name}={_shown(mine[name])}, but the weights of {init} were trained with data.{name}={_shown(theirs[name])}, "
                f"and data must be read in the same way; remove data.{name}, or remove {option('init')}"
            )
    return codec, theirs


def _read_alike(spec: Spec, reading: Mapping[str, Any]) -> Spec:
    """The spec with the given settings of how data is read."""
    if not reading:
        return spec
    data = DataSpec.model_validate({**spec.data.model_dump(mode="json"), **reading})
    return spec.model_copy(update={"data": data})


def _shown(value: Any) -> str:
    return "none" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
