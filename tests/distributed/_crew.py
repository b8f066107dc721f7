"""A `Crew` is worker processes that are started once and run case after case. A worker that fails or hangs ends them all, with its reason;
the next case starts a new crew."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from _cases import Case, Run, plan_of
from safetensors.torch import load_file

from _warm import Warm

WORKER = Path(__file__).parent / "_worker.py"
MOST_SECONDS = 150  # without an answer; the workers' own limit is a minute


class Crew:
    """So many processes at most. A case takes as many of them as its plan needs."""

    def __init__(self, size: int = 4, *, device: str = "cpu", backend: str = "gloo", environment: Mapping[str, str] | None = None) -> None:
        self.size, self.device, self.backend, self.environment = size, device, backend, environment
        self.program: subprocess.Popen[bytes] | Warm | None = None  # the parent of all workers
        self.lines: list[Any] = []  # to each worker
        self.replies: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.world, self.worlds = 0, 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Case) -> Run:
        """What rank 0 got; replicas that did not end with the same bits are a failure of their own."""
        size = plan_of(case).workers
        assert 1 < size <= self.size
        if self.program is None:
            self._start()
        if self.world != size:
            self.world, self.worlds = size, self.worlds + 1
        for line in self.lines[:size]:
            line.write(json.dumps({"meeting": str(self.folder / f"meeting-{self.worlds}"), "case": case}) + "\n")
        replies = self._replies(size)
        _same_bits([reply["digests"] for reply in replies])
        for kind in ("losses", "norms", "finite", "scale"):
            assert len({str(reply[kind]) for reply in replies}) == 1, f"workers do not agree on the {kind}"
        tensors = load_file(replies[0].pop("tensors"))
        parts = {
            kind: {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(kind)}
            for kind in ("gradient", "weight")
        }
        return Run(**replies[0], gradients=parts["gradient"], weights=parts["weight"])

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="carrywave-crew-")
        self.folder = Path(self._folder.name)
        self.world, self.replies = 0, queue.SimpleQueue()
        pairs = [(*os.pipe(), *os.pipe()) for _ in range(self.size)]
        ends = [f"{incoming}:{outgoing}" for incoming, _, _, outgoing in pairs]
        theirs = [end for incoming, _, _, outgoing in pairs for end in (incoming, outgoing)]
        # One thread each: the sums keep their order. cuBLAS repeats its bits only with a workspace of a fixed size.
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        with (self.folder / "log").open("w") as log:
            # A device is not to be known to a process that forks.
            process = Warm if self.device == "cpu" and sys.platform == "linux" else subprocess.Popen
            self.program = process(
                [sys.executable, str(WORKER), str(self.folder), self.device, self.backend, *ends],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=theirs,
                process_group=0,  # ended as one
                env=os.environ | own | {"CUBLAS_WORKSPACE_CONFIG": ":4096:2"} | dict(self.environment or {}),
            )
        for end in theirs:
            os.close(end)
        for rank, (_, to, back, _) in enumerate(pairs):
            self.lines.append(os.fdopen(to, "w", buffering=1))
            threading.Thread(target=_listen, args=(back, rank, self.replies), daemon=True).start()

    def _replies(self, size: int) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        while len(found) < size:
            try:
                rank, text = self.replies.get(timeout=MOST_SECONDS)
            except queue.Empty:
                self._fail(f"no answer from workers {sorted(set(range(size)) - set(found))} within {MOST_SECONDS} s")
            found[rank] = json.loads(text)
            if "error" in found[rank]:
                self._fail(f"worker {rank}: {found[rank]['error']}")
        return [found[rank] for rank in range(size)]

    def _fail(self, reason: str) -> NoReturn:
        log = (self.folder / "log").read_text()[-4000:]
        self.close()
        raise AssertionError(f"{reason}\n{log}")

    def close(self) -> None:
        """End the workers."""
        if self.program is None:
            return
        os.killpg(self.program.pid, signal.SIGKILL)
        self.program.wait()
        self.program = None
        for line in self.lines:
            with contextlib.suppress(BrokenPipeError):
                line.close()
        self.lines = []
        self._folder.cleanup()


def _listen(end: int, rank: int, replies: queue.SimpleQueue[tuple[int, str]]) -> None:
    with os.fdopen(end) as lines:
        for text in lines:
            replies.put((rank, text))
    replies.put((rank, json.dumps({"error": "it has ended"})))


def _same_bits(held: list[dict[str, str]]) -> None:
    """A weight is the same on all workers that hold it: replicas, and stages that share a tied one."""
    seen: dict[str, str] = {}
    for rank, digests in enumerate(held):
        for name, digest in digests.items():
            assert seen.setdefault(name, digest) == digest, f"{name} of rank {rank} differs in its bits from the same weight elsewhere"
