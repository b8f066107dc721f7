"""Leaves the process of a caller as it was: random state, warnings, hooks, environment variables, and torch's threads and flags.

Training sets some of these for its own use, and so do libraries that it loads; nothing of it is a caller's business.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")


def generators(device: torch.device) -> tuple[Any, ...]:
    """The state of every global random generator."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(legacy=True)


def set_generators(states: tuple[Any, ...], device: torch.device) -> None:
    """Give every global random generator its state back."""
    host, cuda, plain, numpy = states
    torch.set_rng_state(host)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    random.setstate(plain)
    np.random.set_state(numpy)


def leaving_no_trace(work: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that the process is afterwards as it was before the call."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _restored():
            return work(*args, **kwargs)

    return run


@contextmanager
def _restored() -> Iterator[None]:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")  # type: ignore[no-untyped-call]
    states, variables, hook, threads = generators(device), dict(os.environ), threading.excepthook, torch.get_num_threads()
    flags = _flags()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        set_generators(states, device)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        threading.excepthook = hook
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for put_back in flags:
            put_back()


def _flags() -> list[Callable[[], None]]:
    """What gives torch's flags that training sets the values that they have now. The newest come last, because older ones set them too."""
    cudnn, matmul, on_cpu = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    back: list[Callable[[], None]] = [partial(setattr, cudnn, name, getattr(cudnn, name)) for name in ("deterministic", "benchmark")]
    # torch refuses to tell an old one where only newer ones have been set.
    with suppress(RuntimeError):
        back.append(partial(setattr, cudnn, "allow_tf32", cudnn.allow_tf32))
    with suppress(RuntimeError):
        back.append(partial(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    newest = (cudnn.conv, cudnn.rnn, matmul, on_cpu)  # type: ignore[attr-defined]
    return back + [partial(setattr, owner, "fp32_precision", owner.fp32_precision) for owner in newest]
