"""What every cell promises, one that is only here among them: its weights, its carry, its answer in chunks and with lengths, and its names
wherever they are written.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import carrywave as cw
from carrywave.cells.cell import Cell, by_name, names
from carrywave.errors import DataError, SpecError, UserError
from carrywave.exporting.comparison import largest_difference
from carrywave.exporting.onnx_file import runner
from carrywave.exporting.onnx_graph import graph
from carrywave.exporting.portable import Portable
from carrywave.model.encoders import Numbers
from carrywave.model.heads.forecast import Forecast
from carrywave.model.initialization import initialize
from carrywave.model.lstm import class_of
from carrywave.model.model import Model
from carrywave.model.parameter_placement import homes
from carrywave.model.portable_names import outside
from carrywave.model.pretrained.layers import load_lstm
from carrywave.step.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from _odd import CELLS, Odd

every_cell = pytest.mark.parametrize("kind", CELLS.values(), ids=list(CELLS))
DOUBLE = torch.float64


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def dtypes(found: Any) -> list[torch.dtype]:
    return [found.dtype] if isinstance(found, Tensor) else [each for part in found for each in dtypes(part)]


def stack(kind: Any, *sizes: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(*sizes, **{"dtype": DOUBLE, **options})


def carry_of(layers: Any, lanes: int) -> tuple[Any, ...]:
    """One of random numbers for each layer."""
    start = layers.initial(lanes)
    return tuple(type(each)(*(numbers(*part.shape, seed=number) for number, part in enumerate(each))) for each in start)


def test_the_cells_are_the_files_of_their_folder() -> None:
    assert "lstm" in names()
    for name in names():
        assert isinstance(by_name(name), Cell)
        assert by_name(name).name == name
        assert getattr(cw, name.upper()) is class_of(name)
    assert cw.LSTM is class_of("lstm")
    with pytest.raises(SpecError, match=r"model.cell=gated is not a cell; use one of .*lstm"):
        by_name("gated")
    with pytest.raises(AttributeError, match="GATED"):
        _ = cw.GATED


@every_cell
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}, {"learned_carry": True, "layer_norm": True}], ids=str)
def test_parts_and_parameters_are_where_the_cell_says(kind: Any, options: dict[str, Any]) -> None:
    layers, cell = stack(kind, 3, [4, 6], **options), kind.cell
    shapes = {name: tuple(each.shape) for name, each in layers.named_parameters()}
    ways = ("_reverse", "") if options.get("bidirectional") else ("",)
    for layer, (inputs, hidden) in enumerate([(3, 4), (4 * len(ways), 6)]):
        for way in ways:
            assert shapes.pop(f"weight_ih_l{layer}{way}") == (cell.gates * hidden, inputs)
            assert shapes.pop(f"weight_hh_l{layer}{way}") == (cell.gates * hidden, hidden)
            for name in ("bias_ih", "bias_hh") if options.get("bias", True) else ():
                assert shapes.pop(f"{name}_l{layer}{way}") == (cell.gates * hidden,)
            for name, extra in cell.extra(hidden).items():
                assert shapes.pop(f"{name}_l{layer}{way}") == extra.shape
                assert (getattr(layers, f"{name}_l{layer}{way}") == extra.value).all()
        for part in cell.free_parts if options.get("learned_carry") else ():
            assert shapes.pop(f"carry_{part}_l{layer}") == (len(ways), hidden)
    assert {name for name in shapes if not name.startswith("norm")} == set()
    _, ends = layers(numbers(5, 2, 3))
    assert [list(end._asdict()) for end in ends] == [list(cell.parts)] * 2
    own = [name for name, _ in layers.named_parameters() if "carry" not in name and "norm" not in name]
    assert sum(len(each) for each in layers.all_weights) == len(own)


@every_cell
@pytest.mark.parametrize("both_ways", [False, True])
def test_padding_changes_nothing(kind: Any, both_ways: bool) -> None:
    """A lane of a padded batch gives what it gives alone; one without real steps keeps its carry."""
    layers, x, lengths = stack(kind, 3, 4, 2, bidirectional=both_ways), numbers(6, 4, 3), [6, 2, 0, 4]
    for lane, length in enumerate(lengths):
        x[length:, lane] = torch.nan
    carry = layers.join(carry_of(layers, 4))
    parts = (carry,) if isinstance(carry, Tensor) else carry
    y, ends = layers(x, carry, lengths)
    after = (ends,) if isinstance(ends, Tensor) else ends
    for lane, length in enumerate(lengths):
        own = [part[:, lane : lane + 1] for part in parts]
        assert torch.equal(y[length:, lane], torch.zeros_like(y[length:, lane]))
        if not length:
            assert all(torch.equal(end[:, lane : lane + 1], part) for end, part in zip(after, own, strict=True))
            continue
        alone, end = layers(x[:length, lane : lane + 1], own[0] if len(own) == 1 else own)
        torch.testing.assert_close(y[:length, lane : lane + 1], alone, rtol=1e-12, atol=1e-14)
        ended = (end,) if isinstance(end, Tensor) else end
        for mine, theirs in zip(after, ended, strict=True):
            torch.testing.assert_close(mine[:, lane : lane + 1], theirs, rtol=1e-12, atol=1e-14)


@every_cell
def test_half_precision_computes_in_it_and_has_the_types_of_torch(kind: Any) -> None:
    layers = stack(kind, 3, 4, dtype=torch.float32)
    x, carry = numbers(5, 2, 3).float(), tuple(type(each)(*(part.float() for part in each)) for each in carry_of(layers, 2))
    expected, _ = layers(x, carry)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, end = layers(x, carry)
    if kind.cell.torch_module is not None:
        theirs = getattr(nn, kind.cell.torch_module)(3, 4, **kind.cell.torch_arguments)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            like = theirs(x)
            plain = layers(x)
        assert dtypes((y, end)) == dtypes(plain) == dtypes(like)
    else:
        assert dtypes((y, end)) == [torch.bfloat16, *[torch.float32] * len(kind.cell.parts)]
    torch.testing.assert_close(y.float(), expected, rtol=2**-6, atol=2**-6)  # bf16 has 8 bits, and steps follow each other


@every_cell
def test_names_and_units_of_all_parameters(kind: Any) -> None:
    model = Model(Numbers(3), kind(3, 4, 2, learned_carry=True), Forecast(4, 1, 1))
    for name, units in homes(model).items():
        assert units == ({int(name.partition("_l")[2][0]) + 1} if name.startswith("lstm.") else {3})
    assert all(theirs == ours or "carry" in ours for ours, theirs in outside(homes(model), model.lstm).items())
    apart = outside(homes(model), kind(3, [4, 6]))
    assert apart["lstm.weight_hh_l1"] == "lstm.1.weight_hh_l0"
    for name in kind.cell.extra(4):
        assert apart[f"lstm.{name}_l1"] == f"lstm.1.{name}_l0"


@every_cell
@pytest.mark.parametrize("init", ["torch", "orthogonal", "xavier"])
def test_keyed_weights_sit_where_the_cell_says(kind: Any, init: str) -> None:
    layers, hidden = kind(3, 4, 2), 4
    forget = None if kind.cell.forget_gate is None else 2.5
    model = Model(Numbers(3), layers, Forecast(4, 1, 1))
    assert initialize(model, 7, init=init, forget_bias=forget) == ()
    if kind.cell.forget_gate is not None:
        rows = slice(kind.cell.forget_gate * hidden, (kind.cell.forget_gate + 1) * hidden)
        assert layers.bias_ih_l1[rows].tolist() == [2.5] * hidden
        assert layers.bias_hh_l1[rows].tolist() == [0.0] * hidden
    for name, extra in kind.cell.extra(hidden).items():
        assert (getattr(layers, f"{name}_l1") == extra.value).all()
    if init == "orthogonal":
        for block in layers.weight_hh_l1.double().chunk(kind.cell.gates):
            torch.testing.assert_close(block @ block.T, torch.eye(hidden, dtype=DOUBLE), rtol=0, atol=1e-6)  # rounded to float32


@every_cell
def test_a_state_names_the_parts_of_the_carry(kind: Any) -> None:
    """As in states written before there were other cells than the LSTM: lstm.l0.h, lstm.l0.c."""
    batch = cw.Batch.of(numbers(5, 2, 3), numbers(5, 2, 1, 1))

    def trainer() -> Trainer:
        torch.manual_seed(0)
        return Trainer(Model(Numbers(3), stack(kind, 3, 4, 2), Forecast(4, 1, 1).double()), {"precision": "fp64"}, keep_state=True)

    first = trainer()
    first.update(batch)
    state = first.state_dict()
    assert sorted(state["carry"]) == sorted(f"lstm.l{layer}.{part}" for layer in range(2) for part in kind.cell.parts)
    if kind is cw.LSTM:
        assert sorted(state["carry"]) == ["lstm.l0.c", "lstm.l0.h", "lstm.l1.c", "lstm.l1.h"]
    second = trainer()
    second.load_state_dict(state)
    for each in (first, second):
        each.update(batch)
    found = [each.gathered() for each in (first, second)]
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_cell_without_an_onnx_operator_is_a_scan_over_its_steps() -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    portable = Portable(Model(Numbers(3), Odd(3, 4), Forecast(4, 1, 1)))
    model = graph(portable)
    assert "Scan" in {node.op_type for node in model.graph.node}
    assert largest_difference(portable, runner(model.SerializeToString(), portable), what="it") < 1e-5


def test_what_a_step_returns_is_checked() -> None:
    def broken(step: Any) -> Any:
        return type("Broken", (cw.Recurrent,), {"cell": replace(cw.LSTM.cell, name="broken", kernels=False, step=step)})(3, 4)

    cases: list[tuple[Any, str]] = [
        (lambda gates, carry, weights: carry.h, "must return a tuple of h, c"),
        (lambda gates, carry, weights: (carry.h,), "must return a tuple of h, c"),
        (lambda gates, carry, weights: (carry.h, carry.c[:, :1]), "returns c in another shape"),
    ]
    for step, message in cases:
        with pytest.raises(UserError, match=f"step of the cell broken {message}"):
            broken(step)(torch.zeros(2, 2, 3))
    with pytest.raises(UserError, match=r"Recurrent names no cell; use cw\.LSTM"):
        cw.Recurrent(3, 4)


@every_cell
def test_layers_of_another_number_of_gates_are_not_loaded(kind: Any) -> None:
    gates = kind.cell.gates
    for hidden in (4, 8):
        other = {"weight_ih_l0": torch.zeros((gates + 1) * hidden, 3), "weight_hh_l0": torch.zeros((gates + 1) * hidden, hidden)}
        with pytest.raises(DataError, match=f"has layers of {gates + 1} gates, but the cell {kind.cell.name} has {gates}"):
            load_lstm(kind(3, 4), other)


@every_cell
def test_mistakes_are_named_by_the_class(kind: Any) -> None:
    layers, name = kind(3, 4), kind.__name__
    parts = kind.cell.parts
    for given, message in (
        (lambda: layers(torch.zeros(2, 2, 5)), f"{name} got x of shape"),
        (lambda: layers(torch.zeros(2, 2, 3), [torch.zeros(1, 3, 4)] * len(parts)), f"carry {parts[0]} of layer 0 has shape"),
        (lambda: layers(torch.zeros(2, 2, 3), [torch.zeros(2, 2, 4)] * len(parts)), "the first dimension must be 1"),
        (lambda: layers(torch.zeros(2, 2, 3), [[torch.zeros(1, 2, 4)] * 5]), "a layer's carry has 5 parts"),
        (lambda: kind(3, 4, kernel="fast"), "kernel=fast is not a backend"),
        (lambda: kind(3, 4, bias="relu"), f"{name} got bias='relu'; pass True or False"),
        *([] if kind.cell.projects else [(lambda: kind(3, 4, proj_size=2), f"{name} has no projection")]),
    ):
        with pytest.raises(UserError, match=message):
            given()
    with pytest.raises(TypeError, match="unexpected keyword argument 'peephole'"):
        kind(3, 4, peephole=True)
