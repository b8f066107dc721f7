"""Replays follow what was changed in Python since the recording; code of the user's own is recorded only where that is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "one_answer"))
from _emulated_graphs import emulate

import carrywave as cw
from carrywave.model.encoders import Numbers
from carrywave.model.heads.classes import Softmax
from carrywave.step.graphs.capture import Capture
from carrywave.step.graphs.recorded_state import Watch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


def model(head: nn.Module | None = None) -> cw.Model:
    torch.manual_seed(0)
    if head is not None:
        for parameter in head.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
    encoder = nn.Sequential(Numbers(3), nn.Linear(3, 4), nn.Dropout(0.2))
    return cw.Model(encoder, cw.LSTM(4, 6, 2, dropout=0.1), head or Softmax(6, 5))


def batch(number: int) -> cw.Batch:
    generator = torch.Generator().manual_seed(number)
    return cw.Batch.of(torch.randn(4, 3, 3, generator=generator), torch.randint(5, (4, 3), generator=generator), step=number)


def pair(head: Callable[[], nn.Module] | None = None, *, strict: bool = True) -> tuple[cw.Trainer, cw.Trainer]:
    """One that records and one that does not."""
    spec = {"optimizer": "adamw", "lr": 0.01, "clip": 0.5}
    both = tuple(cw.Trainer(model(None if head is None else head()), spec, device="cpu") for _ in range(2))
    both[0].capture = Capture(CPU, watch=Watch(both[0].model, both[0].optimizer, strict=strict))
    return both  # type: ignore[return-value]


def replays(trainer: cw.Trainer) -> int:
    assert trainer.capture is not None
    return trainer.capture.replays["step"]


def set_dropout(trainer: Any) -> None:
    trainer.model.encoder[2].p = 0.6


def decay(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.5


def set_rate(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 0.5


def move(trainer: Any) -> None:
    weight = trainer.model.head.weight
    weight.data = weight.data * 2


@pytest.mark.parametrize("change", [set_dropout, decay, set_rate, move])
def test_a_change_in_python_takes_effect(change: Callable[[cw.Trainer], None]) -> None:
    both = pair()
    for number in range(9):
        if number == 4:
            for each in both:
                change(each)
        losses = [float(each.step(batch(number))) for each in both]
        assert losses[0] == losses[1], number
    # All but the first of the run and the first after the change.
    assert replays(both[0]) == 7
    for (name, own), (_, other) in zip(both[0].named, both[1].named, strict=True):
        assert torch.equal(own, other), name


def test_nothing_changes_by_itself() -> None:
    trainer, _ = pair()
    trainer.step(batch(0))
    assert trainer.capture is not None
    assert trainer.capture.watch is not None
    version = trainer.capture.watch.version()
    assert version is not None
    for number in range(1, 4):
        trainer.step(batch(number))
        trainer.model.eval()
        assert trainer.capture.watch.version() != version
        trainer.model.train()
        assert trainer.capture.watch.version() == version


HOOKS: list[Callable[[Any, Any], Any]] = [
    lambda trainer, hook: trainer.model.head.register_forward_hook(hook),
    lambda trainer, hook: trainer.model.encoder[1].register_forward_pre_hook(hook),
    lambda trainer, hook: trainer.model.head.register_full_backward_hook(hook),
    lambda trainer, hook: trainer.model.encoder[1].weight.register_hook(hook),
    lambda trainer, hook: trainer.model.encoder[1].weight.register_post_accumulate_grad_hook(hook),
    lambda trainer, hook: trainer.optimizer.register_step_pre_hook(hook),
    lambda trainer, hook: trainer.optimizer.register_step_post_hook(hook),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("register", HOOKS)
def test_hooks_are_called_at_every_step(register: Callable[[Any, Any], Any]) -> None:
    trainer, _ = pair()
    for number in range(3):
        trainer.step(batch(number))
    assert replays(trainer) == 2
    called: list[int] = []

    def hook(*given: Any) -> None:
        called.append(1)

    handle = register(trainer, hook)
    for number in range(3, 7):
        trainer.step(batch(number))
    assert len(called) == 4
    handle.remove()
    for number in range(7, 10):
        trainer.step(batch(number))
    assert len(called) == 4
    assert replays(trainer) >= 4
