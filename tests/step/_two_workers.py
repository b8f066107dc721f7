"""`python _two_workers.py FOLDER`, under a launcher: the messages of a step, and what is said of a state that lacks a part."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import carrywave as cw
from carrywave.errors import UserError
from carrywave.step.trainer_state import PARTS


def loss(out: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (out - target).square().sum(), torch.tensor(target.numel())


trainer = cw.Trainer(nn.Linear(3, 1), {"lr": 0.1}, loss=loss, device="cpu")
batch = cw.Batch.of(torch.ones(5, 4, 3), torch.ones(5, 4, 1))
trainer.step(batch)  # the first also compares what the workers were given
sums, exchanged = dist.all_reduce, list[int]()
dist.all_reduce = lambda tensor, *how, **named: (exchanged.append(tensor.numel()), sums(tensor, *how, **named))[1]
trainer.step(batch)
dist.all_reduce = sums
state = trainer.state_dict()
said = [f"{len(exchanged)} message"]
for part in PARTS:
    given = {name: value for name, value in state.items() if name != part}
    try:
        trainer.load_state_dict(given)
        said.append("loaded")
    except UserError as error:
        said.append(str(error))
trainer.load_state_dict(state)
Path(sys.argv[1], f"{os.environ['RANK']}.txt").write_text("\n".join(said))
