"""Exports a trained run: `export_run` writes a folder that is complete and checked, or nothing."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrywave.data.files.remote import check_local
from carrywave.errors import RunError, UserError, from_system, option, remedy_for
from carrywave.exporting import onnx_file, onnx_graph, torch_program, triton
from carrywave.exporting.comparison import largest_difference, largest_step_difference
from carrywave.exporting.description import describe
from carrywave.exporting.lost import MOST_TARGETS, mean_loss, valid_part
from carrywave.exporting.portable import Portable
from carrywave.exporting.single_step import onnx_step
from carrywave.exporting.single_step.c_file import c_file
from carrywave.exporting.single_step.formula import Formula
from carrywave.exporting.single_step.network import check_steps, network
from carrywave.exporting.single_step.step_module import StepModule
from carrywave.model.heads.crf import CRF
from carrywave.model.model import Model
from carrywave.model.portable_names import EXPORTED, outside
from carrywave.prediction.saved_run import Saved, open_run
from carrywave.runs.checkpoint.atomic_files import sync_path, write_tensors
from carrywave.spec.load import dump
from carrywave.step.worker_setup import tensors_of
from carrywave.tasks.task import Part

FORMATS = ("safetensors", "onnx", "torch", "c")
DESCRIPTION = "model.json"
Note = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was written, and what the check of it found."""

    folder: Path
    files: tuple[str, ...]
    difference: float | None = None  # the largest from the model, relative; None: the weights are the model's own bytes
    loss: float | None = None  # of int8, on the valid data
    loss_before: float | None = None


def export_run(
    path: Path | str,
    to: str,
    output: Path | str | None = None,
    *,
    stateful: bool = False,
    step: bool = False,
    int8: bool = False,
    data: Any = None,
    note: Note | None = None,
) -> Exported:
    """Write the best weights of a run for another runtime, into a new folder (by default exports/NAME-FORMAT).

    ONNX models and torch programs are run and compared with our model before they get their name. `stateful`: the carry goes in and comes
    out. `step`: one call is one step, in plain operators. `int8`: ONNX with quantized weights; `data` is what their loss is measured on, by
    default the run's valid data.

    >>> import carrywave as cw
    >>> how = {"batch": {"lanes": 2, "steps": 8}, "train": {"epochs": 1}}
    >>> result = cw.fit({"hidden": 4, "layers": 1}, "the carry goes on and on\\n" * 8, task="language", **how)
    >>> cw.export(result.run, "safetensors", "exports/text").files
    ('model.safetensors', 'model.json')
    """
    if to not in FORMATS:
        raise UserError(f"{to} is not a format; use one of {', '.join(FORMATS)}")
    if int8 and to != "onnx":
        raise UserError(f"{option('int8')} is for {option('to', 'onnx')}; remove it")
    for form, wanted in (("stateful", stateful), ("step", step)):
        if wanted and to == "c":
            raise UserError(f"{option('to', 'c')} always writes a single step with its state; remove {option(form)}")
        if wanted and to not in ("onnx", "torch"):
            raise UserError(f"{option(form)} is for {option('to', 'onnx')} and {option('to', 'torch')}; remove it")
    if step and (stateful or int8):
        other = option("stateful" if stateful else "int8")
        raise UserError(f"{option('step')} and {other} are two forms of a model; remove one of them")
    if data is not None and not int8:
        raise UserError(f"{option('data')} is what the loss of {option('int8')} is measured on; remove it, or ask for {option('int8')}")
    named = None if output is None else _free(Path(output))
    saved = open_run(path, "cpu")
    if not isinstance(saved.model, Model):
        raise RunError(f"{path} was trained with your own modules; export them yourself, with the weights in {saved.run.weights}")
    if int8 and isinstance(saved.model.head, CRF):
        raise UserError(f"{option('int8')} is judged by the loss of scores, but a CRF gives labels; remove it")
    folder = _free(Path("exports", f"{_name(saved)}-{to}") if named is None else named)
    note = note or (lambda line: None)
    if saved.task.linear is not None:
        weighs = f"{1 - saved.task.linear.share:.0%} of each answer of the run"
        note(f"exported is the network alone, without the linear part, which is {weighs}; train with model.linear=0 to lose nothing")
    if to == "safetensors":
        return _safetensors(saved, folder)
    one = step or to == "c"
    if one:
        check_steps(saved.model)
    portable = Portable(saved.model.float(), stateful=stateful or one).eval()
    formula: Formula | None = None
    if to == "c":
        text, formula, gap = c_file(saved.task, portable, _name(saved), note)
        files, figures = {"model.c": text.encode()}, {"difference": gap}
    elif step:
        formula = network(portable)
        files, figures = _one_step(saved, portable, formula, to)
    elif to == "torch":
        traced = torch_program.archive(portable)
        figures = {"difference": largest_difference(portable, torch_program.runner(traced), what="the torch program")}
        files = {"model.pt2": traced}
    else:
        files, figures = _onnx(saved, portable, folder, int8=int8, data=data, note=note)
    files[DESCRIPTION] = describe(saved.task, portable, to, "int8" if int8 else "float32", formula).encode()
    # Only now, so that nothing has to be cleared away if the work before is stopped.
    with _whole_or_nothing(folder) as draft:
        for name, content in files.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(content)
    return Exported(folder, tuple(files), **figures)


