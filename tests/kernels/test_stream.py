"""`stream.cu` without a GPU: its orders by its own expressions, its algorithm block by block, and which layers it serves."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _in_float64 import replace_launches
from _problems import Stack, assert_same

from carrywave.kernels.hopper import recurrence
from carrywave.kernels.hopper.choice import wave_for
from carrywave.kernels.hopper.layout import H200, LayerShape, Wave

SOURCE = files("carrywave.kernels").joinpath("source", "stream/stream.cu").read_text("utf-8")
UNITS, LANES, THREADS, CLUSTER = 16, 64, 256, 2
EACH = UNITS * LANES // THREADS
SLICES = UNITS // EACH


def value(pattern: str, **names: int) -> int:
    """An integer expression of the source, for these values of its variables."""
    [code] = re.findall(pattern, SOURCE)
    result = eval(code.replace("/", "//"), {}, {"EACH": EACH, "SLICES": SLICES, "CLUSTER": CLUSTER} | names)
    assert isinstance(result, int)
    return result


def test_threads_have_the_lanes_and_the_gates_of_their_units() -> None:
    owned = {}
    for thread in range(THREADS):
        place = value(r"int place = (.+?);", thread=thread, warp=thread >> 5)
        for n in range(EACH):
            owned[place, thread % SLICES * EACH + n] = thread, n
    assert sorted(owned) == [(place, unit) for place in range(LANES) for unit in range(UNITS)]
    # Rows of the product, four for each unit: a thread takes those at (n * SLICES + slice) * 4, its n-th unit's.
    for row in range(4 * UNITS):
        unit = value(r"int unit = (.+?);", m=row)
        _, n = owned[0, unit]
        slice_ = owned[0, unit][0] % SLICES
        assert row // 4 == n * SLICES + slice_


@pytest.mark.parametrize("hidden", [128, 512, 1024])
def test_blocks_of_a_cluster_need_the_same_chunks_in_backward(hidden: int) -> None:
    members = [value(r"#define BY_PARTS\(n\) (.+)", n=n) for n in range(hidden // UNITS)]
    assert sorted(members) == list(range(hidden // UNITS))
    for first in range(0, len(members), CLUSTER):
        of_cluster = members[first : first + CLUSTER]
        assert len({member & 3 for member in of_cluster}) == 1  # the part of K
        assert len({member >> 2 for member in of_cluster}) == CLUSTER  # the quads


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("chunk", [2, 5])
def test_the_algorithm_is_the_definition(cell: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_launches(monkeypatch, blocks=True)
    shape = LayerShape(128, 1, LANES, 2, cluster=CLUSTER, cell=cell, streamed=1)
    assert shape.valid
    case = Stack(1, 5, 90, 3, short=True, cell=cell, hidden=100)
    assert_same(case.at_once(Wave(shape, 1, chunk)), case.defined())


def test_many_threads_copy_the_first_h(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be marked here, but the numbers of many lanes take one block as long as a hundred steps."""
    grids = []

    def simple(name: str, like: object) -> Callable[..., None]:
        return lambda grid, block, *arguments: grids.append(grid[0] * block[0])

    monkeypatch.setattr(recurrence, "_simple", simple)
    recurrence.states(torch.zeros(400, 512), LayerShape(512, 4, LANES, 2, cluster=CLUSTER, streamed=4), 6, torch.zeros(0))
    assert grids == [400 * 512]


@pytest.mark.parametrize(
    ("layers", "hidden", "lanes", "streams"),
    [
        (1, 1024, 256, 1),
        (1, 768, 256, 1),
        (1, 512, 512, 1),
        (8, 512, 128, 4),
        (4, 768, 128, 2),
        (1, 1024, 128, 0),
        (4, 1024, 64, 0),
        (1, 2048, 64, 0),
    ],
)
def test_it_serves_plain_layers_whose_lanes_would_need_many_passes(layers: int, hidden: int, lanes: int, streams: int) -> None:
    used, marked = (wave_for(H200, layers, hidden, lanes, 256, plain=plain) for plain in (True, False))
    assert used is not None
    assert (used.streams if used.shape.streamed is not None else 0) == streams
    assert marked is None or marked.shape.streamed is None
    if streams:
        assert used.of_cell("gru").back.valid
        assert not used.of_cell("slstm").shape.valid
