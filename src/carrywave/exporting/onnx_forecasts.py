"""What forecasts make of past values, and the parameters of distributions, as ONNX nodes.

Shapes: T time, B lane, K steps ahead, C columns, N past values, P parameters; numbers of one parameter are [T, B, K, C, 1].
"""

from __future__ import annotations

import numpy as np
from torch import nn

from carrywave.exporting.onnx_nodes import Nodes
from carrywave.model.heads.distributions import FIRST_DF, LEAST_DISPERSION, LEAST_MEAN, LEAST_SCALE, ROUNDNESS, DistributionForecast
from carrywave.model.heads.forecast import PastLine
from carrywave.spec.step_inputs import LEAST_DEVIATION


def dtype_of(head: nn.Module) -> np.dtype[np.generic]:
    """The dtype of a head's weights, as NumPy has it."""
    return np.dtype(str(head.weight.dtype).removeprefix("torch."))


def deviation(nodes: Nodes, past_TBCN: str, dtype: np.dtype[np.generic]) -> str:
    """The deviation of the last values, [T, B, 1, C, 1]."""
    gaps = nodes.add("Sub", past_TBCN, nodes.add("ReduceMean", past_TBCN, axes=[3], keepdims=1))
    variance = nodes.add("ReduceMean", nodes.add("Mul", gaps, gaps), axes=[3], keepdims=0)
    unit_TBC = nodes.add("Sqrt", nodes.add("Max", variance, nodes.constant(LEAST_DEVIATION**2, dtype)))
    return nodes.add("Unsqueeze", unit_TBC, nodes.constant([2, 4]))


def line(nodes: Nodes, part: PastLine, past_TBCN: str) -> str:
    """What a linear function of the last values adds, [T, B, K, C, 1]."""
    gaps = nodes.add("Sub", past_TBCN, nodes.slice(past_TBCN, 3, part.weight.shape[1] - 1, part.weight.shape[1]))
    gaps_TBC1N = nodes.add("Unsqueeze", gaps, nodes.constant([3]))
    ahead_TBC1K = nodes.add("MatMul", gaps_TBC1N, nodes.weight("head.line.weight", part.weight))
    ahead_TBC1K = nodes.add("Add", ahead_TBC1K, nodes.weight("head.line.bias", part.bias[:, None]))
    return nodes.add("Transpose", ahead_TBC1K, perm=[0, 1, 4, 2, 3])


def parameters(nodes: Nodes, head: DistributionForecast, out: str, past_TBCN: str) -> str:
    """The parameters [T, B, K, C, P] of what the layers give for them."""
    return _counts(nodes, head, out, past_TBCN) if head.counts else _around(nodes, head, out, past_TBCN)


def _around(nodes: Nodes, head: DistributionForecast, out: str, past_TBCN: str) -> str:
    dtype = dtype_of(head)
    location = nodes.slice(out, 4, 0, 1)
    scale = nodes.add("Add", nodes.add("Softplus", nodes.slice(out, 4, 1, 2)), nodes.constant(LEAST_SCALE, dtype))
    if head.scaled:
        unit = deviation(nodes, past_TBCN, dtype)
        location, scale = nodes.add("Mul", location, unit), nodes.add("Mul", scale, unit)
    if head.line is not None:
        location = nodes.add("Add", location, line(nodes, head.line, past_TBCN))
    if head.distribution == "normal":
        return nodes.add("Concat", location, scale, axis=-1)
    df = nodes.add("Softplus", nodes.add("Add", nodes.slice(out, 4, 2, 3), nodes.constant(FIRST_DF, dtype)))
    return nodes.add("Concat", location, scale, nodes.add("Add", df, nodes.constant(2.0, dtype)), axis=-1)


def _counts(nodes: Nodes, head: DistributionForecast, out: str, past_TBCN: str) -> str:
    dtype, columns, last = dtype_of(head), head.outputs, head.past_steps - 1
    values_TBCN = nodes.slice(past_TBCN, 2, 0, columns)
    ends_TBC1 = nodes.slice(past_TBCN, 3, last, last + 1)
    unit = nodes.add("Unsqueeze", nodes.slice(ends_TBC1, 2, columns, 2 * columns), nodes.constant([2]))
    base, mean = nodes.constant(1.0, dtype), nodes.slice(out, 4, 0, 1)
    if head.line is not None:
        now = nodes.add("Unsqueeze", nodes.slice(ends_TBC1, 2, 0, columns), nodes.constant([2]))
        base = nodes.add("Add", now, line(nodes, head.line, values_TBCN))
    level = ratio = ""
    if head.scaled:
        mean_TBC1 = nodes.add("ReduceMean", nodes.add("Abs", values_TBCN), axes=[3], keepdims=1)
        level = nodes.add("Unsqueeze", nodes.add("Max", mean_TBC1, nodes.constant(LEAST_DEVIATION, dtype)), nodes.constant([2]))
        ratio = nodes.add("Div", deviation(nodes, values_TBCN, dtype), level)
        base = base if head.line is None else nodes.add("Div", base, level)
        mean = nodes.add("Mul", mean, ratio)
    mean = nodes.add("Add", mean, base)
    root = nodes.add("Sqrt", nodes.add("Add", nodes.add("Mul", mean, mean), nodes.constant(ROUNDNESS, dtype)))
    mean = nodes.add("Mul", nodes.add("Add", mean, root), nodes.constant(0.5, dtype))
    mean = nodes.add("Add", mean, nodes.constant(LEAST_MEAN, dtype))
    mean = nodes.add("Mul", nodes.add("Mul", mean, level) if head.scaled else mean, unit)
    if head.distribution == "poisson":
        return mean
    dispersion = nodes.add("Softplus", nodes.slice(out, 4, 1, 2))
    dispersion = nodes.add("Mul", dispersion, nodes.add("Mul", ratio, ratio)) if head.scaled else dispersion
    return nodes.add("Concat", mean, nodes.add("Add", dispersion, nodes.constant(LEAST_DISPERSION, dtype)), axis=-1)
