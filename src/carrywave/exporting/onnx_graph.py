"""A whole model as an ONNX graph: what `Portable` computes, node by node.

Shapes: T time, B lane, F codes of a step, N of them from one table, W width of the last layer or of a table, V classes, K steps ahead,
C columns, Q quantiles, L characters of a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from carrywave.data.text.spelling import EDGE
from carrywave.errors import UserError
from carrywave.exporting import onnx_forecasts, onnx_layers, onnx_paths, onnx_pooling, onnx_words
from carrywave.exporting.onnx_forecasts import dtype_of
from carrywave.exporting.onnx_layers import Ends, Lanes
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.exporting.portable import NEXT, Port, Portable
from carrywave.model.encoders import Embedding, Features
from carrywave.model.heads.adaptive_softmax import AdaptiveSoftmax
from carrywave.model.heads.classes import Softmax
from carrywave.model.heads.crf import CRF
from carrywave.model.heads.ctc import Ctc
from carrywave.model.heads.distributions import DistributionForecast
from carrywave.model.heads.forecast import Forecast
from carrywave.model.heads.pooled import Pooled
from carrywave.model.heads.step_numbers import StepNumbers
from carrywave.model.over_time.front import Front
from carrywave.model.vocabulary.spelled_words import REACH, SpelledWords

MOST_BYTES = 1_900_000_000  # protobuf holds 2 GiB in one file


def graph(portable: Portable, about: str = "") -> Any:
    """The model as an ONNX ModelProto."""
    total = sum(weight.nbytes for weight in portable.parameters())
    if total > MOST_BYTES:
        raise UserError(
            f"the weights have {total / 1e9:.1f} GB, more than the 2 GB that an ONNX file holds; use --to torch or --to safetensors"
        )
    return _Graph(portable).build(about)


class _Graph:
    def __init__(self, portable: Portable) -> None:
        self.portable, self.model, self.nodes = portable, portable.model, Nodes()
        self.read = {port.name: self._time_first(port) for port in portable.read}

    def _time_first(self, port: Port) -> str:
        """What is read of each step, [T, B, …]."""
        if self.portable.step:
            return self.nodes.add("Unsqueeze", port.name, self.nodes.constant([0]))
        return self.nodes.add("Transpose", port.name, perm=[1, 0, *range(2, len(port.shape))])

    def build(self, about: str) -> Any:
        nodes, portable, lstm = self.nodes, self.portable, self.model.lstm
        x_TB = self.read["x"]
        lanes = self._lanes(x_TB)
        y_TBO, encoder = x_TB, portable.encoder
        if isinstance(encoder, Embedding):
            y_TBO = nodes.add("Gather", nodes.weight("embedding.weight", encoder.weight), x_TB)
        elif isinstance(encoder, SpelledWords):
            words_TBE = nodes.add("Gather", nodes.weight("embedding.weight", encoder.words.weight), x_TB)
            y_TBO = nodes.add("Concat", words_TBE, self._characters(encoder), axis=-1)
        elif isinstance(encoder, Features):
            y_TBO = nodes.add("Concat", x_TB, *self._categories(encoder), axis=-1)
        if isinstance(self.model.encoder, Front):
            y_TBO, lanes = onnx_layers.front(nodes, self.model.encoder, y_TBO, lanes)
        for layer in range(lstm.num_layers):
            y_TBO, ends = onnx_layers.layer(nodes, lstm, layer, y_TBO, self._carry(layer, lanes), lanes)
            if portable.state:
                for part, end in zip(lstm.cell.parts, ends, strict=True):
                    nodes.add("Squeeze", end, nodes.constant([0]), name=f"{part}_l{layer}{NEXT}")
        self._head(y_TBO, lanes)
        return nodes.model("carrywave", portable.inputs, portable.outputs, about)

    def _categories(self, encoder: Features) -> Iterator[str]:
        """The embeddings of a step's codes, those of neighbours from the same table looked up at once."""
        nodes, first = self.nodes, 0
        codes_TBF = self.read["codes"]
        for place, run in groupby(encoder.inputs.places):
            count = len(list(run))
            table = nodes.weight(f"categories.{place}.weight", encoder.tables[place])
            vectors_TBNW = nodes.add("Gather", table, nodes.slice(codes_TBF, 2, first, first + count))
            yield nodes.reshape(vectors_TBNW, 0, 0, count * encoder.inputs.tables[place][1])
            first += count

    def _characters(self, encoder: SpelledWords) -> str:
        """What a convolution reads of the characters of each word."""
        nodes, filters, length = self.nodes, encoder.reader, encoder.length
        codes_TBL = self.read["characters"]
        edge = REACH // 2
        padded = nodes.add("Pad", codes_TBL, nodes.constant([0, 0, edge, 0, 0, edge]), nodes.constant(EDGE))
        vectors = nodes.add("Gather", nodes.weight("characters.weight", encoder.characters), padded)
        windows = nodes.add("Concat", *(nodes.slice(vectors, 2, at, at + length) for at in range(REACH)), axis=-1)
        y_TBLW = nodes.linear(windows, "character_filters.weight", filters.weight, ("character_filters.bias", filters.bias))
        real_TBL = nodes.add("Not", nodes.add("Equal", codes_TBL, nodes.constant(EDGE)))
        dtype = np.dtype(str(filters.weight.dtype).removeprefix("torch."))
        real = nodes.add("Unsqueeze", real_TBL, nodes.constant([3]))
        most_TBW = nodes.add("ReduceMax", nodes.add("Where", real, y_TBLW, nodes.constant(-np.inf, dtype)), axes=[2], keepdims=0)
        return nodes.add("Where", nodes.slice(real_TBL, 2, 0, 1), most_TBW, nodes.constant(0.0, dtype))

    def _lanes(self, x_TB: str) -> Lanes:
        nodes = self.nodes
        count = nodes.size(x_TB, 1)
        if self.portable.step:
            ones_B, shape = nodes.add("Expand", nodes.constant([1]), count), nodes.add("Concat", nodes.constant([1]), count, axis=0)
            real_TB = nodes.add("Expand", nodes.constant([[True]], np.bool_), shape)
            return Lanes(count, ones_B, "", nodes.add("Unsqueeze", real_TB, nodes.constant([2])), one_step=True)
        if not self.portable.takes_lengths:
            return Lanes(count)
        lengths = "lengths"
        if self.portable.stateful:
            ready_B = nodes.add("Squeeze", "ready", nodes.constant([1]))
            lengths = nodes.add("Where", ready_B, "lengths", nodes.constant(0))
        return onnx_layers.lanes_of(nodes, count, lengths, x_TB)

    def _carry(self, layer: int, lanes: Lanes) -> Ends | None:
        """The carry that comes in, replaced by the initial one where a lane is fresh."""
        if not self.portable.state:
            return None
        nodes = self.nodes
        entering = [nodes.add("Unsqueeze", f"{part}_l{layer}", nodes.constant([0])) for part in self.model.lstm.cell.parts]
        if self.portable.step:
            return entering
        begin = onnx_layers.initial(nodes, self.model.lstm, layer, lanes)
        return [nodes.add("Where", "fresh", new, old) for new, old in zip(begin, entering, strict=True)]

    def _head(self, y_TBW: str, lanes: Lanes) -> None:
        nodes, head, result = self.nodes, self.model.head, self.portable.outputs[0]
        if isinstance(head, Pooled):
            pooled_BW = self._pooled(head, y_TBW, lanes)
            nodes.add("Identity", nodes.linear(pooled_BW, "head.weight", head.weight, ("head.bias", head.bias)), name=result.name)
            return
        if isinstance(head, Softmax):
            bias = None if head.bias is None else ("head.bias", head.bias)
            tied = isinstance(self.model.encoder, Embedding) and head.weight is self.model.encoder.weight
            out = nodes.linear(y_TBW, "embedding.weight" if tied else "head.weight", head.weight, bias, shared=tied)
        elif isinstance(head, AdaptiveSoftmax):
            out = self._adaptive(head, y_TBW)
        elif isinstance(head, StepNumbers):
            out = nodes.linear(y_TBW, "head.weight", head.weight, ("head.bias", head.bias))
        elif isinstance(head, DistributionForecast):
            raw = nodes.linear(y_TBW, "head.weight", head.weight, ("head.bias", head.bias))
            out = onnx_forecasts.parameters(
                nodes, head, nodes.reshape(raw, 0, 0, head.horizon, head.outputs, -1), self.read.get("past", "")
            )
        elif isinstance(head, CRF):
            out = nodes.linear(y_TBW, "head.weight", head.weight, ("head.bias", head.bias))
            out = out if head.words is None else nodes.add("Add", out, onnx_words.scores(nodes, head.words, self.read["characters"], lanes))
            out = onnx_paths.best_paths(nodes, head, out, lanes)
        elif isinstance(head, Ctc):
            out = self._transcription(head, y_TBW, lanes)
        elif isinstance(head, Forecast):
            out = self._forecast(head, nodes.linear(y_TBW, "head.weight", head.weight, ("head.bias", head.bias)))
        else:
            raise UserError(f"the head {type(head).__name__} has no ONNX form; use --to torch or --to safetensors")
        if self.portable.step:
            nodes.add("Squeeze", out, nodes.constant([0]), name=result.name)
        else:
            nodes.add("Transpose", out, name=result.name, perm=[1, 0, *range(2, len(result.shape))])

    def _pooled(self, head: Pooled, y_TBW: str, lanes: Lanes) -> str:
        """What a pooled head reads; the accumulator comes in and goes on if there is a state."""
        nodes, seen = self.nodes, None
        if self.portable.step:
            seen = onnx_pooling.PooledSoFar("pooled", "count")
        elif self.portable.stateful:
            zero = nodes.constant(0.0, dtype_of(head))
            count_B1 = nodes.add("Where", "fresh", nodes.constant(0), "count")
            seen = onnx_pooling.PooledSoFar(nodes.add("Where", "fresh", zero, "pooled"), count_B1)
        pooled_BW, after = onnx_pooling.pooled(nodes, head, y_TBW, lanes, seen)
        if self.portable.state:
            nodes.add("Identity", after.row_BR, name=f"pooled{NEXT}")
            nodes.add("Identity", after.count_B1, name=f"count{NEXT}")
        return pooled_BW

    def _forecast(self, head: Forecast, out: str) -> str:
        nodes = self.nodes
        out = nodes.reshape(out, 0, 0, head.horizon, head.outputs, len(head.quantiles or (0.5,)))
        out = out if head.quantiles is None else self._quantiles(head, out)
        if head.past_steps:
            past_TBCN = self.read["past"]
            out = nodes.add("Mul", out, onnx_forecasts.deviation(nodes, past_TBCN, dtype_of(head))) if head.scaled else out
            out = out if head.line is None else nodes.add("Add", out, onnx_forecasts.line(nodes, head.line, past_TBCN))
        return out if head.quantiles is not None else nodes.add("Squeeze", out, nodes.constant([4]))

    def _quantiles(self, head: Forecast, out: str) -> str:
        nodes = self.nodes
        assert head.quantiles is not None
        first = nodes.slice(out, 4, 0, 1)
        shift = nodes.constant(math.log(max(1, len(head.quantiles) - 1)), dtype_of(head))
        rises = nodes.add("Softplus", nodes.add("Sub", nodes.slice(out, 4, 1), shift))
        return nodes.add("Concat", first, nodes.add("Add", first, nodes.add("CumSum", rises, nodes.constant(4))), axis=-1)

    def _transcription(self, head: Ctc, y_TBW: str, lanes: Lanes) -> str:
        """Log-probabilities of all answers; after the end of a lane, the blank is certain."""
        nodes = self.nodes
        assert lanes.lengths is not None
        out = nodes.linear(y_TBW, "head.weight", head.weight, ("head.bias", head.bias))
        if head.upsample > 1:
            out = nodes.reshape(out, 0, 0, head.upsample, head.classes)
            out = nodes.add("Transpose", out, perm=[0, 2, 1, 3])
            sizes = nodes.add("Shape", out)
            answers = nodes.add("Mul", nodes.slice(sizes, 0, 0, 1), nodes.constant([head.upsample]))
            out = nodes.add("Reshape", out, nodes.add("Concat", answers, nodes.slice(sizes, 0, 2, 4), axis=0))
        logs_TBV = nodes.add("LogSoftmax", out, axis=-1)
        certain_V = np.full(head.classes, -np.inf, np.dtype(str(head.weight.dtype).removeprefix("torch.")))
        certain_V[head.blank] = 0.0
        real_TB1 = nodes.real_steps(nodes.add("Mul", lanes.lengths, nodes.constant(head.upsample)), logs_TBV)
        return nodes.add("Where", real_TB1, logs_TBV, nodes.constant(certain_V, certain_V.dtype))

    def _adaptive(self, head: AdaptiveSoftmax, y_TBW: str) -> str:
        nodes, first = self.nodes, head.cutoffs[0]
        head_logs = nodes.add("LogSoftmax", self._chain("head.head", [head.head.weight], y_TBW), axis=-1)
        parts = [nodes.slice(head_logs, 2, 0, first)]
        for number, cluster in enumerate(head.tail):
            weights = [each.weight for each in cluster.children()]
            tail_logs = nodes.add("LogSoftmax", self._chain(f"head.tail.{number}", weights, y_TBW), axis=-1)  # type: ignore[arg-type]
            parts.append(nodes.add("Add", tail_logs, nodes.slice(head_logs, 2, first + number, first + number + 1)))
        return nodes.add("Concat", *parts, axis=-1)

    def _chain(self, name: str, weights: Sequence[Tensor], y: str) -> str:
        for number, weight in enumerate(weights):
            y = self.nodes.linear(y, f"{name}.{number}", weight, None)
        return y
