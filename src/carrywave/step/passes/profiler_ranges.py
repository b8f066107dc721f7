"""Named ranges in a trace of torch.profiler: the tasks of a step as its schedule names them, sends, waits, sums and the update.

Without a profiler a range costs the reading of a flag. In a step that is replayed from a CUDA graph there are none, because no Python runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function

PREFIX = "carrywave "
_NOTHING: AbstractContextManager[None] = nullcontext()


def profiled() -> bool:
    """True while a profiler records this process."""
    return profiler._is_profiler_enabled


def span(name: str) -> AbstractContextManager[object]:
    """A range, if a profiler records it."""
    return record_function(PREFIX + name) if profiler._is_profiler_enabled else _NOTHING
