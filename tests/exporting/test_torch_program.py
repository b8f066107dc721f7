"""torch.export programs compute what our models compute, at sizes that they were not traced with, and hold no pickle."""

from __future__ import annotations

import io
import json
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _export_models import FORMS, STEPWISE, made

from carrywave.exporting import torch_program
from carrywave.exporting.comparison import largest_difference, largest_step_difference
from carrywave.exporting.portable import Portable
from carrywave.kernels.lstm import aten

pytestmark = pytest.mark.slow  # tracing takes seconds


@pytest.mark.parametrize(("name", "stateful"), FORMS)
def test_a_program_computes_what_the_model_computes(name: str, stateful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "ONEDNN_IS_FAST", True)  # as on x86, where the choice of a kernel looks at the number of steps
    portable = Portable(made(name), stateful=stateful)
    run = torch_program.runner(torch_program.archive(portable))
    assert largest_difference(portable, run, what="it") < 2e-6  # small models in float32
    for lanes, steps in ((1, 1), (2, 50)):  # 50: torch has another kernel for long sequences
        given = portable.sample(lanes, steps, seed=9)
        with torch.no_grad():
            for right, got in zip(portable(*given), run(given), strict=True):
                torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STEPWISE[::3])
def test_steps_compute_what_the_whole_computes(name: str) -> None:
    portable = Portable(made(name), step=True)
    data = torch_program.archive(portable)
    graph = torch.export.load(io.BytesIO(data)).graph
    operators = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert not {each for each in operators if "lstm" in each or "gru" in each or "scan" in each}
    assert largest_step_difference(portable, torch_program.runner(data), what="it") < 2e-6


def test_what_torch_has_traced_before_does_not_matter_nor_change() -> None:
    other = torch.nn.LSTM(4, 5)

    def traced(*, decomposed: bool) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own LSTM, and of its own code
            program = torch.export.export(other, (torch.ones(7, 2, 4),), strict=False)
            return len((program.run_decompositions() if decomposed else program).graph.nodes)

    steps, _ = traced(decomposed=True), traced(decomposed=False)
    portable = Portable(made("language"))
    run = torch_program.runner(torch_program.archive(portable))  # time is free, although it was fixed in what came before
    assert largest_difference(portable, run, what="it") < 2e-6
    assert traced(decomposed=True) == steps


def test_the_weights_come_back_bit_for_bit() -> None:
    model = made("language, widths, norms, learned carry")
    data = torch_program.archive(Portable(model))
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert any(name.endswith("models/model.json") for name in files.namelist())
        for name in files.namelist():  # and nothing is pickled
            assert "/data/sample_inputs/" not in name or not files.read(name)
            if name.endswith(("_weights_config.json", "_constants_config.json")):
                assert not any(entry.get("use_pickle") for entry in json.loads(files.read(name))["config"].values())
    program = torch.export.load(io.BytesIO(data))
    found = {name.removeprefix("model."): tensor for name, tensor in program.state_dict.items()}
    own = dict(model.named_parameters())
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
