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

EVENTS = 180_000  # about as many bytes and calls as a save has
CALL = 4000  # worth as much as so many bytes, so that there is a fair chance that the end comes here
OPEN = Path.open


class Doom:
    """Kills this process at the given count of bytes written and calls made; of its last piece, a part is written."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            self.spend(CALL)
            result = real(*args, **more)
            self.spend(CALL)
            return result

        return called

    def open(self, path: Path, *args: Any, **more: Any) -> Any:
        file = OPEN(path, *args, **more)
        if "b" in "".join(args) and "w" in "".join(args):
            real = file.raw

            class Doomed:
                def __enter__(doomed) -> Any:
                    return doomed

                def __exit__(doomed, *error: object) -> None:
                    file.close()

                def write(doomed, data: Any) -> None:
                    view = memoryview(data).cast("B")
                    real.write(view[: max(self.left, 0)])
                    self.spend(len(view))

                def __getattr__(doomed, name: str) -> Any:
                    return getattr(file, name)

            return Doomed()
        return file


def state(value: int) -> Snapshot:
    tensors = {"w": torch.full((5000,), float(value)), "v": torch.full((5000,), float(value))}
    return Snapshot(tensors, {f"exp_avg/{name}": -tensor for name, tensor in tensors.items()}, meta={"value": value})


def whole(found: Snapshot) -> bool:
    wanted = state(found.meta["value"])
    groups = ("parameters", "optimizer")
    return all(torch.equal(getattr(found, group)[name], tensor) for group in groups for name, tensor in getattr(wanted, group).items())


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(kills)
    save(folder, 0, state(0), keep=2)
    newest, value, died = 0, 0, 0
    while died < kills:
        value += 1
        if (pid := os.fork()) == 0:
            doom = Doom(draw.randrange(EVENTS))
            os.replace, os.fsync = doom.call(os.replace), doom.call(os.fsync)
            Path.open = lambda path, *args, doom=doom, **more: doom.open(path, *args, **more)  # type: ignore[method-assign, assignment]
            save(folder, value, state(value), keep=2)
            os._exit(0)
        draw.random()  # the child's draw, and another one for the next child
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, -signal.SIGKILL):
            sys.exit(f"a child ended with {code}")
        died += code != 0
        found = load(folder)
        if not whole(found) or found.meta["value"] not in ((value,) if code == 0 else (newest, value)):
            sys.exit(f"after step {value}, ended with {code}, {newest} stood before and {found.meta} stands now")
        newest = found.meta["value"]
    if died and value == died:
        sys.exit("every child was killed: nothing shows that a save can succeed")
    save(folder, value + 1, state(value + 1), keep=1)
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if left != ["last", f"step-{value + 1:08d}.safetensors"]:
        sys.exit(f"left behind: {left}")


if __name__ == "__main__":
    main()
