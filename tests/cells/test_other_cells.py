"""The cells beside the LSTM from a spec to an export: of `rnn`, nothing but its file says anything; `gru` has backends of its own."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import carrywave as cw
from carrywave.cells.cell import by_name
from carrywave.errors import SpecError, UserError
from carrywave.model.encoders import Numbers
from carrywave.model.heads.forecast import Forecast
from carrywave.model.initialization import initialize
from carrywave.model.model import Model
from carrywave.plan.cost import UnitCosts
from carrywave.plan.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from _machines import machine

DOUBLE = torch.float64
KERNELS = {"rnn": "reference", "gru": "manual"}  # on a CPU
each_cell = pytest.mark.parametrize("cell", KERNELS)


@pytest.mark.sampled(1)
@each_cell
def test_a_run_of_it_is_stopped_goes_on_and_is_exported(cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("so it goes round and round, and round it goes. " * 12)
    asked: dict[str, Any] = {
        "data": {"train": str(text), "tokens": "char"},
        "model": {"cell": cell, "hidden": 12, "layers": 2, "dropout": 0.2},
        "batch": {"lanes": 4, "steps": 8},
        "train": {"epochs": 2, "lr": 0.01, "snapshot_every": 4},
        "plan": {"chunk_steps": 3, "micro_batches": 2},
    }
    spec = parse(asked)
    whole = train(spec, run=tmp_path / "whole", device="cpu")
    plain, done = Trainer.update, [0]

    def update(self: Trainer, *batches: Any) -> Any:
        done[0] += 1
        if done[0] == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", update)
        assert train(spec, run=tmp_path / "stopped", device="cpu").ending == "interrupted"
    resumed = train(spec, run=tmp_path / "stopped", resume=True, device="cpu")
    assert (whole.ending, resumed.ending) == ("done", "done")
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    assert json.loads((tmp_path / "whole" / "plan.json").read_text())["backends"] == [KERNELS[cell]] * 2
    cw.export(tmp_path / "whole", to="safetensors", output=tmp_path / "exported")
    described = json.loads((tmp_path / "exported" / "model.json").read_text())["model"]
    assert described["cell"] == cell
    [arguments] = described["lstm"]
    assert getattr(nn, cell.upper())(**arguments).num_layers == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"cell": "gated"}, r"model.cell is 'gated'; use one of .*lstm, .*rnn"),
        ({"cell": "rnn", "projection": 3}, "cell=rnn has none"),
        ({"cell": "gru", "projection": 3}, "cell=gru has none"),
        ({"cell": "rnn", "forget_bias": 1.0}, "cell=rnn has no forget gate"),
    ],
)
def test_what_it_does_not_have_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse({"model": model})


def test_the_forget_bias_of_a_gru_is_that_of_the_gate_that_keeps_h() -> None:
    gru = cw.GRU(3, 4, dtype=DOUBLE)
    model = Model(Numbers(3), gru, Forecast(4, 1, 1).double())
    initialize(model, 1, forget_bias=100.0)
    h = torch.randn(1, 2, 4, dtype=DOUBLE)
    assert torch.equal(gru(torch.randn(5, 2, 3, dtype=DOUBLE), h)[1], h)
    assert parse({"model": {"cell": "gru", "forget_bias": 1.0}}).model.forget_bias == 1.0
    assert parse({"model": {"cell": "gru"}}).model.forget_bias is None


def test_an_rnn_of_relu_is_the_cell_of_its_own() -> None:
    assert by_name("rnn") is cw.RNN(3, 4, nonlinearity="tanh").cell is cw.RNN.cell
    for made in (cw.RNN(3, 4, nonlinearity="relu"), cw.RNN(3, 4, 1, "relu"), cw.RNN_RELU(3, 4)):
        assert made.cell is by_name("rnn_relu")
    with pytest.raises(UserError, match="RNN got nonlinearity='gelu'; use 'tanh' or 'relu'"):
        cw.RNN(3, 4, nonlinearity="gelu")


@pytest.mark.parametrize("options", [{}, {"zoneout": 0.2}], ids=["by torch", "by the definition"])
def test_a_copy_of_an_rnn_of_relu_is_one(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    whole, theirs = cw.RNN(3, 4, 2, "relu", dtype=DOUBLE, **options).eval(), nn.RNN(3, 4, 2, "relu", dtype=DOUBLE)
    theirs.load_state_dict(whole.state_dict())
    x, file = torch.randn(5, 2, 3, dtype=DOUBLE), io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    for each in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), torch.load(file, weights_only=False)):
        assert isinstance(each, cw.RNN)
        assert each.nonlinearity == "relu"
        assert torch.equal(each(x)[0], whole(x)[0])
    # float64; only the order of summation differs
    assert options or torch.testing.assert_close(whole(x), theirs(x), rtol=1e-12, atol=1e-13) is None


@st.composite
def modules(draw: st.DrawFn) -> dict[str, Any]:
    options = {name: draw(st.booleans()) for name in ("bias", "batch_first", "bidirectional")}
    return {"input_size": draw(st.integers(1, 5)), "hidden_size": draw(st.integers(1, 5)), "num_layers": draw(st.integers(1, 3)), **options}


@each_cell
@given(options=modules(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_it_is_the_module_of_torch(cell: str, options: dict[str, Any], data: st.DataObject) -> None:
    """Outputs, carry and all gradients, with sequences packed and padded; the state dict goes both ways."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    theirs, ours = (getattr(each, cell.upper())(**options, dtype=DOUBLE) for each in (nn, cw))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    steps, lanes, first = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4)), options["batch_first"]
    lengths = sorted([*data.draw(st.lists(st.integers(1, steps), min_size=lanes - 1, max_size=lanes - 1)), steps], reverse=True)
    x = torch.randn((lanes, steps, options["input_size"]) if first else (steps, lanes, options["input_size"]), dtype=DOUBLE)
    h = torch.randn(options["num_layers"] * (1 + options["bidirectional"]), lanes, options["hidden_size"], dtype=DOUBLE)
    found = []
    for module in (theirs, ours):
        given_x, given_h = x.clone().requires_grad_(), h.clone().requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(given_x, lengths, batch_first=first)
        y, end = module(input=given_x, hx=given_h)
        y_packed, end_packed = module(packed)
        (y.square().sum() + end.sum() + y_packed.data.sum() + end_packed.square().sum()).backward()
        found.append([y, end, y_packed.data, end_packed, given_x.grad, given_h.grad, *(each.grad for each in module.parameters())])
    for right, got in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)  # sums of some dozen terms
    y, end = ours(x, h, lengths=lengths)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=first)
    right_packed, right_end = theirs(packed, h)
    right, _ = nn.utils.rnn.pad_packed_sequence(right_packed, batch_first=first)
    torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, right_end, rtol=1e-12, atol=1e-12)


@each_cell
def test_it_is_planned_by_its_own_products(cell: str) -> None:
    facts, gates = DataFacts(vocabulary=4096), by_name(cell).gates
    lstm, other = (Units.of(parse({"model": {"cell": name, "hidden": 512, "layers": 2}}), facts) for name in ("lstm", cell))
    assert other.units[1].parameters * 4 == lstm.units[1].parameters * gates
    assert other.units[1].carry * 2 == lstm.units[1].carry
    assert other.units[1].kept < lstm.units[1].kept
    costs = [UnitCosts(units, machine(), 1)(1, 32, 32).all for units in (other, lstm)]
    assert costs[0] < costs[1]  # fewer gates
