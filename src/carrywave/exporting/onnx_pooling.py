"""Pooling over the real steps of a lane as ONNX nodes: what `model.over_time.pooling` computes.

Shapes: T time, B lane, W width of the last layer, R width of the row that is kept of a lane.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from carrywave.exporting.onnx_layers import Lanes
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.model.heads.pooled import Pooled


class PooledSoFar(NamedTuple):
    """What was seen of each lane: its row, and the number of its steps."""

    row_BR: str
    count_B1: str


def pooled(nodes: Nodes, head: Pooled, y_TBW: str, lanes: Lanes, seen: PooledSoFar | None) -> tuple[str, PooledSoFar]:
    """What the head reads of each lane, and what was seen of it afterwards; without `seen`, sequences begin here."""
    return _Pooling(nodes, head, y_TBW, lanes, seen).build()


class _Pooling:
    def __init__(self, nodes: Nodes, head: Pooled, y_TBW: str, lanes: Lanes, seen: PooledSoFar | None) -> None:
        assert lanes.lengths is not None
        assert lanes.real_TB1 is not None
        self.nodes, self.head, self.y_TBW, self.seen = nodes, head, y_TBW, seen
        self.lengths_B, self.real_TB1 = lanes.lengths, lanes.real_TB1
        self.dtype = np.dtype(str(head.weight.dtype).removeprefix("torch."))
        self.zero, self.lowest = self.number(0.0), self.number(float(np.finfo(self.dtype).min))
        self.lengths_B1 = nodes.add("Unsqueeze", lanes.lengths, nodes.constant([1]))
        self.some_B1 = nodes.add("Greater", self.lengths_B1, nodes.constant(0))
        self.count_B1 = self.lengths_B1 if seen is None else nodes.add("Add", seen.count_B1, self.lengths_B1)

    def build(self) -> tuple[str, PooledSoFar]:
        nodes, width, pool = self.nodes, self.head.width, self.head.pooling
        row_BR = None if self.seen is None else self.seen.row_BR
        match pool:
            case "mean":
                row_BR = self.total(row_BR)
                pooled = self.divided(row_BR, self.steps())
            case "max":
                pooled = row_BR = self.greatest(row_BR)
            case "mean_max":
                parts = (None, None) if row_BR is None else (nodes.slice(row_BR, 1, 0, width), nodes.slice(row_BR, 1, width))
                total_BW, greatest_BW = self.total(parts[0]), self.greatest(parts[1])
                row_BR = nodes.add("Concat", total_BW, greatest_BW, axis=-1)
                pooled = nodes.add("Concat", self.divided(total_BW, self.steps()), greatest_BW, axis=-1)
            case "attention":
                pooled, row_BR = self.attended(row_BR)
            case _:
                pooled = row_BR = self.last(row_BR or self.zero)
        return pooled, PooledSoFar(row_BR, self.count_B1)

    def number(self, value: float) -> str:
        return self.nodes.constant(value, self.dtype)

    def steps(self) -> str:
        """[B, 1]: the steps so far, at least 1."""
        nodes = self.nodes
        return nodes.add("Cast", nodes.add("Max", self.count_B1, nodes.constant(1)), to=nodes.kind(self.head.weight.dtype))

    def divided(self, total_BW: str, by_B1: str) -> str:
        return self.nodes.add("Div", total_BW, by_B1)

    def over_time(self, kind: str, x_TBW: str) -> str:
        """A sum or a maximum over time. In this version of ONNX the axes of a sum are an input, those of a maximum an attribute."""
        if kind == "ReduceSum":
            return self.nodes.add(kind, x_TBW, self.nodes.constant([0]), keepdims=0)
        return self.nodes.add(kind, x_TBW, axes=[0], keepdims=0)

    def total(self, before_BW: str | None) -> str:
        here_BW = self.over_time("ReduceSum", self.nodes.add("Where", self.real_TB1, self.y_TBW, self.zero))
        return here_BW if before_BW is None else self.nodes.add("Add", before_BW, here_BW)

    def highest(self, x_TBW: str, before_BW: str | None) -> str:
        """The greatest of each unit so far; 0 where a lane has had no real step."""
        nodes = self.nodes
        here_BW = self.over_time("ReduceMax", nodes.add("Where", self.real_TB1, x_TBW, self.lowest))
        if self.seen is not None and before_BW is not None:
            begun_B1 = nodes.add("Greater", self.seen.count_B1, nodes.constant(0))
            here_BW = nodes.add("Where", begun_B1, nodes.add("Max", before_BW, here_BW), here_BW)
        return nodes.add("Where", self.some_B1, here_BW, before_BW or self.zero)

    def greatest(self, before_BW: str | None) -> str:
        return self.highest(self.y_TBW, before_BW)

    def attended(self, before_BR: str | None) -> tuple[str, str]:
        nodes, width, query = self.nodes, self.head.width, self.head.query
        assert query is not None
        score_TB1 = nodes.add("MatMul", self.y_TBW, nodes.weight("head.query", query[:, None]))
        old_B1 = None if before_BR is None else nodes.slice(before_BR, 1, width + 1)
        highest_B1 = self.highest(score_TB1, old_B1)
        real_TB1 = nodes.add("Where", self.real_TB1, score_TB1, highest_B1)
        weight_TB1 = nodes.add("Exp", nodes.add("Sub", real_TB1, highest_B1))
        weight_TB1 = nodes.add("Where", self.real_TB1, weight_TB1, self.zero)
        weighted_BW = self.over_time("ReduceSum", nodes.add("Mul", weight_TB1, self.y_TBW))
        sum_B1 = self.over_time("ReduceSum", weight_TB1)
        if self.seen is not None and before_BR is not None and old_B1 is not None:
            begun_B1 = nodes.add("Greater", self.seen.count_B1, nodes.constant(0))
            # An old score that is read where nothing was seen might be anything.
            old_B1 = nodes.add("Where", begun_B1, old_B1, highest_B1)
            scale_B1 = nodes.add("Where", begun_B1, nodes.add("Exp", nodes.add("Sub", old_B1, highest_B1)), self.zero)
            weighted_BW = nodes.add("Add", weighted_BW, nodes.add("Mul", nodes.slice(before_BR, 1, 0, width), scale_B1))
            sum_B1 = nodes.add("Add", sum_B1, nodes.add("Mul", nodes.slice(before_BR, 1, width, width + 1), scale_B1))
        some_B1 = nodes.add("Greater", self.count_B1, nodes.constant(0))
        mean_BW = self.divided(weighted_BW, nodes.add("Where", some_B1, sum_B1, self.number(1.0)))
        return mean_BW, nodes.add("Concat", weighted_BW, sum_B1, highest_B1, axis=-1)

    def last(self, before_BW: str) -> str:
        nodes, half = self.nodes, self.head.width // 2
        last_B = nodes.add("Max", nodes.add("Sub", self.lengths_B, nodes.constant(1)), nodes.constant(0))
        y_BTW = nodes.add("Transpose", self.y_TBW, perm=[1, 0, 2])
        last_BW = nodes.add("GatherND", y_BTW, nodes.add("Unsqueeze", last_B, nodes.constant([1])), batch_dims=1)
        if self.head.bidirectional:
            # The reverse direction ends at the first step.
            first_BW = nodes.add("Gather", self.y_TBW, nodes.constant(0), axis=0)
            last_BW = nodes.add("Concat", nodes.slice(last_BW, 1, 0, half), nodes.slice(first_BW, 1, half), axis=-1)
        return nodes.add("Where", self.some_B1, last_BW, before_BW)
