"""Keyed dropout: the kernel compiled for the CPU has the definition's bits, forward and backward; without it, one warning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _hosted import Hosted

from carrywave.kernels import dropout, random
from carrywave.kernels.cuda import nvrtc
from carrywave.kernels.dropout import Coordinates, dropped, multiplier

BF16, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
KEY = random.key(5)


class OnCuda(torch.Tensor):
    is_cuda = True


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Hosted:
    return Hosted(tmp_path_factory.mktemp("hosted"), {"dropout.cu": [f"drop_{group}" for group in (1, 2, 4, 8)]})


def numbers(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def same_bits(own: Tensor, expected: Tensor) -> bool:
    word = torch.int32 if expected.dtype == SINGLE else torch.int16
    return own.dtype == expected.dtype and torch.equal(own.contiguous().view(word), expected.contiguous().view(word))


PLACES = st.builds(
    Coordinates,
    site=st.integers(0, 2**32 - 1),
    p=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9]),
    locked=st.booleans(),
    start=st.integers(-(2**33), 2**33),
)


@settings(max_examples=60)
@given(
    place=PLACES,
    steps=st.integers(1, 4),
    lanes=st.integers(1, 5),
    units=st.one_of(st.integers(1, 24), st.integers(250, 600)),
    gap=st.integers(0, 3),
    dtype=st.sampled_from([SINGLE, BF16]),
    numbered=st.booleans(),
)
def test_the_kernel_is_the_definition(
    place: Coordinates, steps: int, lanes: int, units: int, gap: int, dtype: torch.dtype, numbered: bool, hosted: Hosted
) -> None:
    x = numbers(steps, lanes, units + gap, dtype=dtype)[..., :units]
    lanes_B = torch.arange(lanes) * 2**31 - 7 if numbered else None
    mask = dropout._defined(x, KEY, lanes_B, place)
    with hosted.in_place():
        assert same_bits(dropout._launch(None, x[: len(mask)], KEY, lanes_B, place), mask)
    x.requires_grad_()
    by = numbers(units, lanes, steps, dtype=dtype).transpose(0, 2)
    results = []
    with hosted.in_place():
        for y in (dropout._Dropped.apply(x, KEY, lanes_B, place), x * mask):
            results.append((y, *torch.autograd.grad(y, x, by)))
    assert all(same_bits(own.detach(), expected.detach()) for own, expected in zip(*results, strict=True))


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
