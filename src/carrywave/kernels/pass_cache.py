"""What is made of weights once a pass, however many chunks and micro-batches need it: weights do not change within a pass.

Only for weights that are parameters themselves: derived ones (dropped, pruned) are new tensors in every chunk.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
_Made = dict[Hashable, tuple[Sequence[Tensor | None], Any]]  # with the weights, whose ids must not be taken by others

_CURRENT: contextvars.ContextVar[_Made | None] = contextvars.ContextVar("carrywave_pass_cache", default=None)


@contextlib.contextmanager
def pass_cache() -> Iterator[None]:
    """Inside this context, `cached` makes everything once."""
    token = _CURRENT.set({})
    try:
        yield
    finally:
        _CURRENT.reset(token)


def cached(weights: Sequence[Tensor | None], how: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes of these weights in the way `how`: made now, or earlier in the same pass."""
    current = _CURRENT.get()
    if current is None or not all(each is None or lasting(each) for each in weights):
        return make()
    # A weight that somebody writes to in the middle of a pass has another version, one whose `.data` is replaced another address.
    key = how, *(None if each is None else (id(each), each._version, each.data_ptr()) for each in weights)
    if key not in current:
        current[key] = weights, make()
    made: T = current[key][1]
    return made


def lasting(weight: Tensor) -> bool:
    """True if a weight is the same tensor in every chunk: a parameter, or a leaf that is trained like one."""
    return (isinstance(weight, nn.Parameter) or (weight.requires_grad and weight.is_leaf)) and not weight.is_inference()
