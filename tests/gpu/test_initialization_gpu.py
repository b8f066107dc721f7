"""Initial weights that are drawn on a GPU have the bits of those drawn on the CPU."""

from __future__ import annotations

import pytest
import torch

from carrywave.model import initialization
from carrywave.model.encoders import Embedding
from carrywave.model.heads.classes import Softmax
from carrywave.model.initialization import initialize
from carrywave.model.lstm import LSTM
from carrywave.model.model import Model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def model(device: str, dtype: torch.dtype) -> Model:
    encoder = Embedding(1000, 48, device=device, dtype=dtype)
    lstm = LSTM(48, [56, 40], proj_size=24, layer_norm=True, learned_carry=True, device=device, dtype=dtype)
    return Model(encoder, lstm, Softmax(24, 1000, device=device).to(dtype))


@pytest.mark.parametrize("init", ["torch", "orthogonal", "xavier"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("block", [500, 1 << 24])
def test_weights_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, init: str, dtype: torch.dtype, block: int) -> None:
    on_cpu, on_gpu = model("cpu", dtype), model("cuda", dtype)
    initialize(on_cpu, 7, init=init, forget_bias=1.0)
    monkeypatch.setitem(initialization.BLOCK_ELEMENTS, "cuda", block)
    initialize(on_gpu, 7, init=init, forget_bias=1.0)
    for (name, here), (_, there) in zip(on_cpu.named_parameters(), on_gpu.named_parameters(), strict=True):
        assert there.is_cuda
        assert torch.equal(here, there.cpu()), name
