"""torch's own samples of its recurrent modules, with which torch tests them: ours give the same outputs, carries and gradients. float64."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import carrywave as cw


def test_all_samples_of_torch() -> None:
    program = Path(__file__).parent / "_torch_samples.py"
    done = subprocess.run([sys.executable, "-W", "ignore", program], capture_output=True, text=True, check=True)
    equal, unequal = json.loads(done.stdout)
    assert unequal == []
    assert equal == {"LSTM": 64, "GRU": 32, "RNN": 64}


def test_torch_fx_records_the_layers_as_one_node() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.lstm, self.out = nn.Embedding(9, 3), cw.LSTM(3, 4, 2), nn.Linear(4, 2)

        def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            y, (h, _) = self.lstm(self.rows(tokens), lengths=lengths)
            out: torch.Tensor = self.out(y) + self.lstm(y[..., :3], hx=(h, h))[0].sum()
            return out

    tagger = Tagger()
    traced = torch.fx.symbolic_trace(tagger)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["rows", "lstm", "out", "lstm"]
    for steps, lengths in ((5, [5, 2]), (3, [1, 3])):
        tokens = torch.arange(2 * steps).view(steps, 2) % 9
        assert torch.equal(traced(tokens, torch.tensor(lengths)), tagger(tokens, torch.tensor(lengths)))
