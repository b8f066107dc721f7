"""Saves one snapshot after the other in children that are killed at a random byte or call, and looks at what is left each time.

`python _killed.py FOLDER KILLS`: nothing is printed where all is well. The children are forked from a process without threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from _whole_snapshots import Snapshot, load, save
from carrywave.parallel.world import World
from carrywave.runs.checkpoint.writer import Writer

SIZE = 3000
EVENTS = 150_000  # about as many bytes and calls as a save has


class Doom:
    """Kills this process at the given count of bytes written and calls made."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            self.spend(4000)  # worth as much as some bytes, so that there is a fair chance that it happens here
            result = real(*args, **more)
            self.spend(4000)
            return result

        return called

    def opened(self, path: Path, *args: Any, **more: Any) -> Any:
        return Doomed(OPEN(path, *args, **more), self)


class Doomed:
    """A file whose writing may be the end."""

    def __init__(self, file: Any, doom: Doom) -> None:
        self.file, self.doom = file, doom

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        fits = min(len(view), max(self.doom.left, 0))
        self.file.write(view[:fits])
        if fits < len(view):
            self.file.flush()
        self.doom.spend(len(view))
        self.file.write(view[fits:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Doomed:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


OPEN = Path.open


def state(value: int) -> Snapshot:
    return Snapshot(
        {"w": torch.full((SIZE,), float(value))},
        {"exp_avg/w": torch.full((SIZE,), -float(value))},
        {"lstm.l0.h": torch.full((1, 5, 100), float(value))},
        meta={"value": value},
    )


def whole(found: Snapshot) -> bool:
    wanted = state(found.meta["value"])
    groups = ("parameters", "optimizer", "carry")
    return all(torch.equal(getattr(found, group)[name], tensor) for group in groups for name, tensor in getattr(wanted, group).items())


def child(folder: Path, value: int, doom: Doom, background: bool) -> None:
    os.replace, os.fsync, Path.mkdir = doom.call(os.replace), doom.call(os.fsync), doom.call(Path.mkdir)  # type: ignore[assignment, method-assign]
    Path.open = lambda path, *args, **more: doom.opened(path, *args, **more)  # type: ignore[method-assign, assignment]
    name, kept = f"step-{value:04d}", state(value)
    if not background:
        save(folder, name, kept, keep=2, best=value % 3 == 0)
        return
    writer = Writer(World.alone(torch.device("cpu")), folder)
    writer.meet()
    groups = {"parameters": kept.parameters, "optimizer": kept.optimizer, "carry": {"lstm.l0.h/0-5": kept.carry["lstm.l0.h"]}}
    writer.begin(name, groups, kept.meta, keep=2, best=value % 3 == 0)
    for tensors in groups.values():
        for tensor in tensors.values():
            tensor.add_(1)  # training goes on
    failure = writer.settle()
    assert failure is None, failure


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(kills)
    save(folder, "step-0000", state(0), keep=2, best=True)
    newest, value, died = 0, 0, 0
    while died < kills:
        value += 1
        pid = os.fork()
        if pid == 0:
            child(folder, value, Doom(draw.randrange(EVENTS)), value % 2 == 0)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, -signal.SIGKILL):
            sys.exit(f"a child ended with {code}")
        died += code != 0
        found = load(folder)
        if not whole(found) or found.meta["value"] not in ((value,) if code == 0 else (newest, value)):
            sys.exit(f"after step {value}, ended with {code}, {newest} stood before and {found.meta} stands now")
        best = load(folder / (folder / "best").read_text().strip())
        if not whole(best) or best.meta["value"] % 3:
            sys.exit(f"best is {best.meta}")
        newest = found.meta["value"]
    save(folder, "step-9999", state(9999), keep=2)
    left = sorted(path.name for path in folder.iterdir() if path.name.startswith(".") and not path.name.endswith(".tmp"))
    if left:
        sys.exit(f"left behind: {left}")


if __name__ == "__main__":
    main()
