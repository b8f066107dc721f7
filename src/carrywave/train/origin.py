"""What a run starts from: its folder, the snapshot that it goes on from, the weights and the codec of another run."""

from __future__ import annotations

import json
from pathlib import Path

from carrywave.data.codec import Codec
from carrywave.errors import DataError, RunError
from carrywave.spec.spec import Spec
from carrywave.train import begun, durable
from carrywave.train.run import Run
from carrywave.train.snapshot import Stored, open_stored


def open_folder(spec: Spec, run: Path | None, resume: bool, *, restarted: bool = False) -> tuple[Run, Stored | None]:
    """The folder of a new run, or of one to go on with, and then its last snapshot. Workers that were started again go on by themselves."""
    if not resume:
        ours = begun.find(run, spec.task) if restarted else None
        if ours is None:
            return Run.create(run, spec.task), None
        if begun.last_step(ours) is None:
            return Run.begin_anew(ours), None
        run = ours
    if run is None:
        raise RunError("resume needs to know which run to go on with; add --run DIR (in Python, run=...)")
    folder = Run.open(run)
    return folder, open_stored(folder.snapshots)


def refuse_python(spec: Spec, folder: Run) -> None:
    """A run from Python cannot go on from its files alone."""
    if spec.data.train is None or folder.read_json("facts.json").get("own_model"):
        raise RunError(
            f"{folder.path} was trained from Python, on data or with modules that no file holds; "
            f"go on there: cw.fit(model, data, run={str(folder.path)!r}, resume=True)"
        )


def weights_file(init: str) -> Path:
    """The weights that a run is to start from: those of another run, or a file."""
    path = Path(init)
    if path.is_dir():
        path = Run.open(path).weights
    if not path.is_file():
        raise RunError(f"--init {init}: there is no such run or weights file; give a run folder or a .safetensors file")
    return path


def given_codec(init: str | None, folder: Run, snapshot: Stored | None) -> Codec | None:
    """The codec of the weights that a run starts from, or started from before it was stopped; None: it learns its own."""
    if init is not None:
        return _init_codec(init)
    if snapshot is not None and folder.read_json("facts.json").get("given_codec"):
        return Codec.from_json(json.dumps(folder.read_json("codec.json")))
    return None


def _init_codec(init: str) -> Codec | None:
    """The codec that stands with the weights, so that new data is read as the old was; None where the file has none."""
    path = weights_file(init)
    described = durable.read_metadata(path)
    try:
        return Codec.from_json(described["codec"]) if "codec" in described else None
    except DataError as error:
        raise RunError(f"{path}: {str(error).rpartition(';')[0]}; use other weights") from error
