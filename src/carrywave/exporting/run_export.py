"""Exports a trained run: `export_run` writes a folder that is complete and checked, or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from carrywave.data.files.remote import check_local
from carrywave.errors import RunError, UserError, from_system, option, remedy_for
from carrywave.exporting import c_compiler, onnx_file, onnx_graph, torch_program
from carrywave.exporting.c_file import check_c, source
from carrywave.exporting.comparison import largest_difference, largest_step_difference
from carrywave.exporting.description import describe
from carrywave.exporting.portable import Portable
from carrywave.model.model import Model
from carrywave.model.portable_names import EXPORTED, outside
from carrywave.prediction.saved_run import Saved, open_run
from carrywave.runs.checkpoint.atomic_files import sync_path, write_tensors
from carrywave.spec.load import dump
from carrywave.step.worker_setup import tensors_of

FORMATS = ("safetensors", "onnx", "torch", "c")
DESCRIPTION = "model.json"
Note = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was written, and what the check of it found."""

    folder: Path
    files: tuple[str, ...]
    difference: float | None = None  # the largest from the model, relative; None: it was not run, or the weights are the model's own bytes


def export_run(
    path: Path | str, to: str, output: Path | str | None = None, *, stateful: bool = False, step: bool = False, note: Note | None = None
) -> Exported:
    """Write the best weights of a run for another runtime, into a new folder (by default exports/NAME-FORMAT).

    ONNX models, torch programs and C files are run and compared with our model before they get their name. `stateful`: the carry goes in
    and comes out. `step`: one call is one step, in plain operators, as it always is in C.

    >>> import carrywave as cw
    >>> how = {"batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1}}
    >>> result = cw.fit({"hidden": 4, "layers": 1}, "the carry goes on and on\\n" * 8, task="language", **how)
    >>> cw.export(result.run, "safetensors", "exports/text").files
    ('model.safetensors', 'model.json')
    """
    if to not in FORMATS:
        raise UserError(f"{to} is not a format; use one of {', '.join(FORMATS)}")
    for form, wanted in (("stateful", stateful), ("step", step)):
        if wanted and to not in ("onnx", "torch"):
            raise UserError(f"{option(form)} is for {option('to', 'onnx')} and {option('to', 'torch')}; remove it")
    if step and stateful:
        raise UserError(f"{option('step')} and {option('stateful')} are two forms of a model; remove one of them")
    named = None if output is None else _free(Path(output))
    saved = open_run(path, "cpu")
    if not isinstance(saved.model, Model):
        raise RunError(f"{path} was trained with your own modules; export them yourself, with the weights in {saved.run.weights}")
    folder = _free(Path("exports", f"{_name(saved)}-{to}") if named is None else named)
    note = note or (lambda line: None)
    if saved.task.linear is not None:
        weighs = f"{1 - saved.task.linear.share:.0%} of each answer of the run"
        note(f"exported is the network alone, without the linear part, which is {weighs}; train with model.linear=0 to lose nothing")
    if to == "safetensors":
        return _safetensors(saved, folder)
    portable = Portable(saved.model.float(), stateful=stateful, step=step or to == "c").eval()
    name, data, difference = _written(saved, portable, to, note)
    # Only now, so that nothing has to be cleared away if the work before is stopped.
    with _whole_or_nothing(folder) as draft:
        (draft / name).write_bytes(data)
        (draft / DESCRIPTION).write_text(describe(saved.task, portable, to, "float32"), encoding="utf-8")
    return Exported(folder, (name, DESCRIPTION), difference)


def _written(saved: Saved, portable: Portable, to: str, note: Note) -> tuple[str, bytes, float | None]:
    """The name and content of a file, and its largest difference from the model; None if it could not be run."""
    if to == "c":
        check_c(saved.task, portable)
        text, command = source(saved.task, portable, _name(saved)), c_compiler.compiler()
        if command is None:
            note("no C compiler was found (cc, gcc or clang), so the file was written without being compiled and run")
            return "model.c", text.encode(), None
        run = c_compiler.compiled(text, portable, command)
        return "model.c", text.encode(), c_compiler.largest_c_difference(saved.task, portable, run)
    if to == "torch":
        name, what, data = "model.pt2", "the torch program", torch_program.archive(portable)
        run = torch_program.runner(data)
    else:
        about = f"{saved.spec.task} model of {_name(saved)}, by carrywave export; see {DESCRIPTION}"
        name, what, data = "model.onnx", "the ONNX model", onnx_graph.graph(portable, about).SerializeToString()
        run = onnx_file.runner(data, portable)
    return name, data, (largest_step_difference if portable.step else largest_difference)(portable, run, what=what)


def _safetensors(saved: Saved, folder: Path) -> Exported:
    assert isinstance(saved.model, Model)
    tensors = tensors_of(saved.model)
    named = {theirs: tensors[ours] for ours, theirs in outside(tensors, saved.model.lstm).items()}
    about = {"format": "pt", EXPORTED: "1", "codec": saved.task.codec.to_json(), "spec": dump(saved.spec)}
    precision = str(saved.model.lstm.dtype).removeprefix("torch.")
    description = describe(saved.task, Portable(saved.model), "safetensors", precision)
    with _whole_or_nothing(folder) as draft:
        with (draft / "model.safetensors").open("wb") as file:
            write_tensors(file, named, about)
        (draft / DESCRIPTION).write_text(description, encoding="utf-8")
    return Exported(folder, ("model.safetensors", DESCRIPTION))


def _name(saved: Saved) -> str:
    """The name of a run: the last part of its path."""
    return saved.run.path.resolve().name


def _free(folder: Path) -> Path:
    """Refuse a folder that holds something already: an export is never mixed with another, or with anything else."""
    check_local(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; remove it, or choose another folder with {option('output')}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and an export is a folder; choose another name with {option('output')}")
    return folder


@contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder that gets its name once everything in it is written; otherwise nothing is left of it."""
    made = [parent for parent in folder.absolute().parents if not parent.exists()]
    draft = folder.absolute().with_name(f".{folder.name[:40]}.part")
    try:
        draft.mkdir(parents=True, exist_ok=True)
        yield draft
        for file in draft.rglob("*"):
            sync_path(file)
        os.replace(draft, folder)  # an empty folder gives way to it
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            fact = f"{folder} could not be written: {error.strerror or error}"
            raise from_system(error)(f"{fact}; {remedy_for(error, 'make the folder writable')}, or choose another folder") from error
        raise
