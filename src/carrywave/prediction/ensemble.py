"""Several trained runs as one: what they predict is averaged, and metrics are those of the average.

Runs that do not predict the same thing are refused. How numbers are scaled may differ: they are averaged in the units of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from carrywave.data.batch import Batch
from carrywave.data.codec import Codec
from carrywave.data.sequences import Sequences
from carrywave.errors import DataError, RunError, UserError, option
from carrywave.model.sample_weights import for_each_target, known
from carrywave.parallel.world import World
from carrywave.prediction.averages import mean_of_odds, mean_of_shares
from carrywave.prediction.evaluation import Details, joined, passes
from carrywave.prediction.outputs import Numbers, Outputs
from carrywave.prediction.saved_run import Saved, open_run
from carrywave.tasks.metrics import Metric
from carrywave.tasks.task import Part

Paths = Path | str | Sequence[Path | str]
# How numbers are scaled, and what is only known of the training data.
MAY_DIFFER = (
    *("mean", "std", "target_mean", "target_std", "names", "means", "stds", "spreads"),
    *("own_scale", "scale_season", "frequency", "date_order", "utc", "zone", "label_kind"),
)


def paths_of(runs: Paths) -> list[Path | str]:
    """The runs that are named, at least one."""
    if isinstance(runs, Path | str):
        return [runs]
    paths = list(runs)
    if not paths or not all(isinstance(each, Path | str) for each in paths):
        raise UserError("pass the folder of a run, or a list of several folders")
    return paths


def open_members(paths: Sequence[Path | str], device: str, world: World) -> list[Saved]:
    """The best weights of several runs. Every worker holds all of them as a whole."""
    members = [open_run(path, device, world=world, whole=True) for path in paths]
    for member in members:
        if member.spec.model.crf or member.spec.task == "transcription":
            what = "chooses whole sequences of labels (model.crf)" if member.spec.model.crf else "puts each label at a step of its own"
            raise UserError(f"{member.run.path} {what}, and has no probabilities of single ones to average; pass one run")
        _check_alike(members[0], member)
    return members


def _check_alike(first: Saved, other: Saved) -> None:
    codecs = first.task.codec, other.task.codec
    differs = [
        each.name for each in fields(Codec) if each.name not in MAY_DIFFER and len({repr(getattr(c, each.name)) for c in codecs}) > 1
    ]
    if first.spec.task == "forecasting":
        differs += [name for name in ("horizon", "levels", "bands") if getattr(first.spec.data, name) != getattr(other.spec.data, name)]
    if differs:
        what = differs[0] if differs[0].endswith("s") else f"{differs[0]}s".replace("ys", "ies")
        raise RunError(
            f"{first.run.path} and {other.run.path} do not predict the same thing: their {what} differ; "
            "pass runs that were trained for the same task on the same kind of data"
        )


def mean_of_outputs(members: Sequence[Saved], outs: Sequence[Tensor]) -> Tensor:
    """The average of what runs predict, in the place of the output of the first."""
    first = members[0]
    if first.spec.data.multi_label:
        return mean_of_odds(outs)
    if first.spec.task == "language" or first.task.codec.labels:
        return mean_of_shares(outs)
    wide = [out.double() for out in outs]
    if first.spec.task == "regression":
        codecs = [member.task.codec for member in members]
        scales = [(wide[0].new_tensor(codec.target_std), wide[0].new_tensor(codec.target_mean)) for codec in codecs]
        wide = [out * std + mean for out, (std, mean) in zip(wide, scales, strict=True)]
        std, mean = scales[0]
        return ((torch.stack(wide).mean(0) - mean) / std).to(outs[0].dtype)
    return torch.stack(wide).mean(0).to(outs[0].dtype)


class AveragedOutputs:
    """The average of what several runs predict for sequences, in the place of the `Outputs` of the first."""

    def __init__(self, members: Sequence[Saved]) -> None:
        self.saved, self.members = members[0], members
        self._each = [Outputs(member, shares=True) for member in members]

    def of(self, *data: Sequences) -> list[Numbers]:
        """As `Outputs.of`, for the sequences as each of the runs reads them. Empty on ranks other than 0. Collective."""
        by_run = [outputs.of(sequences) for outputs, sequences in zip(self._each, data, strict=True)]
        means = [mean_of_outputs(self.members, [torch.from_numpy(out) for out in outs]) for outs in zip(*by_run, strict=True)]
        chosen = self.saved.spec.task == "tagging" and not self.saved.spec.data.multi_label
        return [(mean.argmax(-1) if chosen else mean).numpy() for mean in means]


def evaluate_together(
    members: Sequence[Saved],
    parts: Sequence[Part],
    *,
    details: Details,
    tops: Sequence[int] = (),
    look: Callable[[Metric], None] | None = None,
) -> dict[str, float]:
    """As `evaluation.evaluate`, of the average; `parts` are the same data as each run reads it. The loss is that of the first."""
    _check_parts(members, parts)
    first, mesh = members[0], members[0].mesh
    task = replace(first.task, bands=None)  # those of a run are around its own forecasts
    meter = task.meter(mesh.device, parts[0], by_series="series" in details.by, tops=tops)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch, outs, target in _side_by_side(members, parts):
        out = mean_of_outputs(members, outs)
        weights = None if batch.weights is None else for_each_target(batch.weights, target, pooled=first.model.pooled)
        sums += torch.stack(first.model.head.score(out, known(target), weights=weights)).to(torch.float64)  # type: ignore[operator]
        if meter is not None:
            meter.update(out, target, batch.sequence, batch.offset)
    loss_sum, count = mesh.sum_(sums).tolist()
    if not count:
        raise DataError(f"{parts[0].name} contains no targets: every label in it is ignored; add labels")
    metrics: dict[str, float] = {}
    if meter is not None:
        meter = joined(meter, mesh)
        metrics = meter.values()
        details.rows.update({by: meter.rows(by) for by in details.by})
        if look is not None:
            look(meter)
    loss = loss_sum / count
    return {"loss": loss} | first.task.derived(loss) | metrics | parts[0].baseline


def _check_parts(members: Sequence[Saved], parts: Sequence[Part]) -> None:
    """Refuse runs for which the data has other sequences, steps or targets: each may have held out other rows of train, say."""
    for member, part in zip(members, parts, strict=True):
        codec = member.task.codec
        if codec.transform not in ("none", "diff") or codec.distribution != "none":
            key = "distribution" if codec.distribution != "none" else "transform"
            what = "a distribution" if key == "distribution" else "other values than those of the data"
            what += f" (data.{key}={getattr(codec, key)})"
            raise DataError(f"{member.run.path} forecasts {what}, whose average is not that of the forecasts; evaluate runs one by one")
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


def _side_by_side(members: Sequence[Saved], parts: Sequence[Part]) -> Iterator[tuple[Batch, list[Tensor], Tensor]]:
    """Yield each batch, what each run makes of it, and its targets as metrics see them. All read it in the batches of the first."""
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in members]

    def walk(number: int) -> Iterator[tuple[Batch, object]]:
        member = members[number]

        def observe(out: Tensor, target: Tensor | None, *_: object) -> None:
            if target is not None:
                seen[number].append((out.clone(), target.clone()))  # what is shown may be overwritten by the next batch

        spec = member.spec.model_copy(update={"batch": members[0].spec.batch})
        return passes(member.model, spec, parts[number], mesh=member.mesh, stage=member.stage, observe=observe)

    for together in zip(*map(walk, range(len(members))), strict=True):
        shown = [each[-1] for each in seen if each]
        if len(shown) == len(members):  # a worker without lanes of a small batch is shown nothing
            yield together[0][0], [out for out, _ in shown], shown[0][1]
        for each in seen:
            each.clear()
