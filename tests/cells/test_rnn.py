"""The cell `rnn` from a spec to an export: nothing but its file says anything about it."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import carrywave as cw
from carrywave.errors import SpecError, UserError
from carrywave.plan.cost.stage_costs import Costs, far_off
from carrywave.plan.cost.units import Units
from carrywave.spec.facts import DataFacts
from carrywave.spec.load import parse
from carrywave.step.trainer import Trainer
from carrywave.train.fit import train

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from _machines import machine

MODEL = {"cell": "rnn", "hidden": 12, "layers": 2, "dropout": 0.2}


def test_a_run_of_it_is_stopped_goes_on_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("so it goes round and round, and round it goes. " * 12)
    asked: dict[str, Any] = {
        "data": {"train": str(text), "tokens": "char"},
        "model": MODEL,
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
    assert json.loads((tmp_path / "whole" / "plan.json").read_text())["backends"] == ["reference"] * 2
    cw.export(tmp_path / "whole", to="safetensors", output=tmp_path / "exported")
    described = json.loads((tmp_path / "exported" / "model.json").read_text())["model"]
    assert described["cell"] == "rnn"
    [arguments] = described["lstm"]
    assert nn.RNN(**arguments).num_layers == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"cell": "gated"}, r"model.cell is 'gated'; use one of .*lstm, .*rnn"),
        ({"cell": "rnn", "projection": 3}, "cell=rnn has none"),
        ({"cell": "rnn", "forget_bias": 1.0}, "cell=rnn has no forget gate"),
    ],
)
def test_what_it_does_not_have_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse({"model": model})


def test_only_tanh() -> None:
    assert isinstance(cw.RNN(3, 4, nonlinearity="tanh"), cw.Recurrent)
    with pytest.raises(UserError, match="nonlinearity='relu', and has only 'tanh'"):
        cw.RNN(3, 4, nonlinearity="relu")
    with pytest.raises(UserError, match="bias='relu'; pass True or False, and nonlinearity by name"):
        cw.RNN(3, 4, 1, "relu")


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}], ids=str)
def test_it_is_nn_rnn(options: dict[str, Any]) -> None:
    """Outputs, carry and gradients, with sequences packed and padded; float64."""
    torch.manual_seed(0)
    theirs, ours = (kind(3, 4, dtype=torch.float64, **options) for kind in (nn.RNN, cw.RNN))
    ours.load_state_dict(theirs.state_dict())
    first = options.get("batch_first", False)
    x = torch.randn((3, 6, 3) if first else (6, 3, 3), dtype=torch.float64)
    h = torch.randn(theirs.num_layers * (2 if theirs.bidirectional else 1), 3, 4, dtype=torch.float64)
    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 1], batch_first=first)
    found = []
    for module in (theirs, ours):
        module.zero_grad()
        y, end = module(x, h)
        y_packed, end_packed = module(packed)
        (y.square().sum() + end.sum() + y_packed.data.sum() + end_packed.square().sum()).backward()
        found.append([y, end, y_packed.data, end_packed, *(parameter.grad for parameter in module.parameters())])
    for right, got in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-13)
    y, end = ours(x, h, lengths=[6, 4, 1])
    padded, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed, h)[0], batch_first=first)
    torch.testing.assert_close(y, padded, rtol=1e-11, atol=1e-13)


def test_it_is_planned_from_its_own_samples_or_those_of_the_lstm() -> None:
    facts = DataFacts(vocabulary=4096)
    lstm, rnn = (Units.of(parse({"model": {"cell": cell, "hidden": 512, "layers": 2}}), facts) for cell in ("lstm", "rnn"))
    assert rnn.units[1].parameters * 4 == lstm.units[1].parameters
    assert rnn.units[1].carry * 2 == lstm.units[1].carry
    assert rnn.units[1].kept < lstm.units[1].kept
    profile = machine()
    assert far_off(lstm, profile) is None
    assert "no layer of cell rnn: the times are guesses from those of lstm" in str(far_off(rnn, profile))
    guessed = Costs(rnn, profile).unit(1, 32, 32)
    assert 0 < guessed.forward < Costs(lstm, profile).unit(1, 32, 32).forward + 1e-3
    own = tuple(replace(s, kind="rnn", forward_seconds=7.0, backward_seconds=9.0) for s in profile.samples if s.kind == "lstm")
    timed = replace(profile, samples=(*profile.samples, *own))
    assert Costs(rnn, timed).unit(1, 32, 32).forward == pytest.approx(7.0)
    assert far_off(rnn, timed) is None
