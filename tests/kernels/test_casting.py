"""Rows cast and padded, and back: the kernel compiled for the CPU has torch's bits; without it torch's copy runs, with one warning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _hosted import Hosted

from carrywave.kernels.cuda import casting, nvrtc

BF16, FP16, SINGLE = torch.bfloat16, torch.float16, torch.float32
NAMES = [f"{name}_{group}" for name in ("narrow", "move", "widen") for group in (1, 2, 4)]


class OnCuda(torch.Tensor):
    is_cuda = True


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Hosted:
    return Hosted(tmp_path_factory.mktemp("hosted"), {"casting.cu": NAMES})


def numbers(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * 1000 + width)).to(dtype)


@given(
    rows=st.integers(1, 20),
    width=st.one_of(st.integers(1, 40), st.integers(120, 1100)),
    offset=st.integers(0, 5),
    gap=st.integers(0, 5),
    dtype=st.sampled_from([SINGLE, BF16]),
    more=st.sampled_from([None, 0, 8, 72]),
)
def test_the_kernel_casts_and_pads_as_torch_does(
    rows: int, width: int, offset: int, gap: int, dtype: torch.dtype, more: int | None, hosted: Hosted
) -> None:
    x = numbers(rows, offset + width + gap, dtype)[:, offset : offset + width]
    padded = -(-width // 8) * 8
    to = torch.full((rows, padded + (more or 0)), torch.nan, dtype=BF16)
    with hosted.in_place():
        casting._launch(x, to)
    assert torch.equal(to[:, :width], x.to(BF16))
    assert not to[:, width:].any()


@given(
    rows=st.integers(1, 20),
    width=st.one_of(st.integers(1, 40), st.integers(120, 1100)),
    gap=st.integers(0, 9),
    dtype=st.sampled_from([SINGLE, BF16]),
)
def test_the_kernel_casts_back_as_torch_does(rows: int, width: int, gap: int, dtype: torch.dtype, hosted: Hosted) -> None:
    x = numbers(rows, width + gap, BF16)[:, :width]
    to = torch.full((rows, width), torch.nan, dtype=dtype)
    with hosted.in_place():
        casting._launch(x, to)
    assert torch.equal(to, x.to(dtype))


def test_on_a_gpu_the_kernel_runs_where_rows_are_not_dense_on_both_sides() -> None:
    def serves(x: Tensor, to: Tensor) -> bool:
        return casting._serves(x.as_subclass(OnCuda), to)

    x, padded, dense = numbers(3, 6, SINGLE), torch.empty(3, 8, dtype=BF16), torch.empty(3, 6, dtype=BF16)
    assert serves(x, padded)
    assert serves(padded[:, :6], dense)
    assert serves(padded[:, :6], x)
    assert not casting._serves(x, padded)  # on the CPU
    assert not serves(x, dense)  # torch's is as fast
    assert not serves(x.t(), torch.empty(6, 8, dtype=BF16))
    assert not serves(x.double(), padded)
    assert not serves(x.to(FP16), padded)
    assert not serves(x[:0], padded[:0])
    assert not serves(x, torch.empty(3, 8))


@pytest.mark.parametrize("fp16", [0, 1])
def test_the_sources_compile(fp16: int) -> None:
    if why := nvrtc.available():
        pytest.skip(f"NVRTC is not here: {why}")
    assert nvrtc.binary("casting.cu", (("FP16", fp16),), "sm_90a")[:4] == b"\x7fELF"
    for wide in (0, 1 - fp16):
        assert nvrtc.binary("dropout.cu", (("FP16", fp16), ("WIDE", wide)), "sm_90a")[:4] == b"\x7fELF"
