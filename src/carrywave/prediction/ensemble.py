"""Several trained runs as one: the mean of what they predict, and the metrics of that mean.

Probabilities are averaged, numbers in the units of the data, and quantiles level by level (Vincent's average: the mean of the quantile
functions), so those of the mean do not cross, either. Runs that do not predict the same thing are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from carrywave.data.codec import Codec
from carrywave.data.files.rows import Row
from carrywave.errors import DataError, RunError, UserError, option
from carrywave.model.heads.scoring import for_each_target, known
from carrywave.parallel.world import World
from carrywave.prediction.evaluation import Details, Kept, counted, passes
from carrywave.prediction.saved_run import Saved, open_run
from carrywave.tasks.kind import Part

Paths = Path | str | Sequence[Path | str]
# How numbers are scaled, and what is only known of the training data.
MAY_DIFFER = (
    *("mean", "std", "target_mean", "target_std", "names", "means", "stds", "spreads"),
    *("own_scale", "scale_season", "frequency", "date_order", "utc", "zone", "label_kind"),
)


def paths_of(runs: Paths) -> list[Path | str]:
    """The runs that are named, at least one."""
    paths = [runs] if isinstance(runs, Path | str) else list(runs)
    if not paths or not all(isinstance(each, Path | str) for each in paths):
        raise UserError("pass the folder of a run, or a list of several folders")
    return paths


def open_members(paths: Sequence[Path | str], device: str, world: World) -> list[Saved]:
    """The best weights of several runs. Every worker holds all of them as a whole."""
    members = [open_run(path, device, world=world, whole=True) for path in paths]
    first = members[0]
    for member in members:
        if member.spec.model.crf or member.spec.task == "transcription":
            raise UserError(f"{member.run.path} chooses whole sequences of labels, which have no average; pass one run")
        codecs = first.task.codec, member.task.codec
        names = [each.name for each in fields(Codec) if each.name not in MAY_DIFFER]
        differ = [name for name in names if len({repr(getattr(codec, name)) for codec in codecs}) > 1]
        if first.spec.task == "forecasting":
            differ += [name for name in ("horizon", "levels", "bands") if getattr(first.spec.data, name) != getattr(member.spec.data, name)]
        if differ:
            raise RunError(
                f"{first.run.path} and {member.run.path} do not predict the same thing: they differ in {differ[0]}; "
                "pass runs that were trained for the same task on the same kind of data"
            )
    return members


def mean_of_shares(logits: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of the probabilities that logits [..., classes] stand for."""
    logs = torch.stack([torch.log_softmax(each.to(torch.promote_types(each.dtype, torch.float32)), dim=-1) for each in logits])
    return torch.logsumexp(logs, dim=0) - math.log(len(logits))


def mean_of_odds(logits: Sequence[Tensor]) -> Tensor:
    """The log odds of the mean of the probabilities that logits stand for, each by itself."""
    wide = torch.stack([each.to(torch.promote_types(each.dtype, torch.float32)) for each in logits])
    return torch.logsumexp(logsigmoid(wide), dim=0) - torch.logsumexp(logsigmoid(-wide), dim=0)


def mean_of_outputs(members: Sequence[Saved], outs: Sequence[Tensor]) -> Tensor:
    """The mean of what the heads of several runs put out, in the scale of the first."""
    first = members[0]
    if first.spec.data.multi_label:
        return mean_of_odds(outs)
    if first.spec.task == "language" or first.task.codec.labels:
        return mean_of_shares(outs)
    wide = [out.double() for out in outs]
    if first.spec.task == "regression":
        codecs = [member.task.codec for member in members]
        scales = [(wide[0].new_tensor(codec.target_std), wide[0].new_tensor(codec.target_mean)) for codec in codecs]
        (std, mean), *_ = scales
        wide = [(out * its_std + its_mean - mean) / std for out, (its_std, its_mean) in zip(wide, scales, strict=True)]
    return torch.stack(wide).mean(0).to(outs[0].dtype)


def mean_of_rows(members: Sequence[Iterable[Row]], places: Sequence[str]) -> Iterator[Row]:
    """Rows of numbers, averaged; the fields in `places` say what a row is for, and are the same in all."""
    for first, *others in zip(*members, strict=True):
        together = (first, *others)
        yield {name: value if name in places else sum(row[name] for row in together) / len(together) for name, value in first.items()}


def evaluate_together(members: Sequence[Saved], parts: Sequence[Part], details: Details) -> dict[str, float]:
    """As `evaluation.evaluate`, of the mean; `parts` are the same data as each run reads it. The loss is that of the first."""
    _check_parts(members, parts)
    first, mesh = members[0], members[0].mesh
    task = replace(first.task, bands=None)  # those of a run are around its own forecasts
    meter = task.meter(mesh.device, parts[0], by_series="series" in details.by, tops=details.tops)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in members]

    def observe(number: int, out: Tensor, target: Tensor | None) -> None:
        if target is not None:
            seen[number].append((out.clone(), target.clone()))  # what is shown may be overwritten by the next batch

    walks = [
        passes(
            member.model,
            member.spec.model_copy(update={"batch": first.spec.batch}),  # all read the data in the batches of the first
            part,
            mesh=member.mesh,
            kept=Kept(member.stage),
            observe=lambda out, target, *_, number=number: observe(number, out, target),
        )
        for number, (member, part) in enumerate(zip(members, parts, strict=True))
    ]
    for (batch, _), *_ in zip(*walks, strict=True):
        shown = [each[-1] for each in seen if each]
        for each in seen:
            each.clear()
        if len(shown) < len(members):  # a worker without lanes of a small batch is shown nothing
            continue
        out, target = mean_of_outputs(members, [out for out, _ in shown]), shown[0][1]
        weights = None if batch.weights is None else for_each_target(batch.weights, target, pooled=first.model.pooled)
        sums += torch.stack(first.model.head.score(out, known(target), weights=weights)).to(torch.float64)  # type: ignore[operator]
        if meter is not None:
            meter.update(out, target, batch.sequence, batch.offset)
    return counted(task, parts[0], mesh, sums, meter, details)


def _check_parts(members: Sequence[Saved], parts: Sequence[Part]) -> None:
    """Refuse runs for which the data has other sequences, steps or targets: each may have held out other rows of train, say."""
    for member, part in zip(members, parts, strict=True):
        codec = member.task.codec
        if codec.transform not in ("none", "diff") or codec.distribution != "none":
            key = "distribution" if codec.distribution != "none" else "transform"
            fact = f"{member.run.path} forecasts with data.{key}={getattr(codec, key)}, whose average is not that of the forecasts"
            raise DataError(f"{fact}; evaluate runs one by one")
        if _read(member, part) != _read(members[0], parts[0]):
            raise DataError(
                f"{members[0].run.path} and {member.run.path} have other rows as {part.name}, or read them otherwise, so they cannot be "
                f"evaluated as one; pass a file to evaluate on with {option('data')}"
            )


def _read(member: Saved, part: Part) -> list[object]:
    """What must be the same for all: the files, where sequences begin, how long they are, how many steps warm up, and what is forecast."""
    data, codec, spec = part.data, member.task.codec, member.spec.data
    files = [part.name, spec.train, getattr(spec, part.name)] if part.name in ("valid", "test") else [part.name]
    forecast = [member.spec.starts_from, data.units] if codec.task == "forecasting" else []
    read = [*files, codec.transform, data.starts, part.view.lengths, part.view.warm, *forecast]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in read]
