"""Sums in memory that the workers of one host share: three real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from carrywave.launch.launcher import start

Write = Callable[[str, str], str]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create and /proc")

PROGRAM = """
    import gc, json, os, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from carrywave.parallel.memory import host_memory
    from carrywave.parallel.sums import host_sums
    from carrywave.parallel.sums.host_sums import HostSum, _HostWork
    from carrywave.parallel.world import join, leave

    folder, broken = Path(sys.argv[1]), sys.argv[2]
    world = join("cpu")
    plain = host_memory._opened
    if broken == "other ids" and world.rank == 1:  # as in another container: the number is that of another process, or of none
        host_memory._opened = lambda told, size: plain([os.getpid(), *told[1:]], size)
    if broken == "no memory" and world.rank == 2:
        def refuse(name):
            raise OSError("not here")
        os.memfd_create = refuse

    def link(name):
        try:
            return os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # closed since it was listed
            return ""

    def mapped():
        return Path("/proc/self/maps").read_text().count("carrywave-sums")

    sums, host_sums.LEAST_BYTES = HostSum(dist.group.WORLD), 0
    said = {"shared": [], "right": [], "bits": []}
    for count, dtype in ((1, torch.float32), (2, torch.float32), (1000, torch.float64), (100_003, torch.float32)):
        own = sums.zeros(count, dtype=dtype, device=torch.device("cpu"))
        assert not own.any() and own.shape == (count,)
        for turn in range(3):
            given = [torch.randn(count, generator=torch.Generator().manual_seed(10 * turn + rank)).to(dtype) for rank in range(3)]
            own.copy_(given[world.rank])
            cut = count // 3
            works = [sums.all_reduce(part) for part in (own[:cut], own[cut:]) if len(part)]  # two at once
            for work in works:
                work.wait()
            said["shared"].append(all(isinstance(work, _HostWork) for work in works))
            said["right"].append(torch.equal(own, given[0] + given[1] + given[2]))
            said["bits"].append(own.double().sum().item().hex())
    other = torch.full((5,), float(world.rank))
    sums.all_reduce(other).wait()
    said["elsewhere"] = other.tolist()
    said["mapped"] = mapped()
    del own, works, work
    gc.collect()
    said["left"] = mapped() + sum("carrywave-sums" in link(name) for name in os.listdir("/proc/self/fd"))
    (folder / f"{world.rank}.json").write_text(json.dumps(said))
    leave(world)
"""


@pytest.mark.parametrize("broken", ["", *(pytest.param(how, marks=pytest.mark.slow) for how in ("other ids", "no memory"))])
def test_every_worker_gets_the_same_sums_and_nothing_is_left(broken: str, write: Write, tmp_path: Path) -> None:
    program = write("sums.py", PROGRAM)
    ended = start([sys.executable, program, str(tmp_path), broken], 3)
    assert ended.code == 0, ended
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert found[0]["bits"] == found[1]["bits"] == found[2]["bits"]
    for said in found:
        assert set(said["shared"]) == {not broken}
        assert all(said["right"]) or broken  # gloo adds up in another order
        assert said["elsewhere"] == [3.0] * 5
        assert bool(said["mapped"]) == (not broken)
        assert said["left"] == 0
