"""Precisions: what they switch in torch, that others in the process can still read it, and what `auto` is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import carrywave as cw
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.parallel.world import World
from carrywave.step import precision as precisions
from carrywave.step.precision import configure, made_for_bf16, not_made_for_bf16, settled

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("bf16", False), ("fp64", False)])
def test_tf32_only_where_it_is_asked_for(precision: str, tf32: bool) -> None:
    configure(precision)
    # These raise where cuDNN's parts were set apart from each other.
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    with torch.backends.cudnn.flags(enabled=False):
        pass
    configure("fp32")


@pytest.mark.parametrize(
    ("capability", "supported", "made"),
    [((8, 0), True, True), ((9, 0), True, True), ((12, 1), True, True), ((7, 5), False, False), ((8, 6), False, False)],
)
def test_gpus_with_units_for_bf16_are_made_for_it(
    capability: tuple[int, int], supported: bool, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    # Emulated, every GPU supports it.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported or including_emulation)
    assert made_for_bf16(GPU) is made
    assert made_for_bf16(CPU) is False


def test_auto_is_what_suits_every_worker() -> None:
    assert settled({}, 4, None) == ("bf16", None)
    assert settled({0: "cpu", 1: "cpu"}, 2, None) == ("fp32", None)  # as everyone expects: nothing to be said
    found, said = settled({2: "Tesla V100"}, 4, None)
    assert found == "fp32"
    assert said == "train.precision is fp32 on all workers, because rank 2 (Tesla V100) is not made for bf16"
    assert not_made_for_bf16(World.alone(CPU)) == {0: "cpu"}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.cross_entropy(self.out(y).flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


def test_a_trainer_settles_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(head: nn.Module, given: dict[str, str]) -> str:
        return cw.Trainer(cw.Model(Embedding(5, 4), cw.LSTM(4, 4), head), given).spec.precision

    assert of(Softmax(4, 5), {}) == "fp32"
    monkeypatch.setattr(precisions, "made_for_bf16", lambda device: True)
    assert of(Softmax(4, 5), {}) == "bf16"
    assert of(Softmax(4, 5), {"precision": "auto"}) == "bf16"
    assert of(Softmax(4, 5), {"precision": "fp32"}) == "fp32"
    # Code that carrywave does not know is not put under autocast unless its owner asks for that.
    assert of(Head(), {}) == "fp32"
    assert of(Head(), {"precision": "bf16"}) == "bf16"
    assert settled({}, 1, Head())[1] is not None
