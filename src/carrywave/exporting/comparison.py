"""Compares what an exported file computes with the model it was made from, at sizes that it was not made at.

The yardstick is the model itself in float64. Some models magnify rounding: large weights, or a scale far smaller than the mean. In float32
they are off wherever they run, so a file may differ from float64 by a few times what the model in float32 does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting.portable import ANSWERS, OUTPUTS, TIME, Port, Portable, Runner
from carrywave.model.heads.crf import CRF

SIZES = ((1, 3), (7, 23))  # lanes and steps of the runs that are compared
# In float32, products over a thousand units and a few dozen steps are off by about 1e-6 of their size, and runtimes approximate tanh
# and sigmoid to about as much; a wrong gate or bias shows in the second digit.
TOLERANCE = 1e-4
ROUNDINGS, MOST = 8.0, 1e-2  # this many times the model's own rounding, and never more than this
MOST_OTHER_LABELS = 0.02


def largest_difference(portable: Portable, run: Runner, *, what: str) -> float:
    """The largest difference from the model, relative to its largest value if that is above 1; more than the tolerance is an error."""
    definition = copy.deepcopy(portable).double()
    worst = 0.0
    for seed, (lanes, steps) in enumerate(SIZES):
        inputs = portable.sample(lanes, steps, seed)
        with torch.no_grad():
            expected = definition(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs))
            rounded = portable(*inputs)
        outputs = run(inputs)
        for port, right, near, got in zip(portable.outputs, expected, rounded, outputs, strict=True):
            if ANSWERS in port.shape:  # padding within the model may leave further ones at the end, all of them blank
                right, near, got = (each[:, : portable.model.output_steps(steps)] for each in (right, near, got))
            _check_shape(what, port, got, right)
            right, near, got = (_real(portable, port.shape, inputs, tensor.double()) for tensor in (right, near, got))
            allowed = with_rounding(TOLERANCE, near, right)
            worst = max(worst, check_difference(what, port, got, right, allowed, f"{lanes} lanes, {steps} steps"))
    return worst


def largest_step_difference(portable: Portable, run: Runner, *, what: str, sizes: Sequence[tuple[int, int]] = SIZES) -> float:
    """The same for a model of single steps, each with the state that came out of the step before: over whole sequences, they answer as the
    model does that reads all steps at once.
    """
    whole, worst, port = Portable(copy.deepcopy(portable.model).double()), 0.0, portable.outputs[0]
    for seed, (lanes, steps) in enumerate(sizes):
        named = dict(zip((each.name for each in whole.inputs), whole.sample(lanes, steps, seed), strict=True))
        given = [named[each.name].to(each.dtype) for each in portable.read]
        answers = {}
        runners: dict[str, Runner] = {"file": run, "model": lambda inputs: portable(*inputs)}
        for name, answer in runners.items():
            found, state = [], portable.start(lanes)
            for step in range(steps):
                with torch.no_grad():
                    out, *state = answer([*(each[:, step] for each in given), *state])
                found.append(out.double())
            answers[name] = found[-1] if portable.model.pooled else torch.stack(found, dim=1)
        with torch.no_grad():
            wide = [each.double() if each.is_floating_point() else each for each in given]
            [right] = whole(*wide, *([torch.full((lanes,), steps)] if whole.takes_lengths else []))
        _check_shape(what, port, answers["file"], right)
        allowed = with_rounding(TOLERANCE, answers["model"], right)
        worst = max(worst, check_difference(what, port, answers["file"], right, allowed, f"{lanes} lanes, {steps} steps"))
    return worst


def with_rounding(tolerance: float, rounded: Tensor, right: Tensor) -> float:
    """The tolerance for a model whose result in float32 is `rounded`; with NaN in either, as it was."""
    rounding = _gap(rounded, right) if right.numel() else 0.0
    return max(tolerance, min(MOST, ROUNDINGS * rounding)) if math.isfinite(rounding) else tolerance


def _check_shape(what: str, port: Port, got: Tensor, right: Tensor) -> None:
    if got.shape != right.shape:
        raise UserError(
            f"{what} returns {port.name} as {list(got.shape)} where the model returns {list(right.shape)}; nothing was written: "
            "please report this with the spec.yaml of the run"
        )


def check_difference(what: str, port: Port, got: Tensor, right: Tensor, tolerance: float, sizes: str) -> float:
    """The largest difference, relative to the largest value if that is above 1; more than the tolerance is an error. Of labels, the share
    of those that differ: two paths of nearly the same score may change places when they are rounded.
    """
    if port.name == OUTPUTS[CRF]:
        got, right, tolerance = (got != right).double().mean(), got.new_zeros(()), max(tolerance, MOST_OTHER_LABELS)
    gap = _gap(got, right) if right.numel() else 0.0
    if not gap <= tolerance:
        raise UserError(
            f"{what} differs from the model by {gap:.1e} in {port.name}, more than {tolerance:g} ({sizes}); "
            "nothing was written: use other versions of the packages, or --to safetensors"
        )
    return gap


def _real(portable: Portable, shape: tuple[int | str, ...], inputs: list[Tensor], out: Tensor) -> Tensor:
    """An output without the steps that are padding, which a runtime may fill with anything."""
    if TIME not in shape or not portable.takes_lengths:
        return out
    named = dict(zip((port.name for port in portable.inputs), inputs, strict=True))
    lengths = named["lengths"]
    if portable.stateful:
        lengths = torch.where(named["ready"][:, 0], lengths, 0)
    return out[torch.arange(out.shape[1]) < lengths[:, None]]


def _gap(got: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest finite value; what is impossible (-inf) must be so in both."""
    size = torch.where(right.isfinite(), right.abs(), 0.0).amax()
    return (torch.where(got == right, 0.0, (got - right).abs()).amax() / max(1.0, float(size))).item()
