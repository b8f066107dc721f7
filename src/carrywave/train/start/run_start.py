"""Starts a run identically on every worker: the spec that was asked for, the folder, the data, and what to say before the first step.

Rank 0 inspects the disk and tells the others; then each host reads the data once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from carrywave.data.codec import Codec
from carrywave.data.order import Order, SequenceOrder
from carrywave.data.prepare import Prepared, digests_of, prepare
from carrywave.data.text.tag_scheme import check_sequences
from carrywave.errors import DataError, SpecError
from carrywave.launch import exit_reports, launch_record
from carrywave.model.model import Model
from carrywave.model.opaque_model import OpaqueModel
from carrywave.parallel.startup.door import job_of
from carrywave.parallel.world import World, all_gather_text, check_agreement, raise_on_all
from carrywave.plan.plan import Plan
from carrywave.runs.checkpoint.same_spec import check_same, spec_of, with_choices_of
from carrywave.runs.checkpoint.snapshot import Stored
from carrywave.runs.run import NullRun, Run
from carrywave.runs.watcher import Watcher
from carrywave.spec.defaults import AUTO, with_keys, with_spans
from carrywave.spec.idle_keys import idle_beside_own, idle_in_files, idle_with
from carrywave.spec.load import parse, read_values
from carrywave.spec.spec import Spec
from carrywave.tasks.doubts import doubts
from carrywave.train.checkpointer import receive_snapshot
from carrywave.train.evaluations import DataParts
from carrywave.train.start.planning import plan_before
from carrywave.train.start.run_source import given_codec, given_reading, open_folder, read_alike, refuse_python
from carrywave.train.start.same_data import compare


@dataclass(frozen=True)
class Start:
    """What a run starts from, the same on every worker."""

    spec: Spec
    world: World
    folder: Run
    snapshot: Stored | None
    codec: Codec | None  # given together with initial weights
    init: str | None  # the weights that it starts from
    watch: Watcher
    before: Plan | None = None  # the run's plan so far; known to rank 0 only


def begin(
    spec: Spec,
    world: World,
    run: Path | None,
    resume: bool,
    init: str | None,
    watch: Watcher,
    *,
    from_files: bool,
    hold: bool = True,
) -> Start:
    """Open the run: rank 0 inspects the disk and tells the others what it found. With `hold`, a resumed run is owned from here on."""
    folder: Run | None = None
    snapshot: Stored | None = None
    summary = ""
    before: Plan | None = None
    launch_record.next_call()
    # With several hosts, only some may have been told that this is a restart.
    check_agreement(world, {} if run is None else {"run": job_of(None, run)["run"]})
    restarted = any(int(times) for times in all_gather_text(world, str(launch_record.attempt())))
    try:
        with raise_on_all(world, same_message=True, no_timeout=True):
            if world.rank == 0:
                holds = watch.say if hold else None
                folder, snapshot = open_folder(spec, run, resume, init, restarted=restarted, hold=holds)
                exit_reports.report_run(folder.path)
                if resume and snapshot is None:
                    watch.say(f"{folder.path} ended before its first snapshot: restarting it from the beginning")
                if from_files and (resume or snapshot is not None):
                    refuse_python(spec, folder)
                reading = given_reading(spec, init, folder, snapshot)
                if snapshot is not None:
                    check_same(read_alike(spec, reading), spec_of(snapshot), files_move=True)
                    before = plan_before(folder)
                codec = given_codec(init, folder, snapshot)
                snapshot_json = None if snapshot is None else snapshot.to_json()
                summary = json.dumps([str(folder.path), None if codec is None else codec.to_json(), snapshot_json, reading])
        path, codec_json, snapshot_json, reading = json.loads(all_gather_text(world, summary)[0])
        launch_record.set_run(Path(path))
        if world.rank == 0 and (warning := launch_record.warning()) is not None:
            watch.say(warning)
        codec = None if codec_json is None else Codec.from_json(codec_json)
        spec = read_alike(spec, reading)
        stored = None if snapshot_json is None else receive_snapshot(world, snapshot_json)
        spec = spec if stored is None else with_choices_of(spec, stored)
        begins_with = init if stored is None else None  # a run that goes on has its weights from the snapshot
        return Start(spec, world, folder or NullRun(Path(path)), stored, codec, begins_with, watch, before)
    except BaseException:
        if folder is not None:
            folder.release()
        raise


def prepare_in_turn(start: Start) -> tuple[Prepared, dict[str, str]]:
    """Read the data into the cache on one worker of each host; the others then find it there.

    Files that differ between workers are refused before that. Also returns the SHA-256 of each part's file.
    """
    world = start.world
    prepared: Prepared | None = None
    compare(world, start.spec)
    for turn in (world.local_rank == 0, True):
        with raise_on_all(world, same_message=True, no_timeout=True):
            if turn and prepared is None:
                prepared = prepare(start.spec, codec=start.codec, note=start.watch.say)
    assert prepared is not None  # in the second turn every remaining worker reads
    digests = digests_of(start.spec) if world.rank == 0 else {}
    return prepared, {key.removeprefix("data."): digest for key, (_, digest) in digests.items()}


def check_idle(spec: Spec, prepared: Prepared, *, user_model: bool) -> None:
    """Refuse keys that act on nothing with this data, or beside the user's own model."""
    text = prepared.codec.field == "text" or (prepared.codec.kind == spec.data.tokens == "word")
    valid, by_change = prepared.valid is not None, prepared.codec.scale_season > 0
    problem = next(
        chain(
            idle_in_files(spec, prepared.formats),
            idle_with(spec, prepared.facts, text=text, valid=valid, by_change=by_change),
            idle_beside_own(spec) if user_model else (),
        ),
        None,
    )
    if problem is not None:
        raise SpecError(problem)


