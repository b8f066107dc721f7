"""What forecasts of the best weights on valid say about all later ones, once training ends: how much of what the model adds to the last
value counts, and how far bands reach (`data.bands`).

On a series without anything to learn, such as a random walk, what a trained model adds is noise, and the last value is better. So what it
adds stays as it is where it is surely better than nothing; elsewhere only as much of it counts as is, which may be none. The head is linear
in its weights, so a share of it is a share of these, and the stored weights are all that there is to it.

Shapes: N origins, H horizon, C columns, K shares, G groups of origins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from carrywave.errors import SpecError
from carrywave.model.heads.forecast import Forecast
from carrywave.model.model import Model
from carrywave.parallel.liveness import heartbeat
from carrywave.parallel.world import from_rank_0, raise_on_all
from carrywave.prediction.evaluation import Details, Kept, evaluate
from carrywave.runs.checkpoint.weights import weights_metadata
from carrywave.runs.run_place import BANDS
from carrywave.spec.spec import Spec
from carrywave.tasks.metrics.bands import fitting, within_own
from carrywave.tasks.metrics.kept_forecasts import KeptForecasts
from carrywave.train.evaluations import DataParts, leave_if_asked
from carrywave.train.loop import Loop

SHARES = tuple(tenth / 10 for tenth in range(11))  # of what the model adds
SURE = 2.0  # standard errors by which it must be better than nothing
FEWEST = 8  # groups of origins, by which a standard error is one; with fewer, nothing is chosen
HEAD = "head."  # with which the names of the head's weights begin


@dataclass(frozen=True)
class Found:
    """What the forecasts of valid say."""

    share: float = 1.0  # of what the model adds to the last value
    anew: bool = False  # chosen now: weights that were read before have the whole
    within: Mapping[str, float] | None = None  # how much of valid lies within the bands: by their making, what was asked for

    def of_head(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights that were read before, with the share of those of the head."""
        return {name: tensor * self.share if self.anew and name.startswith(HEAD) else tensor for name, tensor in named.items()}


def check(spec: Spec, parts: DataParts) -> None:
    """Refuse bands that nothing can be measured on, before anything is trained."""
    if spec.task == "forecasting" and spec.data.bands is not None and parts.valid is None:
        raise SpecError("data.bands are measured on valid, and there is none; set data.valid, data.share or data.split, or remove them")


def look(loop: Loop) -> Found:
    """Choose the share and measure the bands, with the best weights in place, and write both into the run."""
    spec = loop.spec
    chosen = _chosen_before(loop) if _adds_to_the_last_value(loop) else 1.0
    if spec.task != "forecasting" or loop.parts.valid is None or (chosen is not None and spec.data.bands is None):
        return Found(1.0 if chosen is None else chosen)
    kept = _kept(loop)
    if kept is None:
        if spec.data.bands is not None:
            loop.watch.say("there are no bands: the model's head does not give a single value for each target")
        return Found()
    share = choose(kept, squares=spec.train.loss == "mse") if chosen is None else chosen
    anew = chosen is None and share < 1.0
    if anew:
        _take(loop, share)
        kept.out_NHC *= share
    if share < 1.0:
        fact = "what the model adds to the last value is not surely better than nothing"
        loop.watch.say(f"valid: {fact}, so {f'{share:.0%} of it counts' if share else 'the last value answers alone'}")
    return Found(share, anew, None if spec.data.bands is None else _measured(loop, spec.data.bands, kept))


def choose(kept: KeptForecasts, *, squares: bool) -> float:
    """The share of what the model adds: all of it if that is surely better than nothing, else the one with the best sure gain.

    Forecasts from neighbouring rows share most of their targets, so a standard error is that of groups of as many rows as the horizon has.
    """
    out_NHC, target_NHC = kept.out_NHC.cpu().numpy(), kept.target_NHC.cpu().numpy()
    real_N = np.isfinite(target_NHC).any(axis=(1, 2)) & (kept.seen_N.cpu().numpy() > 0)
    group_N = np.unique(kept.groups()[real_N], return_inverse=True)[1]
    count_G = np.bincount(group_N).astype(np.float64)
    if len(count_G) < FEWEST:
        return 1.0
    out_NHC, target_NHC = out_NHC[real_N], target_NHC[real_N]
    losses = (np.abs(target_NHC - share * out_NHC) ** (2 if squares else 1) for share in SHARES)
    loss_KN = np.stack([np.nanmean(loss_NHC, axis=(1, 2)) for loss_NHC in losses])
    sure_K = []
    for gain_N in loss_KN[0] - loss_KN:
        gain = float(gain_N.mean())
        apart_G = np.bincount(group_N, gain_N) - gain * count_G
        error = np.sqrt(np.square(apart_G).sum() * len(count_G) / (len(count_G) - 1)) / count_G.sum()
        sure_K.append(gain - SURE * float(error))
    return 1.0 if sure_K[-1] > 0.0 else SHARES[int(np.argmax(sure_K))]


def _adds_to_the_last_value(loop: Loop) -> bool:
    """True for the forecaster of the defaults, of single values."""
    model, spec = loop.trainer.model, loop.spec
    ours = isinstance(model, Model) and type(model.head) is Forecast and model.head.quantiles is None and not loop.task.own_model
    return spec.task == "forecasting" and ours and spec.model.linear > 0


def _chosen_before(loop: Loop) -> float | None:
    """The share that the file of weights already has: of a run that was stopped afterwards."""
    share: str | None = from_rank_0(loop.trainer.mesh.world, lambda: weights_metadata(loop.folder.weights).get("share"))
    return None if share is None else float(share)


def _kept(loop: Loop) -> KeptForecasts | None:
    """All forecasts of valid; None if the model gives something else."""
    trainer, valid, details = loop.trainer, loop.parts.valid, Details()
    assert valid is not None

    def tick(done: int, total: int) -> None:
        heartbeat.mark()
        if done < total:
            leave_if_asked(loop.stop, trainer.mesh.world, done)

    part, kept = replace(valid, kept=True), Kept(trainer.stage, trainer.capture, trainer.evaluation_trial)
    evaluate(trainer.model, loop.task, part, mesh=trainer.mesh, kept=kept, tick=tick, details=details)
    return details.metric if isinstance(details.metric, KeptForecasts) else None


def _take(loop: Loop, share: float) -> None:
    """Have the head add only this share, here and in the file of weights."""
    trainer, step = loop.trainer, loop.state.weights_step
    with torch.no_grad():
        for name, parameter in trainer.parameters().items():
            if name.startswith(HEAD):
                parameter.mul_(share)
    named = trainer.gathered(each_once=True)
    with raise_on_all(trainer.mesh.world, same_message=True, no_timeout=True):
        loop.folder.write_weights(named, step, best=json.dumps(loop.state.best), share=str(share))


def _measured(loop: Loop, shares: tuple[float, ...], kept: KeptForecasts) -> Mapping[str, float]:
    errors_NH = kept.errors(summed=loop.spec.data.transform == "diff")
    deviations_N = kept.deviations()
    bands = fitting(shares, errors_NH, deviations_N, loop.spec.scale_steps)
    loop.task = replace(loop.task, bands=bands)
    with raise_on_all(loop.trainer.mesh.world, same_message=True):
        loop.folder.write_json(BANDS, bands.to_json() | {"step": loop.state.weights_step})
    loop.watch.say(bands.said())
    return within_own(bands, errors_NH, deviations_N)
