"""One step in plain operations, from its own state, is what the model computes."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _steps import NAMES, made, stateful

import carrywave as cw
from carrywave.cells.lstm import Carry
from carrywave.errors import UserError
from carrywave.exporting import onnx_file, torch_program
from carrywave.exporting.comparison import largest_step_difference
from carrywave.exporting.portable import Portable
from carrywave.exporting.single_step import onnx_step
from carrywave.exporting.single_step.network import check_steps, network
from carrywave.exporting.single_step.step_module import StepModule
from carrywave.model.encoders import Numbers
from carrywave.model.heads.classes import Softmax
from carrywave.model.model import Model


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_model(name: str) -> None:
    portable = stateful(name, torch.float64)
    formula = network(portable)
    module = StepModule(formula)
    with torch.no_grad():
        found = largest_step_difference(portable, formula, lambda given: module(*given), what="it", tolerance=1e-12)
    assert found < 1e-13  # float64, the same operations in another order


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language", "tagging, heads", "forecasting, linear, scaled, quantiles", "forecasting, categories"])
def test_a_torch_program_of_a_step_has_plain_operators_and_any_number_of_lanes(name: str) -> None:
    portable = stateful(name)
    formula = network(portable)
    data = torch_program.archive(StepModule(formula))
    called = {str(node.target) for node in torch.export.load(io.BytesIO(data)).graph.nodes if node.op == "call_function"}
    assert "aten.sigmoid.default" in called
    assert not [name for name in called if "lstm" in name or "scan" in name or not name.startswith("aten.")]
    run = torch_program.runner(data)
    assert largest_step_difference(portable, formula, run, what="it") < 2e-6  # float32 has 24 bits


def test_initial_states_are_the_learned_ones() -> None:
    model = made("language, widths, norms, learned carry")
    formula = network(stateful("language, widths, norms, learned carry"))
    assert torch.equal(formula.states["c_l1"].initial, model.lstm.carry_c_l1[0])
    assert formula.states["c_l1"].uniform is None
    assert network(stateful("language")).states["h_l0"].uniform == 0.0


def test_what_a_pooled_head_remembers_is_state() -> None:
    names = {
        "classification": [],
        "classification, mean": ["pooled_sum", "pooled_steps"],
        "classification, max": ["pooled_max"],
        "classification, mean and max": ["pooled_sum", "pooled_steps", "pooled_max"],
        "classification, attention": ["pooled_score", "pooled_sum", "pooled_weight"],
    }
    for name, wanted in names.items():
        assert [state for state in network(stateful(name)).states if state.startswith("pooled")] == wanted, name


def test_a_shared_matrix_is_stored_once() -> None:
    assert [tuple(weight.shape) for weight in network(stateful("language, tied")).weights.values()].count((23, 8)) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tagging, both ways", "bidirectional layers read the end of a sequence first"),
        ("tagging, front", "a front reads over time"),
        ("transcription", "the head Ctc reads whole sequences"),
    ],
)
def test_what_reads_whole_sequences_is_refused(name: str, why: str) -> None:
    with pytest.raises(UserError, match=f"a single step cannot be exported: {why}; use --to onnx or --to torch without --step"):
        check_steps(made(name))


def cell_of(step: Any) -> Model:
    class Own(cw.Recurrent):
        cell = cw.Cell("own", gates=2, carry=Carry, step=step)

    return Model(Numbers(3), Own(3, 8), Softmax(8, 2)).eval()


def test_any_cell_that_is_written_in_usual_operations_has_a_step() -> None:
    def step(gates: Any, carry: Any, weights: Any) -> Any:
        keep, new = (gates + weights.recurrent(carry[0])).chunk(2, dim=-1)
        c = torch.sigmoid(keep) * carry[1] + (1 - torch.sigmoid(keep)) * new.clamp(-2, 2).square()
        return torch.tanh(c) / (1.0 + c.abs().log1p()) - 0.1 * (-c.abs()).expm1(), c

    portable = Portable(cell_of(step).double(), stateful=True)
    formula = network(portable)
    module = StepModule(formula)
    with torch.no_grad():
        assert largest_step_difference(portable, formula, lambda given: module(*given), what="it") < 1e-13
    if find_spec("onnx") is not None and find_spec("onnxruntime") is not None:
        run = onnx_file.runner(onnx_step.graph(formula).SerializeToString(), formula)
        assert largest_step_difference(portable, formula, run, what="it") < 1e-13


@pytest.mark.parametrize("odd", ["erf", "cumsum", "shape"])
def test_a_cell_that_has_no_plain_form_is_refused(odd: str) -> None:
    def step(gates: Any, carry: Any, weights: Any) -> Any:
        half = gates.chunk(2, dim=-1)[0]
        return (half.erf() if odd == "erf" else torch.cumsum(half, dim=-1) if odd == "cumsum" else half * half.shape[-1]), carry[1]

    with pytest.raises(UserError, match="export without --step"):
        network(Portable(cell_of(step), stateful=True))
