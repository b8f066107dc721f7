"""Evaluates several runs as one: they read the data side by side, batch by batch; loss and metrics are those of the averaged prediction.

Shapes: T time, B lane, H horizon, C columns, Q quantiles, S series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from carrywave.data.batch import IGNORED, Batch
from carrywave.data.tables.channels import LEAST
from carrywave.errors import DataError, option
from carrywave.model.sample_weights import for_each_target, known
from carrywave.runs.ensemble.averages import mean_of_odds, mean_of_shares
from carrywave.runs.evaluation import Details, joined, passes
from carrywave.runs.trained_run import Saved
from carrywave.tasks.metrics import Metric
from carrywave.tasks.task import Part


def evaluate_together(
    members: Sequence[Saved],
    parts: Sequence[Part],
    *,
    details: Details,
    tops: Sequence[int] = (),
    look: Callable[[Metric], None] | None = None,
) -> dict[str, float]:
    """As `runs.evaluation.evaluate`, of the average; `parts` are the same data as each run reads it. The loss is that of the first."""
    _check_parts(members, parts)
    first, mesh, device = members[0], members[0].mesh, members[0].mesh.device
    task = replace(first.task, bands=None)  # those of a run are around its own forecasts
    meter = task.meter(device, parts[0], by_series="series" in details.by, tops=tops)
    sums = torch.zeros(1, 2, dtype=torch.float64, device=device)
    units = _units(members, parts)
    for batch, outs, target, targets in _side_by_side(members, parts):
        weights = None if batch.weights is None else for_each_target(batch.weights, target, pooled=first.model.pooled)
        if first.spec.task == "language":  # of its many tokens, only the probability of the right one is kept
            logs_TB = torch.logsumexp(torch.stack(outs), dim=0) - math.log(len(outs))
            real = (target != IGNORED).double() if weights is None else torch.where(target != IGNORED, weights, 0.0)
            sums[0] += torch.stack([-torch.where(real > 0, logs_TB * real, 0.0).sum(dtype=torch.float64), real.sum(dtype=torch.float64)])
            continue
        if first.spec.data.multi_label:
            out = mean_of_odds(outs)
        else:
            out = mean_of_shares(outs) if first.task.codec.labels else _mean_of_numbers(outs, _values(members, targets), batch, units)
        loss_sum, count = first.model.head.score(out, known(target), weights=weights)  # type: ignore[operator]
        sums[0] += torch.stack([loss_sum, count]).to(torch.float64)
        if meter is not None:
            meter.update(out, target, batch.sequence, batch.offset)
    loss_sum, count = mesh.sum_(sums)[0].tolist()
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
        if (transform := member.task.codec.transform) in LEAST:
            raise DataError(
                f"{member.run.path} forecasts logarithms (data.transform={transform}), whose average is not that of the forecasts; "
                "evaluate runs one by one"
            )
        if member.task.codec.distribution != "none":
            raise DataError(
                f"{member.run.path} forecasts a distribution (data.distribution={member.task.codec.distribution}), and the average of "
                "several has no likelihood of its own; evaluate runs one by one"
            )
        if _read(member, part) != _read(members[0], parts[0]):
            raise DataError(
                f"{members[0].run.path} and {member.run.path} have other rows as {part.name}, or read them otherwise, so they cannot be "
                f"evaluated as one; pass a file to evaluate on with {option('data')}"
            )


def _read(member: Saved, part: Part) -> list[object]:
    """What must be the same for all: the files, where sequences begin, how long they are, and which of their steps only warm up."""
    files = [part.name] if part.name not in ("valid", "test") else [part.name, member.spec.data.train, getattr(member.spec.data, part.name)]
    arrays = (part.data.starts, part.view.lengths, part.view.warm)
    return [*files, member.task.codec.transform, *(None if array is None else np.asarray(array).tolist() for array in arrays)]


def _units(members: Sequence[Saved], parts: Sequence[Part]) -> list[Tensor | None]:
    """How many of the first run's units one unit of each run is, for each series and column [S, C]; None where they are the same."""
    ratios: list[Tensor | None] = []
    sizes = [_sizes(member, part) for member, part in zip(members, parts, strict=True)]
    for size in sizes:
        same = size is sizes[0] or (size is not None and sizes[0] is not None and np.array_equal(size, sizes[0]))
        ratios.append(None if same or size is None or sizes[0] is None else torch.from_numpy(size / sizes[0]).to(members[0].mesh.device))
    return ratios


def _sizes(member: Saved, part: Part) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
    codec = member.task.codec
    if codec.task == "regression":
        return np.array(codec.target_std, np.float64)[None]
    return None if part.data.units is None or not codec.targets else np.ascontiguousarray(part.data.units[:, list(codec.targets)])


def _values(members: Sequence[Saved], targets: Sequence[Tensor]) -> list[Tensor]:
    """The targets without the weights that the NSE loss has beside them."""
    weighted = [member.spec.each_step and member.spec.train.loss == "nse" for member in members]
    return [target[..., 0] if both else target for target, both in zip(targets, weighted, strict=True)]


def _mean_of_numbers(outs: Sequence[Tensor], targets: Sequence[Tensor], batch: Batch, units: Sequence[Tensor | None]) -> Tensor:
    """The average in the first run's units. What runs add to their output (a naive forecast) is in their targets as well, and so is the
    mean that was taken off: errors are averaged, which have neither.
    """
    target = targets[0].double()
    mean = torch.zeros_like(outs[0], dtype=torch.float64)
    spread = (..., None) if outs[0].ndim > target.ndim else (...,)  # one number for each quantile
    for out, run_target, unit_SC in zip(outs, targets, units, strict=True):
        error = out.double() - run_target.double()[spread]
        if unit_SC is not None:
            unit_BC = unit_SC[batch.sequence.clamp(min=0)] if len(unit_SC) > 1 else unit_SC
            error = error * (unit_BC if target.ndim < 4 else unit_BC[:, None])[spread]
        mean += error / len(outs)
    return (mean + target[spread]).to(outs[0].dtype)


def _side_by_side(members: Sequence[Saved], parts: Sequence[Part]) -> Iterator[tuple[Batch, list[Tensor], Tensor, list[Tensor]]]:
    """Yield each batch, what each run makes of it, its targets as metrics see them, without those of weight 0, and all of its targets as
    each run reads them. All read it in the batches of the first.
    """
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in members]
    walks = []
    for number, (member, part) in enumerate(zip(members, parts, strict=True)):
        spec = member.spec.model_copy(update={"batch": members[0].spec.batch})

        def observe(out: Tensor, target: Tensor | None, number: int = number, task: str = member.spec.task) -> None:
            if target is None:
                return
            if task == "language":
                wide = out.to(torch.promote_types(out.dtype, torch.float32))
                out = torch.log_softmax(wide, dim=-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
            # A copy: what is shown may be overwritten by the next batch.
            seen[number].append((out.clone(), target.clone()))

        walks.append(passes(member.model, spec, part, mesh=member.mesh, stage=member.stage, observe=observe))
    for together in zip(*walks, strict=True):
        shown = [each[-1] for each in seen if each]
        if len(shown) == len(members):  # a worker without lanes of a small batch is shown nothing
            targets = [target if batch.targets is None else batch.targets for (batch, _), (_, target) in zip(together, shown, strict=True)]
            yield together[0][0], [out for out, _ in shown], shown[0][1], targets
        for each in seen:
            each.clear()
