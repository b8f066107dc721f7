"""Predicts the seconds of units and stages on one kind of device, for chunks of any size, from the samples of its profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from carrywave.cells import lstm
from carrywave.cells.cell import HALF_PRECISIONS, Cell, by_name, names
from carrywave.errors import PlanError
from carrywave.plan.cost.interpolation import NOTHING, Fit, Seconds, Size, size_of
from carrywave.plan.cost.profile import Piped, Profile, Sample
from carrywave.plan.cost.unit import Unit
from carrywave.plan.cost.units import Units

# Fallback for a precision that was not timed: one that uses similar hardware.
_ALIKE = {"bf16": "fp16", "fp16": "bf16", "tf32": "fp32", "fp32": "tf32"}
_LIKE = {"adamw": "adam", "ntasgd": "sgd"}  # the same for optimizers
LAUNCH_SECONDS = 5e-6  # of one operation that is launched by itself; only for cells that were not timed
FAR_DOUBLINGS = 0.75  # distance of a layer's width from the nearest sample beyond which its time is a guess rather than a prediction


@lru_cache(maxsize=256)
def _fit(kind: str, samples: tuple[Sample, ...]) -> Fit:
    """Cached by samples: planning for many numbers of devices needs the same fits again and again."""
    return Fit(kind, samples)


class Costs:
    """The costs of a model's units on one kind of device; `piped`: as in samples; `crowd`: number of workers on its host."""

    def __init__(self, units: Units, profile: Profile, *, piped: Piped = "", crowd: int = 1) -> None:
        self.units, self.profile, self.piped = units, profile, piped
        timed = {sample.workers for sample in profile.samples} or {1}
        # Use the samples timed with the nearest number of workers; on a tie the larger number, which is slower.
        self.workers = min(timed, key=lambda workers: (abs(math.log2(workers / crowd)), -workers))
        self.lag = _between([(1, 0.0), *((each.workers, each.lag) for each in profile.contention)], crowd)
        self.crowding = self._crowding(crowd) / self._crowding(self.workers)  # slowdown relative to these samples
        self._fits: dict[str, Fit | None] = {}
        self._of_unit: dict[tuple[int, int, int], Seconds] = {}
        self._of_stage: dict[tuple[int, int, int, int], Seconds] = {}
        self._of_deferred: dict[tuple[int, ...], float] = {}
        self.side_by_side = [s for s in self._samples(units.units[1].kind) if s.layers > 1]
        self._optimizers = {sample.name for sample in self._samples("optimizer")}

    def unit(self, number: int, lanes: int, steps: int) -> Seconds:
        """Seconds of one unit on one chunk, with the dropout and norm that follow it."""
        key = number, lanes, steps
        seconds = self._of_unit.get(key)
        if seconds is None:
            seconds = self._of_unit[key] = self._unit(self.units.units[number], lanes, steps)
        return seconds

    def stage(self, first: int, last: int, lanes: int, steps: int) -> Seconds:
        """Seconds of units [first, last) on one chunk. Neighbouring equal layers run concurrently if the samples show that they can."""
        key = first, last, lanes, steps
        seconds = self._of_stage.get(key)
        if seconds is None:
            seconds = NOTHING
            for begin, end in self._runs(first, last):
                of_one = self.unit(begin, lanes, steps)
                seconds = seconds + of_one.times((end - begin) * self._together(self.units.units[begin], end - begin, lanes, steps))
            self._of_stage[key] = seconds
        return seconds

    def deferred(self, first: int, last: int, lanes: int, steps: int, chunk_steps: int) -> float:
        """Seconds of the weight gradients that units [first, last) defer until all chunks of a window are done.

        They are computed as one product, so the time for the whole window is used; unless the kernel defers only for short chunks, in
        which case the whole window's sample has almost none and the time is scaled up from a chunk. Samples of recorded chunks already
        have their part of the product for the whole window.
        """
        key = first, last, lanes, steps, chunk_steps
        seconds = self._of_deferred.get(key)
        if seconds is None:
            seconds = 0.0
            for begin, end in self._runs(first, last):
                whole = self.unit(begin, lanes, steps).deferred
                by_chunk = self.unit(begin, lanes, chunk_steps).deferred * steps / chunk_steps
                together = self._together(self.units.units[begin], end - begin, lanes, steps)
                as_one = self.piped != "recorded" and 2 * whole >= by_chunk
                seconds += (whole if as_one else by_chunk) * (end - begin) * together
            self._of_deferred[key] = seconds
        return seconds

    def update(self, parameters: int, tensors: int = 0) -> float:
        """Seconds of norm, clipping and optimizer for `parameters` parameters in `tensors` tensors."""
        if not parameters or not self._optimizers:
            return 0.0
        wanted = self.units.optimizer, _LIKE.get(self.units.optimizer, ""), min(self._optimizers)
        name = next(each for each in wanted if each in self._optimizers)
        return self._kind("optimizer", name)(Size(tensors, parameters, 1, 1)).forward

    def weight_drop(self, first: int, last: int) -> float:
        """Seconds that units [first, last) take in a pass to drop recurrent weights, and their gradients."""
        matrices = [(unit.projection or unit.outputs, unit.dropped_rows) for unit in self.units.units[first:last] if unit.dropped_rows]
        if not matrices or not self._samples("dropout"):
            return 0.0
        return sum(self._kind("dropout")(Size(width, width, rows, 1)).all for width, rows in matrices)

    def _crowding(self, workers: int) -> float:
        """Slowdown, relative to a single worker, when this many workers of a host run at once."""
        return _between([(1, 1.0), *((crowd.workers, crowd.factor) for crowd in self.profile.contention)], workers)

    def _unit(self, unit: Unit, lanes: int, steps: int) -> Seconds:
        seconds = NOTHING
        if unit.kind != "numbers":
            # A pooled head has one row per lane. It runs only on the last chunk, but is too cheap for that to be worth modelling here.
            rows = self.units.rows_of(unit, steps)
            fit = self._kind(unit.kind)
            seconds = fit(Size(unit.inputs, unit.outputs, lanes, rows, unit.projection)).times(unit.directions)
        if unit.launches:
            launched = steps * unit.directions * unit.launches * LAUNCH_SECONDS
            seconds = Seconds(seconds.forward + launched / 3, seconds.backward + seconds.deferred + launched * 2 / 3, 0.0)
        after = [("dropout", unit.dropout, steps), ("norm", unit.norm, steps)]
        for layer in unit.front:
            # A convolution is priced as the product that it is.
            seconds = seconds + self._kind("linear")(Size(layer.inputs, layer.channels, lanes, steps * layer.times))
            after += [(kind, layer.channels, steps * layer.times) for kind in ("norm", "dropout") if kind == "norm" or layer.dropped]
        for kind, width, rows in after:
            if width and self._samples(kind):
                seconds = seconds + self._kind(kind)(Size(width, width, lanes, rows))
        return seconds

    def _runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs of equal neighbours among units [first, last), each as [first, last)."""
        return [(max(begin, first), min(end, last)) for begin, end in self.units.runs if begin < last and end > first]

    def _together(self, unit: Unit, count: int, lanes: int, steps: int) -> float:
        """Time of `count` equal layers in one call, where they may run concurrently, relative to running them one after another."""
        if count == 1 or not self.side_by_side or unit.directions > 1 or unit.cell is None or unit.launches or unit.norm:
            return 1.0
        # cuDNN runs a stack in one call if nothing comes between its layers; dropout does, and so do steps that are not real.
        if self.units.precision not in HALF_PRECISIONS and (unit.dropout or not self.units.streams):
            return 1.0
        fit = self._kind(unit.kind)
        nearest = min(
            self.side_by_side,
            key=lambda s: abs(_doublings(s.outputs, unit.outputs)) * 2 + abs(_doublings(s.lanes, lanes)) + abs(_doublings(s.layers, count)),
        )
        alone = fit(size_of(nearest)._replace(layers=1)).all * nearest.layers
        # Every layer after the first adds the same time, so that more layers never take less.
        added = (nearest.forward_seconds + nearest.backward_seconds) / (alone / nearest.layers)
        added = min(1.0, max(0.0, (added - 1.0) / (nearest.layers - 1)))
        return (1.0 + (count - 1) * added) / count

    def _samples(self, kind: str, name: str = "") -> tuple[Sample, ...]:
        precisions = [self.units.precision, _ALIKE.get(self.units.precision, "")]
        if kind == "optimizer":  # it works in fp32 or fp64, whatever precision the layers compute in
            precisions = ["fp64", "fp32"] if self.units.precision == "fp64" else ["fp32", self.units.precision]
        for precision in precisions:
            samples = [s for s in self.profile.samples if s.kind == kind and s.precision == precision and (not name or s.name == name)]
            # If this kind was not timed with this number of workers, use the nearest number.
            nearest = min({s.workers for s in samples}, key=lambda workers: abs(math.log2(workers / self.workers)), default=1)
            samples = [s for s in samples if s.workers == nearest]
            for wanted in dict.fromkeys((self.piped, "")):
                if timed := tuple(s for s in samples if s.piped == wanted):
                    return timed
        return ()

    def _kind(self, kind: str, name: str = "") -> Fit:
        fit = self._fits.get(kind)
        if fit is None:
            samples = self._samples(kind, name)
            if kind in names():
                samples = tuple(s for s in samples if s.layers == 1)
                samples = samples or tuple(_estimated(s, by_name(kind)) for s in self._samples(lstm.CELL.name) if s.layers == 1)
            if not samples and kind in ("softmax", "linear"):  # both are dominated by a matrix product
                samples = self._samples("linear" if kind == "softmax" else "softmax")
            if not samples:
                raise PlanError(
                    f"profile {self.profile.name} has no sample of {kind} in {self.units.precision}; "
                    "measure this machine in that precision, or use another profile"
                )
            fit = self._fits[kind] = _fit(kind, samples)
        return fit


def far_off(units: Units, profile: Profile) -> str | None:
    """A warning for the user if the profile was measured for models of other sizes; None if it has samples near this model's."""
    layers = [unit for unit in units.units if unit.cell is not None]
    timed = [s for s in profile.samples if s.kind == layers[0].kind and s.precision in (units.precision, _ALIKE.get(units.precision))]
    if not timed and layers[0].kind != lstm.CELL.name:
        return f"profile {profile.name} has no layer of cell {layers[0].kind}: the times are guesses from those of {lstm.CELL.name}"
    if layers[0].launches:
        return f"profile {profile.name} has no layer that runs step by step: the times are guesses from those of {layers[0].kind}'s kernels"
    sizes = {s.outputs for s in timed}
    for unit in layers:
        if sizes:
            nearest = min(sizes, key=lambda outputs: abs(math.log2(outputs / unit.outputs)))
            if abs(math.log2(nearest / unit.outputs)) > FAR_DOUBLINGS:
                return f"profile {profile.name} has no layer near {unit.outputs} units (the nearest has {nearest}): the times are guesses"
    return None


