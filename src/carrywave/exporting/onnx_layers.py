"""Layers as ONNX nodes: one node for each layer, with the operator that its cell names, or, where ONNX has none for what a layer computes,
a `Scan` over the cell's own step.

Shapes: T time, B lane, I input, H hidden, G = gates · H, P output width (the projection, or H), D directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from carrywave.cells.cell import OnnxForm
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.exporting.onnx_steps import SymbolicWeights, after_step
from carrywave.exporting.portable import BATCH, Port
from carrywave.kernels.weights import LayerWeights
from carrywave.model.over_time.front import FARTHEST, LEAST_SQUARE, Front, SequenceNorm
from carrywave.model.portable_names import beyond_cell
from carrywave.model.recurrent import Recurrent


class Lanes(NamedTuple):
    """What a layer needs to know about lanes: their number and, where they differ, their lengths in int64 and int32, and real steps."""

    number: str
    lengths: str | None = None
    lengths32: str = ""
    real_TB1: str | None = None
    one_step: bool = False  # of each lane, in plain operators


Ends = Sequence[str]  # the carry of a layer: [D, B, P] for its first part, [D, B, H] for the others


def layer(nodes: Nodes, layers: Recurrent, index: int, x_TBI: str, carry: Ends | None, lanes: Lanes) -> tuple[str, Ends]:
    """One layer, with its norm: outputs [T, B, P·D] and the carry at each lane's last real step. Without a carry it starts from the
    initial one.
    """
    name, form = f"lstm.l{index}", layers.cell.onnx
    carry = carry or initial(nodes, layers, index, lanes)
    if lanes.one_step:
        y_TBO, ends = _one_step(nodes, layers, index, x_TBI, carry)
    elif form is None or beyond_cell(layers) or layers.proj_size:
        y_TBO, ends = _scanned(nodes, layers, index, x_TBI, carry, lanes)
    else:
        directions = layers.weights(index)
        w_DGI, r_DGH, b_DG = (_stacked(directions, part, form) for part in range(3))
        inputs = [x_TBI, nodes.weight(f"{name}.W", w_DGI), nodes.weight(f"{name}.R", r_DGH), nodes.weight(f"{name}.B", b_DG)]
        outputs = [nodes.name(f"{name}.{part}") for part in ("y", *layers.cell.parts)]
        way = "bidirectional" if layers.bidirectional else "forward"
        of_ways = {name: each * layers.directions if isinstance(each, tuple) else each for name, each in form.attributes.items()}
        attributes = {"hidden_size": layers.widths[index], "direction": way, **of_ways}
        nodes.add_many(form.operator, [*inputs, lanes.lengths32, *carry], outputs, **attributes, name=name)
        y_TBDP = nodes.add("Transpose", outputs[0], perm=[0, 2, 1, 3])
        y_TBO, ends = nodes.reshape(y_TBDP, 0, 0, -1), outputs[1:]
    if lanes.lengths is not None and not lanes.one_step:
        # A lane without real steps keeps its carry; runtimes return zeros for it.
        some_B1 = nodes.add("Unsqueeze", nodes.add("Greater", lanes.lengths, nodes.constant(0)), nodes.constant([1]))
        ends = [nodes.add("Where", some_B1, end, start) for end, start in zip(ends, carry, strict=True)]
    if layers.layer_norm:
        norm = getattr(layers, f"norm_l{index}")
        scale, bias = (nodes.weight(f"{name}.norm.{part}", getattr(norm, part)) for part in ("weight", "bias"))
        y_TBO = nodes.add("LayerNormalization", y_TBO, scale, bias, axis=-1, epsilon=norm.eps)
    return y_TBO, ends


def lanes_of(nodes: Nodes, count: str, lengths_B: str, x_TB: str) -> Lanes:
    """The lanes of x, whose real steps are known."""
    return Lanes(count, lengths_B, nodes.add("Cast", lengths_B, to=nodes.kind(torch.int32)), nodes.real_steps(lengths_B, x_TB))


def front(nodes: Nodes, module: Front, x_TBF: str, lanes: Lanes) -> tuple[str, Lanes]:
    """The convolutions before the layers, and the lanes after them, which are shorter."""
    dtype = _numpy(next(module.parameters()).dtype)
    zero = nodes.constant(0.0, dtype)
    x_TBF = in_two_scales(nodes, x_TBF, lanes, dtype) if module.scales else x_TBF
    for index, (layer, convolution, norm) in enumerate(zip(module.layers, module.convolutions, module.norms, strict=True)):
        assert lanes.lengths is not None
        assert lanes.real_TB1 is not None
        name, pad = f"front.{index}", layer.kernel // 2
        x_BFT = nodes.add("Transpose", nodes.add("Where", lanes.real_TB1, x_TBF, zero), perm=[1, 2, 0])
        weights = [nodes.weight(f"{name}.{part}", getattr(convolution, part)) for part in ("weight", "bias")]
        y_BCT = nodes.add("Conv", x_BFT, *weights, kernel_shape=[layer.kernel], strides=[layer.stride], pads=[pad, pad])
        scales = [nodes.weight(f"{name}.norm.{part}", getattr(norm, part)) for part in ("weight", "bias")]
        y_TBC = nodes.add("Transpose", y_BCT, perm=[2, 0, 1])
        lengths_B = nodes.add("Add", lanes.lengths, nodes.constant(layer.stride - 1))
        lanes = lanes_of(nodes, lanes.number, nodes.add("Div", lengths_B, nodes.constant(layer.stride)), y_TBC)
        if isinstance(norm, SequenceNorm):
            means_TB1 = nodes.add("ReduceMean", y_TBC, axes=[2])
            mean_B1, deviation_B1 = moments(nodes, means_TB1, y_TBC, lanes, dtype)
            scaled = nodes.add("Div", nodes.add("Sub", y_TBC, mean_B1), deviation_B1)
            normed = nodes.add("Add", nodes.add("Mul", scaled, scales[0]), scales[1])
        else:
            normed = nodes.add("LayerNormalization", y_TBC, *scales, axis=-1, epsilon=norm.eps)
        x_TBF = nodes.add("Relu", normed)
    return x_TBF, lanes


def moments(nodes: Nodes, means_TBC: str, y_TBC: str, lanes: Lanes, dtype: Any) -> tuple[str, str]:
    """Mean and deviation [B, C] over real steps, as `front.moments` has them."""
    assert lanes.lengths is not None
    assert lanes.real_TB1 is not None
    zero, first = nodes.constant(0.0, dtype), nodes.constant([0])
    kind = nodes.kind(torch.float64 if dtype == np.float64 else torch.float32)
    steps_B = nodes.add("Cast", nodes.add("Max", lanes.lengths, nodes.constant(1)), to=kind)
    steps_B1 = nodes.add("Unsqueeze", steps_B, nodes.constant([1]))
    mean_BC = nodes.add("Div", nodes.add("ReduceSum", nodes.add("Where", lanes.real_TB1, means_TBC, zero), first, keepdims=0), steps_B1)
    gaps_TBC = nodes.add("Sub", y_TBC, mean_BC)
    squares_TBC = nodes.add("Mul", gaps_TBC, gaps_TBC)
    squares_TBC = squares_TBC if means_TBC == y_TBC else nodes.add("ReduceMean", squares_TBC, axes=[2])
    square_BC = nodes.add("Div", nodes.add("ReduceSum", nodes.add("Where", lanes.real_TB1, squares_TBC, zero), first, keepdims=0), steps_B1)
    return mean_BC, nodes.add("Sqrt", nodes.add("Add", square_BC, nodes.constant(LEAST_SQUARE, dtype)))


def in_two_scales(nodes: Nodes, x_TBF: str, lanes: Lanes, dtype: Any) -> str:
    """[T, B, 4 F]: as `front.in_two_scales` has it."""
    mean_BF, deviation_BF = moments(nodes, x_TBF, x_TBF, lanes, dtype)
    facts = nodes.add("Concat", mean_BF, nodes.add("Sub", deviation_BF, nodes.constant(1.0, dtype)), axis=1)
    facts = nodes.add("Clip", facts, nodes.constant(-FARTHEST, dtype), nodes.constant(FARTHEST, dtype))
    shape = nodes.add("Concat", nodes.size(x_TBF, 0), nodes.constant([1, 1]), axis=0)
    own_TBF = nodes.add("Div", nodes.add("Sub", x_TBF, mean_BF), deviation_BF)
    return nodes.add("Concat", x_TBF, own_TBF, nodes.add("Expand", nodes.add("Unsqueeze", facts, nodes.constant([0])), shape), axis=2)


def initial(nodes: Nodes, layers: Recurrent, index: int, lanes: Lanes) -> Ends:
    """The carry at the start of a sequence, for every lane."""
    parts = []
    for part, tensor in zip(layers.cell.parts, layers.initial(1, layers=range(index, index + 1))[0], strict=True):
        one = nodes.weight(f"lstm.l{index}.{part}_start", tensor.detach())
        shape = nodes.add("Concat", nodes.constant([layers.directions]), lanes.number, nodes.constant([tensor.shape[-1]]), axis=0)
        parts.append(nodes.add("Expand", one, shape))
    return parts


def _stacked(directions: tuple[LayerWeights, ...], part: int, form: OnnxForm) -> Tensor:
    """The weights of both directions with the gates in ONNX's order: W, R or the biases."""
    parts = []
    for each in directions:
        if part == 2:
            none_G = each.w_ih.new_zeros(each.w_ih.shape[0])
            parts.append(torch.cat([_in_order(none_G if b is None else b, form) for b in (each.b_ih, each.b_hh)]))
        else:
            parts.append(_in_order(each.w_hh if part else each.w_ih, form))
    return torch.stack(parts).detach()


