"""Keyed randomness: every random number is a pure function of a key and of the element's global coordinates.

There is no generator and no order of drawing, so a mask is the same however lanes and time are split, on CPU and on CUDA.
All arithmetic is on wrapping 32-bit words, so that any kernel can reproduce it:

    mix(x):          x ^= x >>> 16;  x *= 0x85EBCA6B;  x ^= x >>> 13;  x *= 0xC2B2AE35;  x ^= x >>> 16
    absorb(a, b, w): a = mix((a ^ w) * 0x9E3779B1 + b);  b = mix(a ^ b ^ 0x7F4A7C15)        (b uses the new a)
    fold(key, site): absorb(a, b, site)
    bits(key, coordinates w_1 … w_n):
        a, b = key;  for w in w_1 … w_(n-1): absorb(a, b, w);   c = mix(w_n + 0x9E3779B9)
        bits = mix(mix(a ^ c) * (c | 1) + b)

Coordinates are taken modulo 2**32. For each word, `absorb` is a bijection of (a, b), so no information is lost. Without the factor c | 1,
values along the last coordinate would never repeat, and along the one before it they would repeat twice as often as by chance: b is a mix
of a there, so swapping the two summands of mix(a ^ c) + b gives the value at another position. As an int32 the result is uniform;
`uniform` is ((bits >> 8) + 2**23) / 2**24. docs/architecture.md#randomness describes how all this was tested.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carrywave.errors import UserError
from carrywave.kernels.cuda.fused_random import fused, fused_fold

_WORD = 1 << 32
_FEW = 1 << 16
Words = NDArray[np.uint32]


class Draw(Protocol):
    """The signature of `uniform` and `normal`."""

    def __call__(self, key: Tensor, /, *coords: Tensor, dtype: torch.dtype = ...) -> Tensor: ...


def signed(word: int) -> int:
    """The int32 with the same bits."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


_MIX_1, _MIX_2 = signed(0x85EBCA6B), signed(0xC2B2AE35)
_ABSORB, _SECOND, _LAST = signed(0x9E3779B1), signed(0x7F4A7C15), signed(0x9E3779B9)


def site(name: str) -> int:
    """The number of a named site."""
    return zlib.crc32(name.encode())


# torch.compile cannot look into zlib. This is what torch.compiler.assume_constant_result sets, without importing the compiler for it.
site._dynamo_marked_constant = True  # type: ignore[attr-defined]


def key(seed: int, *path: int) -> Tensor:
    """A key, int32[2] on the CPU: 8 bytes of BLAKE2b over the numbers in decimal, so that seeds of any size count in full."""
    digest = hashlib.blake2b(",".join(str(int(number)) for number in (seed, *path)).encode(), digest_size=8).digest()
    words = [int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:])]
    return torch.tensor(words, dtype=torch.int32)


def draw() -> Tensor:
    """Draw a key from torch's default generator, reproducible with torch.manual_seed. Only for use outside a trainer."""
    if _BACKWARDS and torch._C._current_graph_task_id() != -1:
        raise UserError(
            "a module with dropout is computed again in backward, as torch.utils.checkpoint does, where its masks would not be those of "
            "the forward pass; set plan.recompute=true instead, or keep dropout out of what is checkpointed"
        )
    return torch.randint(-(1 << 31), (1 << 31) - 1, (2,), dtype=torch.int64).to(torch.int32)


_BACKWARDS: list[object] = []  # one entry for each pass under way: of all threads, since autograd computes on threads of its own


@contextlib.contextmanager
def without_draws() -> Iterator[None]:
    """Inside this context, `draw` raises in whatever autograd computes: in the backward pass of a trainer nothing has a scope, and nothing
    should need a key.
    """
    _BACKWARDS.append(None)
    try:
        yield
    finally:
        _BACKWARDS.pop()


def fold(key: Tensor, site: int) -> Tensor:
    """The key of a site, derived from this key. On CUDA only tensor operations, so a captured graph can be replayed with another key."""
    if _on_host(key):
        with np.errstate(over="ignore"):
            first, second = _words_of(key)
            return torch.from_numpy(np.stack(_absorb_few(first, second, _u32(site))).view(np.int32))
    return fused_fold(key, signed(site), _fold) if key.is_cuda else _fold(key, signed(site))


def _fold(key: Tensor, word: int) -> Tensor:
    return torch.stack(_absorb(key[0], key[1], word))


def bits(key: Tensor, *coords: Tensor) -> Tensor:
    """32 random bits, as int32, for every element of the broadcast coordinates."""
    if not coords:
        raise ValueError("bits needs at least one coordinate")
    words = [coord.to(torch.int32) for coord in coords]
    if key.is_cuda:
        kernel = fused(len(words), _bits)
        if kernel is not None:
            return kernel(key[0], key[1], *words)
    if _on_host(key, *words):
        return _bits_on_host(key, words)
    return _bits(key[0], key[1], *words)


def _bits(first: Tensor, second: Tensor, *coords: Tensor) -> Tensor:
    for coord in coords[:-1]:
        first, second = _absorb(first, second, coord)
    last = _mix_(coords[-1] + _LAST)
    # Only the operations below run at full size, so they reuse one buffer.
    words = torch.bitwise_xor(first, last)
    return _mix_(_mix_(words).mul_(last | 1).add_(second))


def _on_host(*tensors: Tensor) -> bool:
    """True if these are plain CPU tensors and nothing observes operations on them: no compiler, tracer, transform or dispatch mode."""
    if any(type(each) is not Tensor or each.device.type != "cpu" for each in tensors) or torch.compiler.is_compiling():
        return False
    looked_at = torch._C._get_tracing_state() or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    return not looked_at


