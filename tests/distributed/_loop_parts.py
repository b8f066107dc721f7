"""A worker of test_loop_parts.py: loops of a user's own that average weights, or take gradients apart from updates, on any plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from _mapped import MappedMemory
from _train import main

import carrywave as cw
from carrywave.errors import UserError
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.parallel import mesh as mesh_module
from carrywave.step.passes.profiler_ranges import PREFIX

T, B, WIDTH, VOCABULARY = 6, 4, 16, 30
STEPS = 3
SYNCED = 5


def model(tie: bool) -> cw.Model:
    torch.manual_seed(3)
    encoder, head = Embedding(VOCABULARY, WIDTH), Softmax(WIDTH, VOCABULARY)
    if tie:
        head.weight = encoder.weight
    return cw.Model(encoder, cw.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2), head).double()


def batch(number: int, lanes: int = B) -> cw.Batch:
    draw = torch.Generator().manual_seed(number)
    x, target = torch.randint(0, VOCABULARY, (2, T, lanes), generator=draw)
    target[T - 1 - number % 2 :, 0] = -100  # replicas have different numbers of targets
    return cw.Batch.of(x, target, fresh=number == 0)


def train(case: str, plan: dict[str, Any], keys: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Losses, weights and gradients of a loop, the same on every plan."""
    net = model(tie=case == "ema, tied")
    keys = {"lr": 0.02, "clip": 0.3, "optimizer": "adamw", **keys}
    if case.startswith("ema"):
        keys["ema"] = 0.7
    trainer = cw.Trainer(net, keys, plan=plan, device=device)
    losses: list[float] = []
    found: dict[str, Tensor] = {}
    if case.startswith("ema"):
        for number in range(STEPS):
            losses.append(float(trainer.step(batch(number))))
        losses.append(trainer.evaluate([batch(0)]))
        with trainer.evaluation_weights():
            found = trainer.gathered()
    elif case == "averaged":
        averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        for number in range(STEPS):
            losses.append(float(trainer.step(batch(number))))
            averaged.update_parameters(net)
        with trainer.evaluation_weights(averaged):
            losses.append(trainer.evaluate([batch(0)]))
            found = trainer.gathered()
        losses.append(trainer.evaluate([batch(0)]))
    elif case == "gradients":
        # Of a labelled and an auxiliary batch, one of them with fewer lanes than another plan has workers.
        losses.append(float(trainer.backward(batch(0))))
        losses.append(float(trainer.backward(batch(1), weight=-0.25)))
        losses.append(float(trainer.gradient_norm()))
        mine = {f"gradient {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
        told = {name: tensor.tolist() for name, tensor in mine.items()}
        with torch.no_grad():
            net.lstm.bias_hh_l1.grad = None  # on a stage that does not hold it there is none either
        losses.append(float(trainer.apply()))
        losses.append(float(trainer.step(batch(2))))
        return {"losses": losses, "tensors": {name: tensor.tolist() for name, tensor in trainer.gathered().items()}, "gradients": told}
    elif case == "sam":
        for number in range(STEPS):
            losses.append(float(sam(trainer, batch(number), 0.1)))
        found = trainer.gathered()
    elif case.startswith("sync"):
        for number in range(SYNCED):
            losses.append(float(trainer.step(batch(number))))
        for refused in (lambda: trainer.evaluate([batch(0)]), trainer.gathered, trainer.state_dict, lambda: trainer.backward(batch(0))):
            with pytest.raises(UserError, match=r"trainer\.exchange\(\)|train\.sync="):
                refused()
        trainer.exchange()
        losses = [trainer.evaluate([batch(0)])]
        with trainer.evaluation_weights():
            found = trainer.gathered()
    elif case == "profiled":
        trainer.step(batch(0))
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
            losses.append(float(trainer.step(batch(1))))
        names = sorted(event.name.removeprefix(PREFIX) for event in recorded.events() if event.name.startswith(PREFIX))
        return {"losses": losses, "tensors": {}, "ranges": names}
    else:
        raise AssertionError(case)
    return {"losses": losses, "tensors": {name: tensor.tolist() for name, tensor in found.items()}}


def sam(trainer: cw.Trainer, given: cw.Batch, radius: float) -> Tensor:
    """A step of sharpness-aware minimization, as in docs/python.md."""
    loss = trainer.backward(given)
    scale = radius / (trainer.gradient_norm() + 1e-12)
    before = {p: p.detach().clone() for p in trainer.model.parameters() if p.grad is not None}
    with torch.no_grad():
        for p in before:
            p += p.grad * scale
    trainer.zero_grad()
    trainer.backward(given, again=True)
    with torch.no_grad():
        for p, value in before.items():
            p.copy_(value)
    trainer.apply()
    return loss


def carry_out(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    if job.get("mapped"):  # as in device memory
        MappedMemory.meeting = folder / "mapped"
        mesh_module.symmetric_memory = MappedMemory
        mesh_module.peer_access.in_reach = lambda there, ranks: True
    try:
        return train(job["case"], job["plan"], job["keys"], job["device"])
    except (UserError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(carry_out)
