"""Models that can be run a step at a time, and what they compute over a whole sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from _export_models import MODELS, OWN, WHOLE, made

from carrywave.exporting.portable import Portable
from carrywave.exporting.single_step.formula import Formula

STEPS = 1000
NAMES = [name for name in (*MODELS, *OWN) if not any(word in name for word in WHOLE)]
# Some of them in short runs, and all in long ones: the steps themselves are compared in float64 for all (test_network).
SOME = [name if number % 5 == 0 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(NAMES)]
# One for each thing that a layer can be: every cell, several layers, widths, norms around and inside, projections, heads, a learned carry.
LAYERS = [
    "language",
    "language, widths, norms, learned carry",
    pytest.param("language, projection", marks=pytest.mark.slow),
    "language, gru",
    pytest.param("tagging, another cell", marks=pytest.mark.slow),
    pytest.param("tagging, heads", marks=pytest.mark.slow),
    pytest.param("tagging, norms inside the cell, zoneout", marks=pytest.mark.slow),
]


def stateful(name: str, dtype: torch.dtype = torch.float32) -> Portable:
    """A model with its carry as an argument."""
    return Portable(made(name).to(dtype), stateful=True)


def over_many(portable: Portable, formula: Formula, run: Callable[[Sequence[Tensor]], Sequence[Tensor]], lanes: int = 1) -> float:
    """The largest difference of 1,000 steps, each from the state after the one before, from a whole sequence in float64."""
    named = dict(zip((port.name for port in portable.inputs), portable.sample(lanes, STEPS, seed=1), strict=True))
    given = [named[port.name] for port in formula.step_inputs]
    found, state = [], formula.initial(lanes)
    for step in range(STEPS):
        out, *state = run([*(tensor[:, step] for tensor in given), *state])
        found.append(out)
    with torch.no_grad():
        whole = Portable(portable.model.double())
        wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
        [right] = whole(*wide, *([torch.full((lanes,), STEPS)] if whole.takes_lengths else []))
    got = found[-1] if portable.model.pooled else torch.stack(found, dim=1)
    return ((got.double() - right).abs().amax() / max(1.0, float(right.abs().amax()))).item()
