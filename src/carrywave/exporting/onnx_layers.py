"""Layers as ONNX nodes: one node for each layer, with the operator that its cell names, or, for an LSTM with a projection, which ONNX's
operator does not have, a `Scan`.

Shapes: T time, B lane, I input, H hidden, G = gates · H, P output width (the projection, or H), D directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from carrywave.cells import lstm as lstm_cell
from carrywave.cells.cell import OnnxForm
from carrywave.errors import UserError
from carrywave.exporting.onnx_nodes import Nodes
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


Ends = Sequence[str]  # the carry of a layer: [D, B, P] for its first part, [D, B, H] for the others


def layer(nodes: Nodes, layers: Recurrent, index: int, x_TBI: str, carry: Ends | None, lanes: Lanes) -> tuple[str, Ends]:
    """One layer, with its norm: outputs [T, B, P·D] and the carry at each lane's last real step. Without a carry it starts from the
    initial one.
    """
    name, form = f"lstm.l{index}", layers.cell.onnx
    projected = "a projection" if layers.proj_size and layers.cell is not lstm_cell.CELL else ""
    if form is None or (option := beyond_cell(layers) or projected):
        what = f" with {option}" if form is not None else ""
        raise UserError(f"the cell {layers.cell.name}{what} has no ONNX form; use --to torch or --to safetensors, or --step")
    carry = carry or initial(nodes, layers, index, lanes)
    if layers.proj_size:
        y_TBO, ends = _projected(nodes, layers, index, x_TBI, carry, lanes)
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
    if lanes.lengths is not None:
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


def _projected(nodes: Nodes, layers: Recurrent, index: int, x_TBI: str, carry: Ends, lanes: Lanes) -> tuple[str, Ends]:
    """An LSTM layer with a projection. The reverse direction runs forward over lanes that are turned round within their lengths."""
    ys, hs, cs = [], [], []
    for direction, weights in enumerate(layers.weights(index)):
        x_read = x_TBI if direction == 0 else _turned(nodes, x_TBI, lanes)
        start = [nodes.add("Gather", part, nodes.constant(direction), axis=0) for part in carry]
        y_TBP, h_BP, c_BH = _scan(nodes, f"lstm.l{index}.d{direction}", x_read, start, weights, lanes)
        ys.append(y_TBP if direction == 0 else _turned(nodes, y_TBP, lanes))
        hs.append(nodes.add("Unsqueeze", h_BP, nodes.constant([0])))
        cs.append(nodes.add("Unsqueeze", c_BH, nodes.constant([0])))
    if len(ys) == 1:
        return ys[0], [hs[0], cs[0]]
    return nodes.add("Concat", *ys, axis=-1), [nodes.add("Concat", *each, axis=0) for each in (hs, cs)]


def _turned(nodes: Nodes, x_TBI: str, lanes: Lanes) -> str:
    assert lanes.lengths is not None  # a model that reads both ways always takes lengths
    return nodes.add("ReverseSequence", x_TBI, lanes.lengths, batch_axis=1, time_axis=0)


def _scan(nodes: Nodes, name: str, x_TBI: str, start: list[str], weights: LayerWeights, lanes: Lanes) -> list[str]:
    """One direction: outputs [T, B, P], and h and c at the end."""
    assert weights.w_hr is not None
    hidden, dtype = weights.w_ih.shape[0] // 4, weights.w_ih.dtype
    bias = None if weights.b_ih is None or weights.b_hh is None else (f"{name}.b", (weights.b_ih + weights.b_hh).detach())
    gates_TBG = nodes.linear(x_TBI, f"{name}.w_ih", weights.w_ih, bias)
    body = Nodes(nodes)
    h, c, step, real = (body.name(stem) for stem in ("h", "c", "gates", "real"))
    product = body.add("MatMul", h, nodes.weight(f"{name}.w_hh.T", weights.w_hh.T))
    parts = [body.name("gate") for _ in range(4)]
    sizes = nodes.constant([hidden] * 4)
    body.add_many("Split", [body.add("Add", step, product), sizes], parts, axis=-1)
    i, f, o = (body.add("Sigmoid", parts[gate]) for gate in (0, 1, 3))
    next_c = body.add("Add", body.add("Mul", f, c), body.add("Mul", i, body.add("Tanh", parts[2])))
    wide = body.add("Mul", o, body.add("Tanh", next_c))
    next_h = body.add("MatMul", wide, nodes.weight(f"{name}.w_hr.T", weights.w_hr.T))
    y = body.add("Identity", next_h)
    scanned, ports = [gates_TBG], [Port(step, dtype, (BATCH, 4 * hidden))]
    if lanes.real_TB1 is not None:
        next_h, next_c = (body.add("Where", real, new, old) for new, old in ((next_h, h), (next_c, c)))
        y = body.add("Where", real, y, nodes.constant(0.0, _numpy(dtype)))
        scanned.append(lanes.real_TB1)
        ports.append(Port(real, torch.bool, (BATCH, 1)))
    else:
        next_h = body.add("Identity", next_h)
    width = weights.w_hr.shape[0]
    carried = [Port(h, dtype, (BATCH, width)), Port(c, dtype, (BATCH, hidden))]
    ended = [Port(next_h, dtype, (BATCH, width)), Port(next_c, dtype, (BATCH, hidden)), Port(y, dtype, (BATCH, width))]
    outputs = [nodes.name(f"{name}.{part}") for part in ("h", "c", "y")]
    nodes.add_many(
        "Scan",
        [*start, *scanned],
        outputs,
        body=body.body(nodes.name("step"), [*carried, *ports], ended),
        num_scan_inputs=len(scanned),
        name=name,
    )
    return [outputs[2], outputs[0], outputs[1]]


def _numpy(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
