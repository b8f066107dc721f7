"""A whole model as an ONNX graph: what `Portable` computes, node by node.

Shapes: T time, B lane, F codes of a step, N of them from one table, W width of the last layer or of a table, V classes, K steps ahead,
C columns, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from carrywave.errors import UserError
from carrywave.exporting import onnx_layers, onnx_pooling
from carrywave.exporting.onnx_layers import Ends, Lanes
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.exporting.portable import NEXT, Portable
from carrywave.model.encoders import Embedding, Features
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.forecast import Forecast, Line
from carrywave.model.heads.pooled import Pooled
from carrywave.model.over_time.front import Front
from carrywave.spec.step_inputs import LEAST_DEVIATION

MOST_BYTES = 1_900_000_000  # protobuf holds 2 GiB in one file


def graph(portable: Portable, about: str = "", *, untie: bool = False) -> Any:
    """The model as an ONNX ModelProto. `untie`: a matrix that embedding and softmax share is stored twice, as quantization needs."""
    check_size(portable.parameters())
    return _Graph(portable, untie).build(about)


def check_size(weights: Iterable[Tensor]) -> None:
    """Refuse more weights than one file can hold."""
    total = sum(weight.nbytes for weight in weights)
    if total > MOST_BYTES:
        raise UserError(
            f"the weights have {total / 1e9:.1f} GB, more than the 2 GB that an ONNX file holds; use --to torch or --to safetensors"
        )


class _Graph:
    def __init__(self, portable: Portable, untie: bool) -> None:
        self.portable, self.model, self.untie = portable, portable.model, untie
        self.nodes = Nodes()

    def build(self, about: str) -> Any:
        nodes, portable, lstm = self.nodes, self.portable, self.model.lstm
        x_TB = nodes.add("Transpose", "x", perm=[1, 0, *range(2, len(portable.inputs[0].shape))])
        lanes = self._lanes(x_TB)
        y_TBO, encoder = x_TB, portable.encoder
        if isinstance(encoder, Embedding):
            y_TBO = nodes.add("Gather", nodes.weight("embedding.weight", encoder.weight), x_TB)
        elif isinstance(encoder, Features):
            y_TBO = nodes.add("Concat", x_TB, *self._categories(encoder), axis=-1)
        if isinstance(self.model.encoder, Front):
            y_TBO, lanes = onnx_layers.front(nodes, self.model.encoder, y_TBO, lanes)
        for layer in range(lstm.num_layers):
            y_TBO, ends = onnx_layers.layer(nodes, lstm, layer, y_TBO, self._carry(layer, lanes), lanes)
            if portable.stateful:
                for part, end in zip(lstm.cell.parts, ends, strict=True):
                    nodes.add("Squeeze", end, nodes.constant([0]), name=f"{part}_l{layer}{NEXT}")
        self._head(y_TBO, lanes)
        return nodes.model("carrywave", portable.inputs, portable.outputs, about)

    def _categories(self, encoder: Features) -> Iterator[str]:
        """The embeddings of a step's codes, those of neighbours from the same table looked up at once."""
        nodes, first = self.nodes, 0
        codes_TBF = nodes.add("Transpose", "codes", perm=[1, 0, 2])
        for place, run in groupby(encoder.inputs.places):
            count = len(list(run))
            table = nodes.weight(f"categories.{place}.weight", encoder.tables[place])
            found_TBNW = nodes.add("Gather", table, nodes.slice(codes_TBF, 2, first, first + count))
            yield nodes.reshape(found_TBNW, 0, 0, count * encoder.inputs.tables[place][1])
            first += count

    def _lanes(self, x_TB: str) -> Lanes:
        nodes = self.nodes
        count = nodes.size(x_TB, 1)
        if not self.portable.takes_lengths:
            return Lanes(count)
        lengths = "lengths"
        if self.portable.stateful:
            ready_B = nodes.add("Squeeze", "ready", nodes.constant([1]))
            lengths = nodes.add("Where", ready_B, "lengths", nodes.constant(0))
        return onnx_layers.lanes_of(nodes, count, lengths, x_TB)

    def _carry(self, layer: int, lanes: Lanes) -> Ends | None:
        """The carry that comes in, replaced by the initial one where a lane is fresh."""
        if not self.portable.stateful:
            return None
        nodes = self.nodes
        begin = onnx_layers.initial(nodes, self.model.lstm, layer, lanes)
        given = (nodes.add("Unsqueeze", f"{part}_l{layer}", nodes.constant([0])) for part in self.model.lstm.cell.parts)
        return [nodes.add("Where", "fresh", new, old) for new, old in zip(begin, given, strict=True)]

    def _head(self, y_TBW: str, lanes: Lanes) -> None:
        nodes, head, result = self.nodes, self.model.head, self.portable.outputs[0]
        if isinstance(head, Pooled):
            pooled_BW = self._pooled(head, y_TBW, lanes)
            nodes.add("Identity", nodes.linear(pooled_BW, "head.weight", head.weight, ("head.bias", head.bias)), name=result.name)
            return
        if isinstance(head, Softmax):
            bias = None if head.bias is None else ("head.bias", head.bias)
            tied = isinstance(self.model.encoder, Embedding) and head.weight is self.model.encoder.weight and not self.untie
            out = nodes.linear(y_TBW, "embedding.weight" if tied else "head.weight", head.weight, bias, shared=tied)
        elif isinstance(head, AdaptiveSoftmax):
            out = self._adaptive(head, y_TBW)
        elif isinstance(head, Forecast):
            out = self._forecast(head, nodes.linear(y_TBW, "head.weight", head.weight, ("head.bias", head.bias)))
        else:
            raise UserError(f"the head {type(head).__name__} has no ONNX form; use --to torch or --to safetensors")
        nodes.add("Transpose", out, name=result.name, perm=[1, 0, *range(2, len(result.shape))])

    def _pooled(self, head: Pooled, y_TBW: str, lanes: Lanes) -> str:
        """What a pooled head reads; the accumulator comes in and goes on if there is a state."""
        nodes, seen = self.nodes, None
        if self.portable.stateful:
            zero = nodes.constant(0.0, np.dtype(str(head.weight.dtype).removeprefix("torch.")))
            count_B1 = nodes.add("Where", "fresh", nodes.constant(0), "count")
            seen = onnx_pooling.Seen(nodes.add("Where", "fresh", zero, "pooled"), count_B1)
        pooled_BW, after = onnx_pooling.pooled(nodes, head, y_TBW, lanes, seen)
        if self.portable.stateful:
            nodes.add("Identity", after.row_BR, name=f"pooled{NEXT}")
            nodes.add("Identity", after.count_B1, name=f"count{NEXT}")
        return pooled_BW

    def _forecast(self, head: Forecast, out: str) -> str:
        nodes = self.nodes
        out = nodes.reshape(out, 0, 0, head.horizon, head.outputs, len(head.quantiles or (0.5,)))
        out = out if head.quantiles is None else self._quantiles(head, out)
        if head.past_steps:
            past_TBCN = nodes.add("Transpose", "past", perm=[1, 0, 2, 3])
            out = self._scaled(head, out, past_TBCN) if head.scaled else out
            out = out if head.line is None else nodes.add("Add", out, self._line(head.line, past_TBCN))
        return out if head.quantiles is not None else nodes.add("Squeeze", out, nodes.constant([4]))

    def _scaled(self, head: Forecast, out: str, past_TBCN: str) -> str:
        """Forecasts in units of the deviation of the last values."""
        nodes, dtype = self.nodes, np.dtype(str(head.weight.dtype).removeprefix("torch."))
        gaps = nodes.add("Sub", past_TBCN, nodes.add("ReduceMean", past_TBCN, axes=[3], keepdims=1))
        variance = nodes.add("ReduceMean", nodes.add("Mul", gaps, gaps), axes=[3], keepdims=0)
        unit_TBC = nodes.add("Sqrt", nodes.add("Max", variance, nodes.constant(LEAST_DEVIATION**2, dtype)))
        return nodes.add("Mul", out, nodes.add("Unsqueeze", unit_TBC, nodes.constant([2, 4])))

    def _line(self, line: Line, past_TBCN: str) -> str:
        """What a linear function of the last values adds, [T, B, K, C, 1]."""
        nodes = self.nodes
        gaps = nodes.add("Sub", past_TBCN, nodes.slice(past_TBCN, 3, line.weight.shape[1] - 1, line.weight.shape[1]))
        gaps_TBC1N = nodes.add("Unsqueeze", gaps, nodes.constant([3]))
        ahead_TBC1K = nodes.add("MatMul", gaps_TBC1N, nodes.weight("head.line.weight", line.weight))
        ahead_TBC1K = nodes.add("Add", ahead_TBC1K, nodes.weight("head.line.bias", line.bias[:, None]))
        return nodes.add("Transpose", ahead_TBC1K, perm=[0, 1, 4, 2, 3])

    def _quantiles(self, head: Forecast, out: str) -> str:
        nodes = self.nodes
        assert head.quantiles is not None
        first = nodes.slice(out, 4, 0, 1)
        shift = nodes.constant(math.log(max(1, len(head.quantiles) - 1)), np.dtype(str(head.weight.dtype).removeprefix("torch.")))
        rises = nodes.add("Softplus", nodes.add("Sub", nodes.slice(out, 4, 1), shift))
        return nodes.add("Concat", first, nodes.add("Add", first, nodes.add("CumSum", rises, nodes.constant(4))), axis=-1)

    def _adaptive(self, head: AdaptiveSoftmax, y_TBW: str) -> str:
        nodes, first = self.nodes, head.cutoffs[0]
        found = nodes.add("LogSoftmax", self._chain("head.head", [head.head.weight], y_TBW), axis=-1)
        parts = [nodes.slice(found, 2, 0, first)]
        for number, cluster in enumerate(head.tail):
            weights = [each.weight for each in cluster.children()]
            own = nodes.add("LogSoftmax", self._chain(f"head.tail.{number}", weights, y_TBW), axis=-1)  # type: ignore[arg-type]
            parts.append(nodes.add("Add", own, nodes.slice(found, 2, first + number, first + number + 1)))
        return nodes.add("Concat", *parts, axis=-1)

    def _chain(self, name: str, weights: Sequence[Tensor], y: str) -> str:
        for number, weight in enumerate(weights):
            y = self.nodes.linear(y, f"{name}.{number}", weight, None)
        return y