def _estimated(sample: Sample, cell: Cell) -> Sample:
    """What a layer of a cell that was not timed would take: the products as those of an LSTM, and without kernels what it launches at every
    step.
    """
    sizes = sample.inputs, sample.outputs, sample.projection if cell.projects else 0
    share = cell.multiply_adds(*sizes) / lstm.CELL.multiply_adds(*sizes)
    kernels = cell.has_kernels(sample.precision)
    launches = 0.0 if kernels else sample.steps * cell.launches * LAUNCH_SECONDS
    return replace(
        sample,
        kind=cell.name,
        forward_seconds=sample.forward_seconds * share + launches / 3,
        backward_seconds=sample.backward_seconds * share + launches * 2 / 3,
        deferred_seconds=sample.deferred_seconds * share if kernels else 0.0,
    )


def _between(points: Sequence[tuple[int, float]], workers: int) -> float:
    """The value for this number of workers: linear interpolation between known points, constant beyond the last."""
    before = points[0]
    for at, value in sorted(set(points)):
        if at >= workers:
            return value if at == before[0] else before[1] + (value - before[1]) * (workers - before[0]) / (at - before[0])
        before = at, value
    return before[1]


def _doublings(a: int, b: int) -> float:
    """A rough distance between two sizes: 0 if equal, 1 if one is twice the other."""
    return max(a, b) / min(a, b) - 1.0