def _bits_on_host(key: Tensor, coords: Sequence[Tensor]) -> Tensor:
    """Like `_bits`, in numpy, which has less overhead per operation than torch. The full-size part of large results is left to torch."""
    shape = np.broadcast_shapes(*(coord.shape for coord in coords))
    with np.errstate(over="ignore"):
        first, second = _words_of(key)
        for coord in coords[:-1]:
            first, second = _absorb_few(first, second, _words_of(coord))
        last = _mix_few(_words_of(coords[-1]) + _u32(_LAST))
        if math.prod(shape) <= _FEW:
            words = _mix_few(first ^ last)
            words *= last | _u32(1)
            words += second
            return torch.from_numpy(np.asarray(_mix_few(words)).view(np.int32)).reshape(shape)
    last_, first_, second_ = (torch.from_numpy(np.asarray(each).view(np.int32)) for each in (last, first, second))
    return _mix_(_mix_(torch.bitwise_xor(first_, last_)).mul_(last_ | 1).add_(second_)).reshape(shape)


def uniform(key: Tensor, *coords: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1) that are multiples of 2**-24, so exact in float32 and float64 and equal on every device."""
    return (bits(key, *coords) >> 8).add_(1 << 23).to(torch.promote_types(dtype, torch.float32)).mul_(2.0**-24).to(dtype)


def normal(key: Tensor, *coords: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers (Box–Muller in float64). Devices may differ in the last bit, so initialise on the CPU."""
    radius = uniform(fold(key, 1), *coords, dtype=torch.float64).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
    angle = uniform(fold(key, 2), *coords, dtype=torch.float64).mul_(2 * math.pi).cos_()
    return radius.mul_(angle).to(dtype)


def keep(key: Tensor, p: float, *coords: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dropout multiplier: 0 where `uniform` is below p, 1/(1-p) elsewhere."""
    return bits(key, *coords).ge(threshold(p)).to(dtype).mul_(1.0 / (1.0 - p))


def threshold(p: float) -> int:
    """The smallest value of `bits` that is kept: the comparison of `uniform` with p, in integers."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"a dropout probability must be at least 0 and below 1, got {p}")
    return (math.ceil(p * (1 << 24)) - (1 << 23)) << 8


def _absorb(first: Tensor, second: Tensor, word: Tensor | int) -> tuple[Tensor, Tensor]:
    first = _mix_((first ^ word) * _ABSORB + second)
    return first, _mix_(first ^ second ^ _SECOND)


def _mix_(words: Tensor) -> Tensor:
    """MurmurHash3's finaliser, in place. torch's right shift is arithmetic, so each one is masked into a logical shift."""
    spare = words >> 16
    words.bitwise_xor_(spare.bitwise_and_(0xFFFF)).mul_(_MIX_1)
    torch.bitwise_right_shift(words, 13, out=spare)
    words.bitwise_xor_(spare.bitwise_and_(0x7FFFF)).mul_(_MIX_2)
    torch.bitwise_right_shift(words, 16, out=spare)
    return words.bitwise_xor_(spare.bitwise_and_(0xFFFF))


def _u32(number: int) -> np.uint32:
    return np.uint32(number % _WORD)


def _words_of(tensor: Tensor) -> Words:
    words: Words = tensor.numpy().view(np.uint32)
    return words


def _absorb_few(first: Words, second: Words, word: Words | np.uint32) -> tuple[Words, Words]:
    """Like `_absorb`, in numpy."""
    first = _mix_few((first ^ word) * _u32(_ABSORB) + second)
    return first, _mix_few(first ^ second ^ _u32(_SECOND))


def _mix_few(words: Words) -> Words:
    """Like `_mix_`, in numpy, whose shifts of unsigned words are logical; in place, except for scalars, which are immutable."""
    for shift, factor in ((16, _u32(_MIX_1)), (13, _u32(_MIX_2))):
        words ^= words >> np.uint32(shift)
        words *= factor
    words ^= words >> np.uint32(16)
    return words


@dataclass
class Scope:
    """The coordinates of a module that sees only x: the batch's key, the global lanes of x, the time of its first step. Inside it as a
    context, keyed modules know them.
    """

    key: Tensor | None
    lanes: Tensor | None  # [B]; None: 0, 1, …
    start: int = 0
    pooled: bool = False  # x is [lane, …] instead of [time, lane, …]
    whole: bool = False  # x is a whole batch
    part: str = ""  # of the model: what another part uses too draws other numbers here
    uses: dict[str, int] = field(default_factory=dict)  # how often each named site has drawn in this scope

    def __enter__(self) -> Scope:
        self._token = _SCOPE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _SCOPE.reset(self._token)

    def site(self, name: str) -> int:
        """The number of a named site; a different one on each call, so that a module used twice draws two masks."""
        return site(self._numbered(name))

    def key_of(self, name: str) -> Tensor | None:
        """The key of a module that has several sites of its own; a different one on each call, after the first, which is the batch's."""
        numbered = self._numbered(name)
        return self.key if self.key is None or numbered == name else fold(self.key, site(numbered))

    def _numbered(self, name: str) -> str:
        name = name if name.startswith(self.part) else f"{self.part}:{name}"
        number = self.uses.get(name, 0)
        self.uses[name] = number + 1
        return f"{name}#{number}" if number else name


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("carrywave_scope", default=None)


def current_scope() -> Scope | None:
    """The innermost scope, or None outside any."""
    return _SCOPE.get()
