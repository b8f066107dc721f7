"""The best path of a CRF as ONNX nodes: Viterbi's algorithm in two `Scan`s, one that reads forward and one that looks back.

Shapes: T time, B lane, V labels.
"""

from __future__ import annotations

import numpy as np
import torch

from carrywave.exporting.onnx_layers import Lanes
from carrywave.exporting.onnx_nodes import Nodes
from carrywave.exporting.portable import BATCH, Port
from carrywave.kernels.crf.definition import UNKNOWN
from carrywave.model.heads.crf import CRF


def best_paths(nodes: Nodes, head: CRF, emissions_TBV: str, lanes: Lanes) -> str:
    """The labels of each lane [T, B], `UNKNOWN` after its end, as `kernels.crf.definition.best_paths` has them."""
    assert lanes.real_TB1 is not None  # a model that reads whole sequences always takes lengths
    best_BV, before_TBV = _forward(nodes, head, emissions_TBV, lanes.real_TB1, lanes.number)
    last_BV = nodes.add("Add", best_BV, nodes.weight("head.end", head.chain.end_V))
    last_B1 = nodes.add("ArgMax", last_BV, axis=1, keepdims=1)
    body = Nodes(nodes)
    label, before = body.name("label"), body.name("before")
    earlier = body.add("GatherElements", before, label, axis=1)
    reached = body.add("Identity", label)
    inputs = [Port(label, torch.int64, (BATCH, 1)), Port(before, torch.int64, (BATCH, head.classes))]
    results = [Port(earlier, torch.int64, (BATCH, 1)), Port(reached, torch.int64, (BATCH, 1))]
    outputs = [nodes.name("head.first"), nodes.name("head.path")]
    back = {"num_scan_inputs": 1, "scan_input_directions": [1], "scan_output_directions": [1]}
    nodes.add_many("Scan", [last_B1, before_TBV], outputs, body=body.body(nodes.name("back"), inputs, results), **back)
    path_TB1 = nodes.add("Where", lanes.real_TB1, outputs[1], nodes.constant(UNKNOWN))
    return nodes.add("Squeeze", path_TB1, nodes.constant([2]))


def _forward(nodes: Nodes, head: CRF, emissions_TBV: str, real_TB1: str, lanes: str) -> tuple[str, str]:
    """The best scores at the end of each lane [B, V], and from which label each label of a step is reached [T, B, V]: from itself after
    the end of a lane.
    """
    labels, dtype, chain = head.classes, head.weight.dtype, head.chain
    kind = np.dtype(str(dtype).removeprefix("torch."))
    steps = nodes.add("Squeeze", nodes.size(emissions_TBV, 0), nodes.constant([0]))
    step_T = nodes.add("Range", nodes.constant(0), steps, nodes.constant(1))
    first_T1 = nodes.add("Unsqueeze", nodes.add("Equal", step_T, nodes.constant(0)), nodes.constant([1]))
    zero_BV = nodes.add("Expand", nodes.constant(0.0, kind), nodes.add("Concat", lanes, nodes.constant([labels]), axis=0))
    body = Nodes(nodes)
    best, emission, real, first = (body.name(stem) for stem in ("best", "emission", "real", "first"))
    scores_BVV = body.add("Add", body.add("Unsqueeze", best, nodes.constant([2])), nodes.weight("head.transitions", chain.transitions_VV))
    top_B1 = body.add("ReduceMax", best, axes=[1], keepdims=1)
    reached_BV = body.add("Sub", body.add("ReduceMax", scores_BVV, axes=[1], keepdims=0), top_B1)
    next_BV = body.add("Add", body.add("Where", first, nodes.weight("head.start", chain.start_V), reached_BV), emission)
    # A lane without steps has scores that nobody reads.
    after = body.add("Where", real, next_BV, best)
    label_V = nodes.constant(list(range(labels)))
    before = body.add("Where", real, body.add("ArgMax", scores_BVV, axis=1, keepdims=0), label_V)
    inputs = [
        Port(best, dtype, (BATCH, labels)),
        Port(emission, dtype, (BATCH, labels)),
        Port(real, torch.bool, (BATCH, 1)),
        Port(first, torch.bool, (1,)),
    ]
    results = [Port(after, dtype, (BATCH, labels)), Port(before, torch.int64, (BATCH, labels))]
    outputs = [nodes.name("head.best"), nodes.name("head.before")]
    scanned = [emissions_TBV, real_TB1, first_T1]
    step = body.body(nodes.name("forward"), inputs, results)
    nodes.add_many("Scan", [zero_BV, *scanned], outputs, body=step, num_scan_inputs=len(scanned))
    return outputs[0], outputs[1]
