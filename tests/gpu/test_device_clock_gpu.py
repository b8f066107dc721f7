"""The GPU's own time stamps, launched and in a CUDA graph."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from carrywave.plan.schedule.schedule import StageTask
from carrywave.step.passes.device_clock import DeviceClock

pytestmark = pytest.mark.gpu


def test_every_replay_is_timed_anew() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    own = DeviceClock(device)
    x = torch.randn(2048, 2048, device=device)

    def step() -> None:
        for chunk in range(3):
            with own.lap("F", StageTask("F", 0, chunk)):
                for _ in range(10):
                    x @ x

    step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    before = own.read()
    begin.record()
    graph.replay()
    end.record()
    laps = own.read()
    assert [lap.task.chunk for lap in laps] == [0, 1, 2]
    assert all(one.end <= two.start for one, two in pairwise(laps))
    assert laps[0].start > before[-1].end
    # The clock of the GPU ticks once in a microsecond or faster, and the laps are almost all of the replay.
    assert 0 < own.seconds() <= begin.elapsed_time(end) / 1e3 + 1e-5
    assert own.seconds() > 0.5 * begin.elapsed_time(end) / 1e3