def with_whole_spans(spec: Spec, prepared: Prepared) -> tuple[Spec, str | None]:
    """The spec with a CRF in place of `auto` if labels write spans, and a line that says so. It allows all pairs if the data has some that
    their scheme forbids; of rows that hold several sequences, labels are chosen one by one.
    """
    found = with_spans(spec, spans=prepared.facts.spans > 0, spelled=prepared.facts.characters > 0)
    if spec.model.crf != AUTO or not found.model.crf:
        return found, None
    parts = {"train": prepared.train, "valid": prepared.valid, "test": prepared.test}
    if any(part is not None and part.resets is not None and part.resets.any() for part in parts.values()):
        return with_keys(found, {"model": {"crf": False, "word_scores": 0}}), None
    fact = "labels write spans, so they are chosen together (model.crf)"
    fact += ", by layers and by scores of their words (model.word_scores)" if found.model.word_scores else ""
    try:
        for name, part in parts.items():
            if part is not None:
                check_sequences(name, part, prepared.codec.labels, spec.data.scheme)
    except DataError as error:
        if "scheme" in spec.data.model_fields_set:
            raise
        return with_keys(found, {"data": {"scheme": "none"}}), f"{fact}; {str(error).partition(', by which')[0]}, so any may follow any"
    return found, f"{fact}; for a softmax, set model.crf=false"


def spec_of_call(spec: Spec | Mapping[str, Any] | str | Path | None, model: Any, plan: Any, sections: Mapping[str, Any]) -> Spec:
    """The spec that a call from Python asks for: a whole one, or its sections one by one, which take precedence."""
    base: dict[str, Any]
    # Only fields that were set: the others may still be derived from elsewhere.
    if isinstance(spec, Spec):
        base = spec.model_dump(mode="json", exclude_unset=True)
    elif isinstance(spec, str | Path):
        base = read_values(Path(spec))
    else:
        base = dict(spec or {})
    for name, value in sections.items():
        old = base.get(name)
        base[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    if isinstance(model, Mapping):
        base["model"] = dict(model)
    if isinstance(plan, Plan):
        plan = {name: value for name, value in asdict(plan).items() if value != getattr(Plan(), name)}
    if plan is not None and plan != "auto":
        base["plan"] = dict(plan) if isinstance(plan, Mapping) else plan
    return parse(base, defaults=model is None or isinstance(model, Mapping))


def _ours(model: Model | OpaqueModel) -> bool:
    return isinstance(model, Model) and type(model.head).__module__.startswith("carrywave.")


def noted(
    spec: Spec, order: Order, model: Model | OpaqueModel, planned: tuple[str, ...], prepared: Prepared, parts: DataParts
) -> Iterator[str]:
    """Yield the notes."""
    if isinstance(order, SequenceOrder) and order.oversized:
        yield f"sequences longer than batch.tokens={spec.tokens}: {order.oversized}; each becomes a batch of its own"
    if spec.streams and isinstance(model, OpaqueModel):
        name = type(model.module).__name__
        yield f"{name} has no carry that the trainer can keep: each window of {spec.steps} steps starts fresh; use a cw.Model to keep one"
    labels = prepared.codec.labels
    if prepared.codec.label_kind == "whole number" and labels != tuple(map(str, range(len(labels)))) and not _ours(model):
        shown = ", ".join(labels[:5]) + (", …" if len(labels) > 5 else "")
        fact = f"the labels {shown} are passed to your loss as 0 to {len(labels) - 1}, in this order"
        yield f"{fact}; number them from 0 to keep them unchanged"
    yield from planned
    yield from prepared.notes
    for part in (parts.valid, parts.test):
        yield from () if part is None else part.notes
    yield from doubts(spec, prepared.codec, order, prepared.train, prepared.valid)