def _safetensors(saved: Saved, folder: Path) -> Exported:
    assert isinstance(saved.model, Model)
    tensors = tensors_of(saved.model)
    named = {theirs: tensors[ours] for ours, theirs in outside(tensors, saved.model.lstm).items()}
    about = {"format": "pt", EXPORTED: "1", "codec": saved.task.codec.to_json(), "spec": dump(saved.spec)}
    precision = str(saved.model.lstm.dtype).removeprefix("torch.")
    description = describe(saved.task, Portable(saved.model), "safetensors", precision)
    with _whole_or_nothing(folder) as draft:
        with (draft / "model.safetensors").open("wb") as file:
            write_tensors(file, named, about, sealed=True)
        (draft / DESCRIPTION).write_text(description, encoding="utf-8")
    return Exported(folder, ("model.safetensors", DESCRIPTION))


def _one_step(saved: Saved, portable: Portable, formula: Formula, to: str) -> tuple[dict[str, bytes], dict[str, float]]:
    """The file of a single step, and the largest difference from the model over many of them."""
    if to == "torch":
        data = torch_program.archive(StepModule(formula))
        name, run, what = "model.pt2", torch_program.runner(data), "the torch program"
    else:
        data = onnx_step.graph(formula, _about(saved)).SerializeToString()
        name, run, what = "model.onnx", onnx_file.runner(data, formula), "the ONNX model"
    return {name: data}, {"difference": largest_step_difference(portable, formula, run, what=what)}


def _about(saved: Saved) -> str:
    return f"{saved.spec.task} model of {_name(saved)}, by carrywave export; see {DESCRIPTION}"


def _onnx(
    saved: Saved, portable: Portable, folder: Path, *, int8: bool, data: Any, note: Note
) -> tuple[dict[str, bytes], dict[str, float]]:
    """The files, and what the checks of the model found."""
    # First of all: a name that cannot be used, or data that cannot be read, should not be noticed after minutes of work.
    config = triton.config(portable, folder.absolute().name) if portable.stateful else None
    part = valid_part(saved, data) if int8 else None
    about = _about(saved)
    model = onnx_graph.graph(portable, about)
    gap = largest_difference(portable, onnx_file.runner(model.SerializeToString(), portable), what="the ONNX model")
    losses: dict[str, float] = {}
    if part is not None:
        most, limit = math.inf, ""
        if data is None:
            most, limit = MOST_TARGETS, f" (up to {MOST_TARGETS:,} targets; {option('data')} measures on all that it is given)"
        if (cell := portable.model.lstm.cell).name != "lstm":
            note(f"the weights of the {cell.name.upper()} layers stay in float32: onnxruntime quantizes those of LSTMs only")
        note(f"measuring the loss on {part.name}{limit}, before and after quantization")
        model = onnx_file.quantized(onnx_graph.graph(portable, about, untie=True))
        run = onnx_file.runner(model.SerializeToString(), portable)
        gap = largest_difference(portable, run, what="the int8 model", tolerance=None)
        losses = _cost_of_int8(saved, portable, part, most)
    files = {"1/model.onnx" if portable.stateful else "model.onnx": model.SerializeToString()}
    if config is not None:
        files["config.pbtxt"] = config.encode()
    return files, {"difference": gap, **losses}


def _cost_of_int8(saved: Saved, portable: Portable, part: Part, most: float) -> dict[str, float]:
    """The loss before and after. Streams are read with their carry, whether the file that is written takes one or not."""
    reader = Portable(portable.model, stateful=not portable.model.reads_whole).eval()
    graphs = {"loss_before": onnx_graph.graph(reader), "loss": onnx_file.quantized(onnx_graph.graph(reader, untie=True))}

    def loss(graph: Any) -> float:
        return mean_loss(reader, onnx_file.runner(graph.SerializeToString(), reader), saved, part, most=most)

    return {name: loss(graph) for name, graph in graphs.items()}


def _name(saved: Saved) -> str:
    """The name of a run: the last part of its path."""
    return saved.run.path.resolve().name


def _free(folder: Path) -> Path:
    """Refuse a folder that holds something already: an export is never mixed with another, or with anything else."""
    check_local(folder)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; remove it, or choose another folder with {option('output')}")
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file, and an export is a folder; choose another name with {option('output')}")
        parent = next(each for each in folder.absolute().parents if each.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UserError(
                f"{folder} cannot be written: {parent} is read-only or no folder; choose another folder with {option('output')}"
            )
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}; choose another folder with {option('output')}") from error
    return folder


@contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder that gets its name once everything in it is written; otherwise nothing is left of it."""
    made = [parent for parent in folder.absolute().parents if not parent.exists()]
    draft: Path | None = None
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name[:40]}.", suffix=".part", dir=folder.absolute().parent))
        yield draft
        draft.chmod(0o777 & ~_umask())
        for file in draft.rglob("*"):
            sync_path(file)
        os.replace(draft, folder)  # an empty folder gives way to it
        sync_path(folder.absolute().parent)
    except BaseException as error:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        if isinstance(error, OSError):
            remedy = remedy_for(error, "make the folder writable")
            raise from_system(error)(
                f"{folder} could not be written: {error.strerror or error}; {remedy}, or choose another folder"
            ) from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
