"""The bits of `kernels.random` in one CUDA kernel instead of about forty: the same function, operation for operation, in C.

Compiled on first use by torch's own elementwise compiler (NVRTC, no nvcc needed), and then checked against the plain operations. If they
differ, or the compiler is missing, the plain operations stay in use, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

Fused = Callable[..., Tensor]

_MIX = "#define CARRYWAVE_MIX(v) v ^= v >> 16; v *= 0x85EBCA6Bu; v ^= v >> 13; v *= 0xC2B2AE35u; v ^= v >> 16;"
_FUNCTION = """
template <typename T> T carrywave_bits_{count}({arguments}) {{
    unsigned int a = (unsigned int)first, b = (unsigned int)second, c, x;
    {mix}
    {absorbed}
    c = (unsigned int)w{count} + 0x9E3779B9u; CARRYWAVE_MIX(c)
    x = a ^ c; CARRYWAVE_MIX(x)
    x = x * (c | 1) + b; CARRYWAVE_MIX(x)
    #undef CARRYWAVE_MIX
    return (T)x;
}}
"""
_ABSORBED = "x = (a ^ (unsigned int)w{number}) * 0x9E3779B1u + b; CARRYWAVE_MIX(x) a = x; x = a ^ b ^ 0x7F4A7C15u; CARRYWAVE_MIX(x) b = x;"


_FOLD = f"""
template <typename T> T carrywave_fold(T first, T second, T w1, T which) {{
    unsigned int a = (unsigned int)first, b = (unsigned int)second, x;
    {_MIX}
    {_ABSORBED.format(number=1)}
    #undef CARRYWAVE_MIX
    return which == 0 ? (T)a : (T)b;
}}
"""


def fused_fold(key: Tensor, word: int, plain: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`fold` in two small kernels instead of about thirty; each training step calls it several times."""
    kernel = _checked_fold(key.device, plain)
    if kernel is None:
        return plain(key, word)
    which = _first_and_second(key.device)
    return kernel(key[0], key[1], torch.full((), word, dtype=torch.int32, device=key.device), which)


@cache
def _first_and_second(device: torch.device) -> Tensor:
    return torch.arange(2, dtype=torch.int32, device=device)


@cache
def _checked_fold(device: torch.device, plain: Callable[[Tensor, int], Tensor]) -> Fused | None:
    try:
        kernel: Fused = torch.cuda.jiterator._create_jit_fn(_FOLD)
        with _unwarned():
            return _folds(kernel, device, plain)
    except Exception as error:
        return _refused(" ".join(str(error).split())[:200])


@contextmanager
def _unwarned() -> Iterator[None]:
    """torch warns if it cannot keep what it compiles, as where several processes make its folder at once; the kernel runs all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Specified kernel cache directory")
        yield


def _folds(kernel: Fused, device: torch.device, plain: Callable[[Tensor, int], Tensor]) -> Fused | None:
    """The kernel, if it folds as the definition does."""
    for word in (0, 1, -5, 0x12345678):
        key = torch.tensor([word ^ 77, -3 - word], dtype=torch.int32, device=device)
        folded = kernel(key[0], key[1], torch.full((), word, dtype=torch.int32, device=device), _first_and_second(device))
        if not torch.equal(folded, plain(key, word)):
            return _refused("its bits differ from the definition")
    return kernel


def _refused(reason: str) -> Fused | None:
    warnings.warn(f"the fused kernel for dropout masks is not used, so steps run slower: {reason}", stacklevel=2)
    return None


def fused(count: int, plain: Fused) -> Fused | None:
    """The kernel for this number of coordinates, `fused(first, second, *coords)`; None if it is unavailable."""
    return _checked(count, plain) if count <= 6 else None


@cache
def _checked(count: int, plain: Fused) -> Fused | None:
    try:
        kernel = _compile(count)
        example = torch.arange(-4, 60, dtype=torch.int32, device="cuda") * 0x01234567
        coords = [example.roll(number) for number in range(count)]
        with _unwarned():
            found = kernel(example[3], example[5], *coords)
        if torch.equal(found, plain(example[3], example[5], *coords)):
            return kernel
        return _refused("its bits differ from the definition")
    except Exception as error:
        return _refused(" ".join(str(error).split())[:200])


def _compile(count: int) -> Fused:
    arguments = ", ".join(f"T {name}" for name in ["first", "second", *(f"w{number}" for number in range(1, count + 1))])
    absorbed = "\n    ".join(_ABSORBED.format(number=number) for number in range(1, count))
    code = _FUNCTION.format(count=count, arguments=arguments, absorbed=absorbed, mix=_MIX)
    kernel: Fused = torch.cuda.jiterator._create_jit_fn(code)
    return kernel
