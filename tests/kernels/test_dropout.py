"""Keyed dropout: where its kernel cannot run, the definition does, with one warning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from carrywave.kernels import dropout, random
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.dropout import Coordinates, dropped, multiplier

BF16, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
KEY = random.key(5)


class OnCuda(torch.Tensor):
    is_cuda = True


def numbers(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout._cuda_kernel, "failures", [])
    monkeypatch.setattr(dropout, "_checked", set())
    monkeypatch.setattr(nvrtc, "available", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("fault", ["differs", "fails", "missing"])
def test_a_kernel_that_is_not_right_is_not_tried_again(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def launch(x: Tensor | None, like: Tensor, *_: object) -> Tensor:
        tried.append(1)
        if fault == "fails":
            raise nvrtc.KernelError("no room")
        return torch.zeros_like(like)

    monkeypatch.setattr(dropout, "_launch", launch)
    if fault == "missing":
        monkeypatch.setattr(nvrtc, "available", lambda: "no compiler")
    x, place = numbers(3, 2, 9), Coordinates(4, 0.5)
    expected = dropped(x, KEY, None, place)
    reason = {"differs": r"its numbers differ .*\(640 units\)", "fails": "no room", "missing": "no compiler"}[fault]
    with pytest.warns(UserWarning, match=f"carrywave's kernel for dropout is not used, so steps run slower: {reason}"):
        first = dropped(x.as_subclass(OnCuda), KEY, None, place)
    tries = len(tried)
    assert torch.equal(first, expected)
    assert torch.equal(dropped(x.as_subclass(OnCuda), KEY, None, place), expected)
    assert torch.equal(multiplier(x.as_subclass(OnCuda), KEY, None, place) * x, expected)
    assert len(tried) == tries


@pytest.mark.usefixtures("as_on_cuda")
def test_what_the_kernel_does_not_know_is_left_to_the_definition() -> None:
    given = numbers(3, 2, 9)

    def serves(x: Tensor = given, key: Tensor = KEY, lanes: Tensor | None = None, p: float = 0.5) -> bool:
        dropout._checked.update((0, dtype) for dtype in (SINGLE, DOUBLE))
        return dropout._serves(x.as_subclass(OnCuda), key, lanes, p)

    assert serves()
    assert serves(lanes=torch.arange(2))
    assert not serves(given.double())
    assert not serves(given[:0])
    assert not serves(key=KEY.long())
    assert not serves(key=KEY.to("meta"))
    assert not serves(lanes=torch.arange(1))  # one for all
    assert not serves(lanes=torch.arange(2.0))
    assert not serves(lanes=torch.arange(2, device="meta"))
    assert not serves(p=1 - 2**-30)
    with pytest.raises(ValueError, match="below 1"):
        serves(p=1.0)
