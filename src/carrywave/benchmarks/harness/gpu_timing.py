"""How `bench kernels` and `bench step` time calls on a GPU: by its own clock, in blocks of back-to-back calls that take turns.

Each block starts with an idle GPU, so time spent waiting for the host counts. Nothing here reads a spec, so the kernels can be timed where
only torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from carrywave.errors import UserError
from carrywave.measure.timing import WARM_UP, Call, captured, gpu_seconds, take_turns

Clock = Callable[[Call, int], float]  # (call, repeats) -> milliseconds per call


def check_gpu(bench: str) -> None:
    """A user error if there is no GPU. Leaves it alone: only other processes may be going to use it."""
    if not torch.cuda.is_available():
        raise UserError(f"bench {bench} needs a GPU, but torch found none that it can use; run it on a machine with an NVIDIA GPU")


def cuda_device(bench: str) -> torch.device:
    """The GPU to benchmark on; a user error if there is none."""
    check_gpu(bench)
    return torch.device("cuda", torch.cuda.current_device())


def elapsed_ms(call: Call, repeats: int) -> float:
    """Milliseconds per call, averaged over `repeats` back-to-back calls."""
    return 1e3 * gpu_seconds(call, repeats)


def time_calls(
    calls: Mapping[str, Call], *, block_ms: float, budget_ms: float, rounds: tuple[int, int], clock: Clock = elapsed_ms
) -> dict[str, list[float]]:
    """Milliseconds of each call in every round. A round gives each call a block of about `block_ms`; all rounds take about `budget_ms`."""
    first_ms = {name: clock(call, 1) for name, call in calls.items()}
    repeats = {name: max(1, round(block_ms / max(ms, 1e-3))) for name, ms in first_ms.items()}
    round_ms = sum(ms * repeats[name] for name, ms in first_ms.items())
    least, most = rounds
    blocks = {name: partial(clock, call, repeats[name]) for name, call in calls.items()}
    return take_turns(blocks, max(least, min(most, int(budget_ms / max(round_ms, 1e-3)))))


def warmed_up(call: Call) -> Call:
    """The call itself, after warming it up."""
    for _ in range(WARM_UP):
        call()
    return call


def graphed(call: Call) -> Call:
    """The call captured as a CUDA graph; its return value is dropped."""
    return captured(call)[0].replay


def one_line(error: BaseException) -> str:
    """An error, shortened to a note in a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
