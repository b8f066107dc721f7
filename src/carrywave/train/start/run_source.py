"""Determines what a run starts from: its folder, the snapshot to resume from, the weights and the codec of another run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from carrywave.data.codec import Codec
from carrywave.data.files import cache
from carrywave.data.files.remote import fetch, is_address
from carrywave.errors import DataError, RunError, SpecError, option
from carrywave.launch import launch_record
from carrywave.plan.plan import Plan
from carrywave.runs.checkpoint import atomic_files
from carrywave.runs.checkpoint.same_spec import check_same, spec_of
from carrywave.runs.checkpoint.snapshot import Stored, open_stored
from carrywave.runs.run import Run
from carrywave.spec.data_spec import DataSpec
from carrywave.spec.load import load_own, parse
from carrywave.spec.plan_spec import PlanSpec
from carrywave.spec.spec import Spec
from carrywave.spec.yaml_text import parse_yaml

# Data settings that a codec determines: if a codec is given, the spec records the ones it was built with.
LEARNED_BY = (
    *("tokens", "vocabulary", "min_count", "columns", "targets", "time", "series", "frequency", "standardize"),
    *("known", "calendar", "categorical", "static", "channels", "transform"),
)


def open_folder(
    spec: Spec,
    run: Path | None,
    resume: bool,
    init: str | None = None,
    *,
    restarted: bool = False,
    hold: Callable[[str], None] | None = None,
) -> tuple[Run, Stored | None]:
    """The folder of a new run, or of one to resume with its last snapshot. Restarted workers resume by themselves.

    A run that ended before its first snapshot is started over, if everything it began with is known. A run to resume is owned by this
    process from here on, and `hold` is called with what that waits for; with `hold` None it is only inspected.
    """
    if not resume:
        ours = launch_record.find(run, spec.task) if restarted else None
        if ours is None:
            return Run.create(run, spec.task), None
        if launch_record.last_step(ours) is None:
            return Run.begin_anew(ours), None
        run = ours
    if run is None:
        raise RunError(f"resume needs to know which run to continue; pass {option('run')}")
    folder = Run.open(run)
    if hold is not None:
        folder.hold(hold)
    try:
        if _begins_again(folder, spec, init):
            folder.start_over()
            return folder, None
        return folder, open_stored(folder.snapshots)
    except BaseException:
        folder.release()
        raise


def _begins_again(folder: Run, spec: Spec, init: str | None) -> bool:
    """True if a run has nothing to resume from and can be started over."""
    began = folder.began_with
    if began is None:
        return False
    if began["init"] != init:
        how = "without initial weights" if began["init"] is None else f"from the weights of {began['init']}"
        raise RunError(
            f"{folder.path} was started {how} and ended before its first snapshot; "
            f"remove the folder and start the run again in the same way, or use another {option('run')}"
        )
    check_same(spec if init is None else read_alike(spec, reading_of(init, spec)), load_own(folder.path / "spec.yaml"))
    return True


def refuse_python(spec: Spec, folder: Run) -> None:
    """Refuse to resume from files a run that was trained from Python."""
    if spec.data.train is None or folder.read_object("facts.json").get("own_model"):
        raise RunError(
            f"{folder.path} was trained from Python, on data or with modules that are not stored in files; "
            f"resume it from Python: cw.fit(model, data, run={str(folder.path)!r}, resume=True)"
        )


def weights_file(init: str) -> Path:
    """The file of the weights that a run starts from: another run's, or the file itself."""
    path = fetch(init, cache.folder(None)) if is_address(init) else Path(init)
    if path.is_dir():
        path = Run.open(path).weights
    if not path.is_file():
        raise RunError(f"{option('init', init)}: run or weights file not found; pass a run folder or a .safetensors file")
    return path


def given_codec(init: str | None, folder: Run, snapshot: Stored | None) -> Codec | None:
    """The codec of the weights that a run starts from, or started from before it was stopped; None: it builds its own."""
    if snapshot is None:
        return None if init is None else _init_codec(init)
    return Codec.from_json(json.dumps(folder.read_json("codec.json"))) if _was_given_codec(folder) else None


def given_reading(spec: Spec, init: str | None, folder: Run, snapshot: Stored | None) -> dict[str, Any]:
    """How data is read, where the weights that a run starts from, or started from before it was stopped, say so and its spec does not."""
    if snapshot is None:
        return {} if init is None else reading_of(init, spec)
    before = spec_of(snapshot).data.model_dump(mode="json", include=set(LEARNED_BY))
    return {name: value for name, value in before.items() if name not in spec.data.model_fields_set} if _was_given_codec(folder) else {}


def _was_given_codec(folder: Run) -> bool:
    return bool(folder.read_object("facts.json").get("given_codec"))


def reading_of(init: str, spec: Spec) -> dict[str, Any]:
    """How the data was read for the weights that a run starts from, if they come with a codec; the spec then records that.

    A spec that asks for something else is refused, because it would have no effect.
    """
    path = weights_file(init)
    described = atomic_files.read_metadata(path)
    if "codec" not in described:
        return {}
    spec_text = parse_yaml(described.get("spec", ""), str(path))
    try:
        spec_before = parse(spec_text if isinstance(spec_text, dict) else {}, defaults=False)
    except SpecError:
        return {}  # from another version; the codec is enough
    theirs = spec_before.data.model_dump(mode="json", include=set(LEARNED_BY))
    mine = spec.data.model_dump(mode="json", include=set(LEARNED_BY))
    for name in LEARNED_BY:
        if name in spec.data.model_fields_set and mine[name] != theirs[name]:
            raise RunError(
                f"data.{name}={_shown(mine[name])}, but the weights of {init} were trained with data.{name}={_shown(theirs[name])}, "
                f"and data must be read in the same way; remove data.{name}, or remove {option('init')}"
            )
    return theirs


def read_alike(spec: Spec, reading: Mapping[str, Any]) -> Spec:
    """The spec with the given settings of how data is read."""
    if not reading:
        return spec
    data = DataSpec.model_validate({**spec.data.model_dump(mode="json"), **reading})
    return spec.model_copy(update={"data": data})


def _shown(value: Any) -> str:
    return "none" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _init_codec(init: str) -> Codec | None:
    """The codec stored with the weights, so that new data is read like the old; None if the file has none."""
    path = weights_file(init)
    described = atomic_files.read_metadata(path)
    try:
        return Codec.from_json(described["codec"]) if "codec" in described else None
    except DataError as error:
        raise RunError(f"{path}: {str(error).rpartition(';')[0]}; use other weights") from error


def plan_before(folder: Run) -> Plan | None:
    """The plan of a run that is to be resumed; None if its file is unusable, and the run has to be planned again."""
    try:
        recorded = folder.read_json("plan.json")
        return plan_of_json({name: recorded[name] for name in PlanSpec.model_fields})
    except (RunError, ValueError, TypeError, KeyError, RecursionError):
        return None


def plan_of_json(values: Mapping[str, Any]) -> Plan:
    """Parse a plan from JSON, validated like that of a spec."""
    plan_spec = PlanSpec.model_validate(values)
    replicas, cuts = plan_spec.replicas or 1, tuple(plan_spec.cuts or ())
    return Plan(
        replicas,
        plan_spec.stages,
        cuts,
        plan_spec.chunk_steps,
        plan_spec.micro_batches,
        plan_spec.recompute,
        plan_spec.kernel,
        plan_spec.share_head,
    )
