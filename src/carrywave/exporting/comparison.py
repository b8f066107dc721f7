"""Compares what an exported file computes with the model it was made from, at sizes that it was not made at.

The yardstick is the model itself in float64.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.portable import ANSWERS, TIME, Portable, Runner

SIZES = ((1, 3), (7, 23))  # lanes and steps of the runs that are compared
# In float32, products over a thousand units and a few dozen steps are off by about 1e-6 of their size, and runtimes approximate tanh
# and sigmoid to about as much; a wrong gate or bias shows in the second digit.
TOLERANCE = 1e-4


def largest_difference(portable: Portable, run: Runner, *, what: str, tolerance: float | None = TOLERANCE) -> float:
    """The largest difference from the model, relative to its largest value if that is above 1; more than the tolerance is an error.

    `tolerance` None: any finite difference will do, as after quantization.
    """
    tolerance = math.nextafter(math.inf, 0.0) if tolerance is None else tolerance
    definition = copy.deepcopy(portable).double()
    worst = 0.0
    for seed, (lanes, steps) in enumerate(SIZES):
        given = portable.sample(lanes, steps, seed)
        with torch.no_grad():
            expected = definition(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in given))
        found = run(given)
        for port, right, got in zip(portable.outputs, expected, found, strict=True):
            if ANSWERS in port.shape:  # padding within the model may leave further ones at the end, all of them blank
                right, got = (each[:, : portable.model.output_steps(steps)] for each in (right, got))
            if got.shape != right.shape:
                raise UserError(
                    f"{what} returns {port.name} as {list(got.shape)} where the model returns {list(right.shape)}; nothing was written: "
                    "please report this with the spec.yaml of the run"
                )
            right, got = (_real(portable, port.shape, given, tensor.double()) for tensor in (right, got))
            gap = _gap(got, right) if right.numel() else 0.0
            if not gap <= tolerance:
                raise UserError(
                    f"{what} differs from the model by {gap:.1e} in {port.name}, more than {tolerance:g} ({lanes} lanes, {steps} steps); "
                    "nothing was written: use other versions of the packages, or --to safetensors"
                )
            worst = max(worst, gap)
    return worst


def _gap(got: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest finite value; what is impossible (-inf) must be so in both."""
    size = torch.where(right.isfinite(), right.abs(), 0.0).amax()
    return (torch.where(got == right, 0.0, (got - right).abs()).amax() / max(1.0, float(size))).item()


def _real(portable: Portable, shape: tuple[int | str, ...], given: list[Tensor], out: Tensor) -> Tensor:
    """An output without the steps that are padding, which a runtime may fill with anything."""
    if TIME not in shape or not portable.takes_lengths:
        return out
    named = dict(zip((port.name for port in portable.inputs), given, strict=True))
    lengths = named["lengths"]
    if portable.stateful:
        lengths = torch.where(named["ready"][:, 0], lengths, 0)
    return out[torch.arange(out.shape[1]) < lengths[:, None]]