def _in_order(weight: Tensor, form: OnnxForm) -> Tensor:
    """The gates as ONNX orders them."""
    gates = weight.detach().chunk(len(form.order))
    return torch.cat([gates[gate] for gate in form.order])


def _one_step(nodes: Nodes, layers: Recurrent, index: int, x_1BI: str, carry: Ends) -> tuple[str, Ends]:
    """A single step of a layer, in plain operators."""
    first = nodes.constant([0])
    weights = SymbolicWeights(nodes, f"lstm.l{index}", layers.weights(index)[0], layers.outputs(index))
    given = [weights.row(nodes.add("Squeeze", part, first)) for part in carry]
    after = after_step(layers, weights.inputs(weights.row(nodes.add("Squeeze", x_1BI, first))), given, weights)
    ends = [nodes.add("Unsqueeze", part, first) for part in after]
    return ends[0], ends


def _scanned(nodes: Nodes, layers: Recurrent, index: int, x_TBI: str, carry: Ends, lanes: Lanes) -> tuple[str, Ends]:
    """A layer step by step. The reverse direction runs forward over lanes that are turned round within their lengths."""
    ys, ends = [], []
    for direction, weights in enumerate(layers.weights(index)):
        x_read = x_TBI if direction == 0 else _turned(nodes, x_TBI, lanes)
        start = [nodes.add("Gather", part, nodes.constant(direction), axis=0) for part in carry]
        y_TBP, *parts = _scan(nodes, layers, f"lstm.l{index}.d{direction}", x_read, start, weights, lanes)
        ys.append(y_TBP if direction == 0 else _turned(nodes, y_TBP, lanes))
        ends.append([nodes.add("Unsqueeze", part, nodes.constant([0])) for part in parts])
    if len(ys) == 1:
        return ys[0], ends[0]
    return nodes.add("Concat", *ys, axis=-1), [nodes.add("Concat", *parts, axis=0) for parts in zip(*ends, strict=True)]


