"""`cw.evaluate`: loss and metrics of a run, or of several as one, on its own or other data; as a whole and by column, series or label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from carrywave.data.inputs import file_of
from carrywave.data.prepare import read_python
from carrywave.errors import DataError, UserError, option
from carrywave.model.opaque_model import Loss
from carrywave.parallel.process_state import leaving_no_trace
from carrywave.parallel.world import join, leave, raise_on_all
from carrywave.prediction.ensemble import Paths, evaluate_together, open_members, paths_of
from carrywave.prediction.evaluation import Details, Kept, evaluate
from carrywave.prediction.saved_run import Saved, changed_since, open_run, own_data, warn
from carrywave.step.checks.arguments import check_loss
from carrywave.tasks.kind import Part
from carrywave.tasks.metrics.labels import Confusion


@leaving_no_trace
def evaluate_run(
    path: Paths,
    data: Any = None,
    device: str = "auto",
    *,
    model: nn.Module | None = None,
    top: int | Sequence[int] = (),
    confusion: bool = False,
    note: Callable[[str], None] | None = None,
    by: str | Sequence[str] = (),
    loss: Loss | None = None,
) -> dict[str, object]:
    """Loss and metrics of the best weights, on a file or an object as `fit` accepts them, or on the run's own test (or else valid) file.

    `by` asks for more rows, under `by_series` and so on: by column, series or step for a forecast, in the units of the data; by label for
    labels. `top` adds how often the target is among so many of the likeliest labels (`top_3_accuracy`), and `confusion=True` a confusion
    matrix: `{"labels": […], "counts": […]}`, where row i counts the predictions for targets of label i. Both `by` and `top` may be one
    or several.

    A list of runs is evaluated as one: by the average of their predictions, with the loss of the first.

    `model` is the model of a run that was trained with modules of the user's own, and `loss` the loss that `fit` was given with it.

    Under a launcher, each worker evaluates its part, and all return the same. Oddities in the data are warnings, or lines for `note`.

    >>> import carrywave as cw
    >>> sequences = [([[float(up)]] * 4, "up" if up else "down") for up in [0, 1] * 10]
    >>> how = {"task": "classification", "batch": {"tokens": 64}, "train": {"epochs": 1}}
    >>> result = cw.fit({"hidden": 4, "layers": 1}, sequences, **how)
    >>> list(cw.evaluate(result.run, sequences))
    ['split', 'loss', 'accuracy', 'macro_f1', 'linear_accuracy']
    """
    world = join(device)
    with raise_on_all(world, no_timeout=True):
        check_loss(loss, model)
        paths = paths_of(path)
        if len(paths) > 1 and model is not None:
            raise UserError("several runs are evaluated as one only if their models are in their folders; pass one run with model=...")
        members = [open_run(paths[0], device, model, world=world, loss=loss)] if len(paths) == 1 else open_members(paths, device, world)
        saved = members[0]
        groups = _checked_groups((by,) if isinstance(by, str) else by, saved)
        details = Details(groups, _checked_tops((top,) if isinstance(top, int) else top, saved, confusion=confusion))
        parts = [_part(member, data) for member in members]
    for line in parts[0].notes if world.rank == 0 else ():
        (note or warn)(line)
    if len(members) > 1:
        values = evaluate_together(members, parts, details)
    else:
        values = evaluate(saved.model, saved.task, parts[0], mesh=saved.mesh, kept=Kept(saved.stage), details=details)
    leave(world)
    found: dict[str, object] = {"split": parts[0].name, **values}
    if confusion and isinstance(details.metric, Confusion):
        found["confusion"] = {"labels": list(saved.task.codec.labels), "counts": details.metric.counts_KK.tolist()}
    return found | {f"by_{name}": rows for name, rows in details.rows.items()}


def _checked_groups(by: Sequence[str], saved: Saved) -> tuple[str, ...]:
    task, groups = "regression at every step" if saved.spec.each_step else saved.spec.task, saved.task.kind.by
    for name in by:
        if name not in groups:
            remedy = f"use {', '.join(groups)}" if groups else "remove it"
            raise UserError(f"there are no metrics of {task} by {name} for {saved.run.path}; {remedy}")
    levels = saved.spec.data.levels if task == "forecasting" else None
    if by and levels is not None and 0.5 not in levels:
        fact = f"metrics by {by[0]} are of a point forecast, but {saved.run.path} has no median among its data.quantiles"
        raise UserError(f"{fact}; remove it, or train with 0.5 among them")
    return tuple(dict.fromkeys(by))


def _checked_tops(tops: Sequence[int], saved: Saved, *, confusion: bool) -> tuple[int, ...]:
    spec, classes = saved.spec, len(saved.task.codec.labels)
    for name, wanted in (("top", bool(tops)), ("confusion", confusion)):
        if wanted and (not classes or spec.data.multi_label or (name == "top" and spec.model.crf)):
            raise UserError(f"{option(name)} is for one likely label each, which {saved.run.path} does not have; remove it")
    for top in tops:
        if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= classes:
            raise UserError(f"{option('top')} {top} is not between 1 and {classes}, the number of classes; change it")
    return tuple(dict.fromkeys(tops))


def _part(saved: Saved, data: Any) -> Part:
    if data is not None:
        sequences = read_python(data, saved.task.codec, saved.spec)
        part = saved.task.part(file_of(data, saved.spec) or "data", sequences)
        return replace(part, notes=(*sequences.notes, *part.notes))
    if saved.spec.data.train is None:
        raise DataError(f"{saved.run.path} was trained on data from Python, which is not stored in the run; pass data to evaluate on")
    prepared = own_data(saved)
    for name, part_data in (("test", prepared.test), ("valid", prepared.valid)):
        if part_data is not None:
            notes = changed_since(saved, name)
            part = saved.task.with_line(prepared.train).part(name, part_data)
            return replace(part, notes=(*notes, *part.notes))
    raise DataError(f"{saved.run.path} was trained without valid or test data; pass a file with {option('data')}")
