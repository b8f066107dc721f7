"""Sample paths of forecasts that are distributions: what may come, drawn from them.

Of a model that forecasts several steps at once, the paths are *direct*: the values of a path are drawn from the distributions of their
steps, each by itself. Of a model that forecasts one step they are *ancestral*: each value is drawn and read as if it had come, and the next
one is drawn given it, for as many steps as are wanted. Draws are a function of (seed, series, column), whoever computes them. Shapes: H
steps, C columns, S samples, P parameters, B sequences, L = B × S paths, R rows of the past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from carrywave.data.codec import Codec
from carrywave.data.files.rows import Row
from carrywave.data.loader import past_values
from carrywave.data.sequences import Sequences, View
from carrywave.data.tables.table import Table
from carrywave.errors import RunError, UserError, option
from carrywave.kernels import random
from carrywave.model.model import Model
from carrywave.model.state import State
from carrywave.prediction.outputs import HeadOutputs
from carrywave.prediction.predicted import named
from carrywave.prediction.saved_run import Saved
from carrywave.tasks.forecast_values import ForecastValues
from carrywave.tasks.views import Naive

SAMPLE = "sample"  # the field with the number of a path, from 1
WINDOW = 256  # steps of the past that are read at once
MOST_LANES = 256  # sequences that are read side by side

Reals = NDArray[np.float64]


def check(saved: Saved, samples: int, steps: int | None) -> int:
    """Return how many steps paths have; refuse what has none."""
    spec, codec = saved.spec.data, saved.task.codec
    if spec.distribution == "none":
        raise UserError(f"{option('samples')} needs a run with data.distribution, and {saved.run.path} has none; remove it, or train one")
    if samples < 1 or (steps is not None and steps < 1):
        raise UserError(f"{option('samples')} is {samples} and {option('steps')} is {steps}; use numbers from 1")
    if steps is None or steps <= spec.horizon:
        return spec.horizon if steps is None else steps
    if spec.horizon > 1:
        raise UserError(
            f"{option('steps')} is {steps}, more than the {spec.horizon} that {saved.run.path} forecasts at once; use fewer, or train with "
            f"data.horizon={steps}, or with data.horizon=1, whose draws are fed back"
        )
    if not isinstance(saved.model, Model):
        raise RunError(f"{saved.run.path} has a model of your own, whose draws cannot be fed back; ask for one step")
    unknown = [name for name in (*codec.columns, *codec.categorical) if name not in _filled(codec)]
    if unknown or codec.known or codec.calendar:
        name = (*unknown, *codec.known, *codec.calendar)[0]
        raise UserError(
            f"draws are fed back, but the model reads {name} too, whose values ahead are not drawn; ask for one step, or train with "
            f"data.horizon={steps}"
        )
    return steps


def _filled(codec: Codec) -> set[str]:
    """The columns whose values are known in a row that is drawn: what is forecast, and what never changes."""
    return {*(codec.columns[place] for place in codec.targets), *codec.static}


def sample_paths(saved: Saved, data: Sequences, table: Table, samples: int, steps: int, seed: int) -> Iterator[Row]:
    """A row for each series, path and step. Empty on ranks other than 0. Collective when it is called."""
    values = ForecastValues(table, data, saved.task.codec, saved.spec)
    if saved.spec.data.horizon == 1 and steps > 1:
        made = list(_ancestral(saved, data, values, samples, steps, seed))
        made = made if saved.mesh.world.rank == 0 else []
    else:
        kind = saved.spec.data.distribution
        made = [drawn(kind, out[None], samples, generator(seed, number)) for number, out in enumerate(HeadOutputs(saved).of(data))]
    return _rows(saved, values, table, made, samples, steps)


def generator(seed: int, sequence: int) -> np.random.Generator:
    """The draws of a sequence: one after the other, the same on any machine."""
    words = random.key(seed, sequence).numpy().view(np.uint32)
    return np.random.Generator(np.random.Philox(key=int(words[0]) << 32 | int(words[1])))


def drawn(kind: str, parameters: NDArray[Any], samples: int, draw: np.random.Generator) -> Reals:
    """Draws [..., S] from distributions with parameters [..., P]."""
    first, *rest = np.moveaxis(np.asarray(parameters, np.float64), -1, 0)[..., None]
    size = (*parameters.shape[:-1], samples)
    match kind:
        case "normal":
            return np.asarray(first + rest[0] * draw.standard_normal(size))
        case "student_t":
            return np.asarray(first + rest[0] * draw.standard_t(np.broadcast_to(rest[1], size)))
        case "poisson":
            return draw.poisson(first, size).astype(np.float64)
        case _:
            return draw.poisson(draw.gamma(1.0 / rest[0], first * rest[0], size)).astype(np.float64)


def _rows(saved: Saved, values: ForecastValues, table: Table, made: Sequence[Reals], samples: int, steps: int) -> Iterator[Row]:
    codec = saved.task.codec
    for series in range(len(made) // values.many):
        paths = list(made[series * values.many : (series + 1) * values.many])
        paths_HCS = values.in_units(series, table.lengths[series : series + 1], paths)[0]
        times = table.ahead(series, steps)
        for sample in range(samples):
            for step in range(steps):
                row = named(table, codec, series)
                if times is not None:
                    row[str(codec.time)] = times[step]
                row |= {"step": step + 1, SAMPLE: sample + 1}
                row |= dict(zip(codec.forecast_columns, paths_HCS[step, :, sample].tolist(), strict=True))
                yield row


def _ancestral(saved: Saved, data: Sequences, values: ForecastValues, samples: int, steps: int, seed: int) -> Iterator[Reals]:
    """Paths [1, H, C, S] of each sequence, as `ForecastValues.in_units` takes them: less the naive forecast of the first step."""
    for first in range(0, len(data), MOST_LANES):
        block = range(first, min(first + MOST_LANES, len(data)))
        some = replace(
            data,
            starts=data.starts[block],
            lengths=data.lengths[block],
            units=None if data.units is None else data.units[block],
            means=None,
            names=None,
        )
        yield from _Fed(saved, some, samples, steps, [generator(seed, number) for number in block]).paths()


class _Fed:
    """Sequences that continue with what is drawn for them."""

    def __init__(self, saved: Saved, data: Sequences, samples: int, steps: int, draws: Sequence[np.random.Generator]) -> None:
        assert isinstance(saved.model, Model)
        self.saved, self.task, self.model, self.data = saved, saved.task, saved.model, data
        self.samples, self.steps, self.draws = samples, steps, draws
        self.spec, self.device = saved.spec, saved.mesh.device
        self.targets = np.array(saved.task.codec.targets)

    @torch.no_grad()
    def paths(self) -> list[Reals]:
        """The paths of each sequence."""
        y_BW, state = self._read()
        parameters_BCP = self._parameters(y_BW, state, self.task.unlabelled(self.data), self.data.starts + self.data.lengths - 1)
        lanes = np.repeat(np.arange(len(self.data)), self.samples)
        state = State(tuple(type(carry)(*(part.repeat_interleave(self.samples, 1) for part in carry)) for carry in state.carries))
        parameters_LCP = parameters_BCP[lanes]
        grown, free = self._grown(lanes)
        values_HLC = np.zeros((self.steps, len(lanes), len(self.targets)))
        base_BC = self._naive(self.data, self.data.starts + self.data.lengths - 1)
        for step in range(self.steps):
            past = replace(grown, lengths=free + step)
            last = past.starts + past.lengths - 1
            value_LC = self._drawn(parameters_LCP)
            if self.spec.data.counts:
                values_HLC[step] = value_LC
                assert grown.units is not None
                value_LC = value_LC / grown.units[:, self.targets]
            else:
                value_LC = value_LC + self._naive(past, last)
                values_HLC[step] = value_LC - base_BC[lanes]
            if step + 1 == self.steps:
                break
            grown.inputs[last + 1] = grown.inputs[last]
            grown.inputs[(last + 1)[:, None], self.targets] = value_LC
            longer = replace(grown, lengths=free + step + 1)
            view = self.task.unlabelled(longer)
            y_TLW, state = self.model(self._inputs(view, (last + 1)[None]), state)
            parameters_LCP = self._parameters(y_TLW[0], state, view, last + 1)
        paths = values_HLC.reshape(self.steps, len(self.data), self.samples, -1)
        return [np.moveaxis(paths[:, number], 1, 2)[None] for number in range(len(self.data))]

    def _read(self) -> tuple[torch.Tensor, State]:
        """What the last layer gives after the last row of each sequence, and the state there."""
        view, lengths_B = self.task.unlabelled(self.data), self.data.lengths
        state: State | None = None
        after: torch.Tensor | None = None
        for first in range(0, int(lengths_B.max()), WINDOW):
            here_B = np.clip(lengths_B - first, 0, WINDOW)
            rows_TB = self.data.starts + np.minimum(first + np.arange(int(here_B.max()))[:, None], lengths_B - 1)
            real_B = torch.from_numpy(here_B).to(self.device)
            y_TBW, state = self.model(self._inputs(view, rows_TB), state, real_B)
            last_BW = y_TBW[(real_B - 1).clamp(min=0), torch.arange(len(real_B), device=self.device)]
            after = last_BW if after is None else torch.where(real_B[:, None] > 0, last_BW, after)
        assert after is not None
        assert state is not None
        return after, state

    def _grown(self, lanes: NDArray[np.int64]) -> tuple[Sequences, NDArray[np.int64]]:
        """As much of the past of every path as is read at a step, with room for the steps; and how many rows are filled."""
        reach = max(self.spec.data.season, self.spec.past_steps, self.spec.scale_steps) + 1
        length_L = np.minimum(self.data.lengths[lanes], reach)
        room_L = length_L + self.steps
        starts_L = np.cumsum(room_L) - room_L
        inputs = np.zeros((int(room_L.sum()), self.data.inputs.shape[1]), np.float32)
        for number, start, length in zip(lanes, starts_L, length_L, strict=True):
            end = int(self.data.starts[number] + self.data.lengths[number])
            inputs[start : start + length] = self.data.inputs[end - int(length) : end]
        units = None if self.data.units is None else self.data.units[lanes]
        return Sequences(inputs, starts_L, length_L, units=units), length_L

    def _inputs(self, view: View, rows_TB: NDArray[np.int64]) -> torch.Tensor:
        read = view.inputs[rows_TB] if view.inputs_at is None else view.inputs_at(rows_TB)
        return torch.from_numpy(np.asarray(read, np.float32)).to(self.device, self.model.lstm.dtype)

    def _parameters(self, y_BW: torch.Tensor, state: State, view: View, rows_B: NDArray[np.int64]) -> Reals:
        past = None
        if view.history is not None:
            values = past_values(view, view.history, rows_B[None], np.arange(len(rows_B)))
            past = torch.from_numpy(values).to(self.device, self.model.lstm.dtype).unfold(0, view.history.steps, 1)
        out = self.model.output(y_BW[None], state, past=past)
        parameters: Reals = out[0, :, 0].double().cpu().numpy()
        return parameters

    def _naive(self, data: Sequences, rows_B: NDArray[np.int64]) -> Reals:
        spec = self.spec.data
        made = Naive(data, self.targets, 1, spec.season, self.spec.starts_from)(rows_B)
        return np.asarray(made[:, 0], np.float64)

    def _drawn(self, parameters_LCP: Reals) -> Reals:
        """One draw for each path [L, C]; the paths of a sequence follow each other."""
        kind, many = self.spec.data.distribution, self.samples
        parts = [drawn(kind, parameters_LCP[at * many : (at + 1) * many], 1, draw)[..., 0] for at, draw in enumerate(self.draws)]
        return np.concatenate(parts)