def _turned(nodes: Nodes, x_TBI: str, lanes: Lanes) -> str:
    assert lanes.lengths is not None  # a model that reads both ways always takes lengths
    return nodes.add("ReverseSequence", x_TBI, lanes.lengths, batch_axis=1, time_axis=0)


def _scan(nodes: Nodes, layers: Recurrent, name: str, x_TBI: str, start: list[str], weights: LayerWeights, lanes: Lanes) -> list[str]:
    """One direction: outputs [T, B, P], and the parts of the carry at the end."""
    dtype, hidden = weights.w_ih.dtype, weights.w_ih.shape[0] // layers.cell.gates
    outer = SymbolicWeights(nodes, name, weights, layers.proj_size or hidden)
    gates_TBG = outer.inputs(outer.row(x_TBI)).name
    body = Nodes(nodes)
    inner = SymbolicWeights(body, name, weights, outer.width)
    step, real, *before = (body.name(stem) for stem in ("gates", "real", *layers.cell.parts))
    after = [body.add("Identity", part) for part in after_step(layers, inner.row(step), [inner.row(part) for part in before], inner)]
    y = body.add("Identity", after[0])
    scanned, ports = [gates_TBG], [Port(step, dtype, (BATCH, weights.w_ih.shape[0]))]
    if lanes.real_TB1 is not None:
        y = body.add("Where", real, y, nodes.constant(0.0, _numpy(dtype)))
        after = [body.add("Where", real, new, old) for new, old in zip(after, before, strict=True)]
        scanned.append(lanes.real_TB1)
        ports.append(Port(real, torch.bool, (BATCH, 1)))
    widths = layers.cell.widths(hidden, layers.proj_size)
    carried, ended = ([Port(part, dtype, (BATCH, width)) for part, width in zip(parts, widths, strict=True)] for parts in (before, after))
    of_body = body.body(nodes.name("step"), [*carried, *ports], [*ended, Port(y, dtype, (BATCH, widths[0]))])
    outputs = [nodes.name(f"{name}.{part}") for part in (*layers.cell.parts, "y")]
    nodes.add_many("Scan", [*start, *scanned], outputs, body=of_body, num_scan_inputs=len(scanned), name=name)
    return [outputs[-1], *outputs[:-1]]


def _numpy(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
