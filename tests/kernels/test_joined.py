"""Layers in one launch (`joined.cu`) without a GPU: the algorithm in float64 against the definition, its arguments, and whom it serves.

Shapes: T time, B lane, I input, H hidden.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_persistent import compile_source

from carrywave.kernels.hopper import joined, recurrence
from carrywave.kernels.hopper.choice import wave_for
from carrywave.kernels.hopper.layout import H200, LayerShape

SOURCE = files("carrywave.kernels").joinpath("source", "joined/joined.cu").read_text("utf-8")


@pytest.mark.parametrize(("struct", "row"), [("Forward", joined.ForwardLayer), ("Backward", joined.BackwardLayer)])
def test_arguments_have_the_order_of_the_source(struct: str, row: type[joined.ForwardLayer] | type[joined.BackwardLayer]) -> None:
    [fields] = re.findall(rf"struct {struct} \{{(.+?)\}};", SOURCE, flags=re.DOTALL)
    theirs = re.findall(r"\w+\* (\w+);", fields)
    ours = [re.sub(r"_[A-Z]+$", "", name) for name in row._fields]
    same = {"cells": "memories", "first_c": "first_memory", "last_c": "last_memory", "grad_last_c": "grad_last_memory"}
    same["grad_first_c"] = "grad_first_memory"
    assert [same.get(name, name) for name in ours] == theirs
    assert len(theirs) == len(re.findall(r"^ +[^/ ].*?;", fields, flags=re.MULTILINE))  # all are pointers


@pytest.mark.parametrize("fp16", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "shape",
    [
        LayerShape(128, 1, 8, 1, joined=2),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (LayerShape(512, 1, 16, 1, 32, joined=8), LayerShape(704, 1, 24, 1, cluster=4, cell="gru", joined=2))
        ),
    ],
)
def test_the_source_compiles(shape: LayerShape, fp16: bool, tmp_path: Path) -> None:
    assert shape.fits(H200)
    compile_source(recurrence.JOINED, shape.constants(fp16=fp16), tmp_path)


def test_layouts_that_the_kernel_does_not_have_are_not_valid() -> None:
    shape = LayerShape(512, 1, 16, 1, joined=4)
    assert shape.valid
    assert not replace(shape, passes=2).valid
    assert not replace(shape, cell="slstm").valid
    assert not replace(shape, joined=17).valid
    assert not replace(shape, hidden=2048).valid
    assert shape.blocks == 4 * 32


@pytest.mark.parametrize(
    ("layers", "hidden", "lanes", "joins"),
    [(8, 512, 16, True), (4, 512, 16, True), (4, 1024, 64, False), (8, 512, 128, False), (1, 512, 16, False)],
)
def test_it_serves_small_batches_of_layers_that_fit_side_by_side(layers: int, hidden: int, lanes: int, joins: bool) -> None:
    used, marked = (wave_for(H200, layers, hidden, lanes, 256, plain=plain) for plain in (True, False))
    assert used is not None
    assert (used.shape.joined > 1) is joins
    assert marked is None or marked.shape.joined == 1
